"""The samplers that a patched script can name."""

from functools import cache
from typing import get_args

from kairostep.by_name import SamplerName
from kairostep.integrations.diffusers_scripts import sampler_for_script

FIRST = ("uniform", "root_loss")  # the script's own density, and the default


@cache
def sampler_names() -> tuple[str, ...]:
    """Return the names of samplers that a script can make without arguments and show all that they need."""
    others = sorted(set(get_args(SamplerName)) - {*FIRST})
    return tuple(name for name in (*FIRST, *others) if is_possible(name))


def is_possible(name: str) -> bool:
    """Return whether a script can make and use the sampler of this name."""
    try:
        sampler_for_script(name)
    except ValueError:
        return False
    return True
