"""Options that were renamed, so that settings of earlier versions can still be read."""

from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, Mapping[str, Mapping[str, str]]] = {  # part -> its name -> old option -> new option
    "sampler": {"loss_second_moment": {"uniform_prob": "floor"}},
}


def with_new_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config.yaml with renamed options under their new names."""
    return {key: _with_new_options(key, value) for key, value in config.items()}


def _with_new_options(part: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    renamed = new_names(part, value.get("name"))
    return {renamed.get(option, option): setting for option, setting in value.items()}


def new_names(part: str, name: Any) -> Mapping[str, str]:
    """Return old option -> new option for the part of this name."""
    return RENAMED.get(part, {}).get(str(name), {})
