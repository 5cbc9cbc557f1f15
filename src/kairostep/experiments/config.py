"""Reads the settings of an experiment from YAML and `--key=value`, and writes them as YAML."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kairostep.bounded_files import Unreadable, parse_yaml, read_yaml
from kairostep.experiments.settings import Component as Component
from kairostep.experiments.settings import Config as Config
from kairostep.registry import unknown
from kairostep.renamed_options import with_new_names

COMPONENTS = tuple(f.name for f in fields(Config) if f.type is Component)
NAMES = tuple(f.name for f in fields(Config))
LATER = {"steps", "output", "resume", "workers", "cache", "trackers", "keep_checkpoints", "checkpoint_every"}
LATER |= {"log_every", "density_every", "evaluate_every", "held_out_images", "sample_every", "sample_steps"}
LATER |= {"fid_every", "fid_images", "inception", "inception_sha256", "features", "keep_every", "rank_timeout"}
# `LATER`: settings that a resumed run may change, since they do not influence the weights
UNSET = "not set"
DESCRIPTIONS: Mapping[Any, str] = {
    Component: "a name, or a mapping with a name and options",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    NoneType: "null",
}


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as plain data, in the order of its fields."""
    return {name: _plain(getattr(config, name)) for name in NAMES}


def _plain(value: Any) -> Any:
    if isinstance(value, Component):
        return {"name": value.name, **value.options}
    return list(value) if isinstance(value, tuple) else value


def from_dict(raw: Mapping[str, Any]) -> Config:
    """Return the config that plain data describes. Unknown keys and wrong types raise ValueError."""
    for key in raw:
        if key not in NAMES:
            raise ValueError(unknown("key", str(key), NAMES))
    hints = get_type_hints(Config)
    return Config(**{key: decode(key, hints[key], value) for key, value in raw.items()})


def decode(key: str, hint: Any, value: Any) -> Any:
    """Return a YAML value as the type that its key has. `1,2` is a list too. A wrong type raises ValueError."""
    try:
        return _decode(hint, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{key} must be {_describe(hint)}, got {value!r}") from error


def _decode(hint: Any, value: Any) -> Any:
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return _decode_union(parts, value)
    if kind in (tuple, list, Sequence):
        return _decode_list(kind, parts, value)
    if kind is Literal and value in parts:
        return value
    if hint is Any or (isinstance(value, bool | NoneType) and type(value) is hint):
        return value
    if hint is Component:
        return _decode_component(value)
    if hint is bool and value in ("true", "false"):
        return value == "true"
    if hint is int and isinstance(value, int | str) and not isinstance(value, bool):
        return int(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e5
    if hint in (float, str, Path) and not isinstance(value, bool | NoneType):
        return hint(value)
    raise TypeError(f"{value!r} is no {hint}")


def _decode_union(hints: Sequence[Any], value: Any) -> Any:
    """Return the value as the first type that it fits."""
    for hint in hints:
        try:
            return _decode(hint, value)
        except (TypeError, ValueError, OverflowError):
            continue
    raise TypeError(f"{value!r} is none of {hints}")


def _decode_list(kind: Any, hints: Sequence[Any], value: Any) -> Any:
    if isinstance(value, str):
        value = value.split(",") if value else []
    if not isinstance(value, list | tuple):
        raise TypeError(f"{value!r} is no list")
    if kind is tuple and ... not in hints:
        return tuple(_decode(hint, one) for hint, one in zip(hints, value, strict=True))
    return (list if kind is list else tuple)(_decode(hints[0], one) for one in value)


def _decode_component(value: Any) -> Component:
    if isinstance(value, str):
        return Component(value)
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise TypeError("neither a name nor a mapping with one")
    return Component(value["name"], {key: option for key, option in value.items() if key != "name"})


def _describe(hint: Any) -> str:
    if get_origin(hint) in (tuple, list, Sequence):
        return f"a list, [{', '.join('...' if kind is ... else _describe(kind) for kind in get_args(hint))}]"
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    return DESCRIPTIONS.get(hint) or " or ".join(map(_describe, get_args(hint))) or str(hint)


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """Return the config changed by arguments `--key=value` or `--key value`.

    `--sampler=adaptive` names a part and drops the options of the part before it. `--sampler.floor=0.2` sets an option.
    """
    raw = to_dict(config)
    pairs = list(_pairs(overrides))
    for key, value in sorted(pairs, key=lambda pair: "." in pair[0]):  # names first: options belong to the new one
        part, _, option = key.partition(".")
        if part not in NAMES:
            raise ValueError(unknown("key", f"--{key}", [f"--{name}" for name in NAMES]))
        if option and part not in COMPONENTS:
            raise ValueError(f"--{part} must be a single value, it has no option {option!r}: write --{part}={value}")
        if option:
            if not isinstance(raw[part], Mapping):
                raise ValueError(
                    f"--{part} must be {DESCRIPTIONS[Component]}, got {raw[part]!r}: "
                    f"name it, as in --{part}={to_dict(config)[part]['name']}, before its options"
                )
            raw[part] = {**raw[part], option: value}
        elif part in COMPONENTS and isinstance(value, str):
            raw[part] = raw[part] if raw[part]["name"] == value else {"name": value}
        else:
            raw[part] = value
    changed = {key for key, _ in pairs}
    if raw["process"] != to_dict(config)["process"] and "prediction" not in changed:
        raw["prediction"] = None  # the usual one of the new process
    return from_dict(raw)


def _pairs(overrides: Sequence[str]) -> Iterable[tuple[str, Any]]:
    waiting = list(overrides)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("--") or len(argument) < 3:
            raise ValueError(f"settings must be written --key=value, got {argument!r}")
        key, equals, value = argument[2:].partition("=")
        if not equals:
            bare = not waiting or waiting[0].startswith("--")
            value = "true" if bare else waiting.pop(0)
        try:
            yield key.replace("-", "_"), parse_yaml(value) if value else value
        except Unreadable as error:
            raise ValueError(f"--{key} must be a YAML value, got {value!r}: quote it if it is text") from error


def load(path: Path, *, pipes: bool = False) -> Config:
    """Return the config of a YAML file, such as `config.yaml` of a run, without its section `provenance`.

    Options that were renamed since get their new names.

    Args:
        path: The YAML file.
        pipes: Whether the file may be a pipe, as in `--config <(command)`.
    """
    try:
        raw = read_yaml(path, pipes=pipes)
    except (OSError, Unreadable) as error:
        raise ValueError(f"--config must be a readable YAML file, got {str(path)!r}: {error}") from error
    if not isinstance(raw, Mapping):
        raise ValueError(f"--config must hold `key: value` lines, got {str(path)!r} with {type(raw).__name__}")
    try:
        return from_dict(with_new_names({key: value for key, value in raw.items() if key != "provenance"}))
    except ValueError as error:
        raise ValueError(f"{error} (in {path})") from error


def differences(old: Config, new: Config) -> list[str]:
    """Return a line `key: old -> new` for each setting or option that differs and influences the weights."""
    before, after = to_dict(old), to_dict(new)
    free = LATER - {"steps"} if new.schedule == "cosine" else LATER  # a cosine depends on the number of steps
    changes: list[str] = []
    for key in NAMES:
        one, other = before[key], after[key]
        if key in free or one == other:
            continue
        if key in COMPONENTS and one["name"] == other["name"]:
            options = [(f"{key}.{name}", one.get(name, UNSET), other.get(name, UNSET)) for name in {**one, **other}]
            changes += [f"{name}: {value_text(x)} -> {value_text(y)}" for name, x, y in options if not _same(x, y)]
        else:
            one, other = (part["name"] if key in COMPONENTS else part for part in (one, other))
            changes.append(f"{key}: {value_text(one)} -> {value_text(other)}")
    return changes


def _same(one: Any, other: Any) -> bool:
    """Whether two values mean the same. Earlier versions stored the list 1,2,2 as text."""
    written = next((value for value in (one, other) if isinstance(value, str)), "")
    listed = next((value for value in (one, other) if isinstance(value, list)), None)
    return bool(one == other or (listed is not None and parse_yaml(f"[{written}]") == listed))


def value_text(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
