"""Makes samplers and weightings by the names of the command line and the arguments of the library."""

from collections.abc import Callable
from typing import Any, Literal, overload

from kairostep.arguments import arguments_of
from kairostep.diffusion import Weighting
from kairostep.registry import import_outside, nearest, samplers, weightings
from kairostep.renamed_options import new_names
from kairostep.timesteps import TimestepSampler

# For type checkers, which cannot read the registry; a test keeps both in step
WeightingName = Literal["constant", "debias", "density", "edm", "min_snr", "p2", "soft_min_snr", "vlb"]
SamplerName = Literal[
    "adaptive",
    "beta",
    "curriculum",
    "gradient_variance",
    "infonoise",
    "laplace",
    "least_noise",
    "log_normal_sigma",
    "logit_normal",
    "loss_second_moment",
    "mode",
    "root_loss",
    "speed",
    "tabulated",
    "uniform",
]


@overload
def from_name(name: SamplerName, /, **arguments: Any) -> TimestepSampler: ...
@overload
def from_name(name: WeightingName, /, **arguments: Any) -> Weighting: ...
@overload
def from_name(name: str, /, **arguments: Any) -> Any: ...
def from_name(name: str, /, **arguments: Any) -> TimestepSampler | Weighting:
    """Return the sampler or weighting of this name.

    `ks.from_name("min_snr", gamma=5.0)` is `ks.min_snr(gamma=5.0)`, and `ks.from_name("speed", process=process)` is
    `ks.Speed(process)`.

    Args:
        name: As in `kairostep train --sampler=` and `--weighting=`, including names that other packages add.
        arguments: Those of its class or function.
    """
    maker = find_maker(name)
    check_arguments(name, maker, arguments)
    made: TimestepSampler | Weighting = maker(**arguments)
    return made


def find_maker(name: str) -> Callable[..., Any]:
    """Return the class or function of a name. The ValueError for an unknown name lists all names."""
    if name in samplers.removed:
        raise ValueError(samplers.removed[name])
    if ":" in name:
        return import_outside("name", name)  # type: ignore[no-any-return]
    for registry in (samplers, weightings):
        if name in registry:
            return registry.find(name)  # type: ignore[no-any-return]
    raise ValueError(
        f"name must be that of a sampler or a weighting, got {name!r}{_nearest(name, [*samplers, *weightings])}: "
        f"samplers are {', '.join(samplers)}; weightings are {', '.join(weightings)}"
    )


def check_arguments(name: str, maker: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Raise ValueError for arguments that the class or function does not take, and for missing ones."""
    taken = arguments_of(maker)
    for given in arguments:
        if given in (renamed := new_names("sampler", name)):
            raise ValueError(f"{given}= of {name} is now {renamed[given]}=: pass {renamed[given]}={arguments[given]!r}")
        if given not in taken:
            takes = ", ".join(f"{key}=" for key in taken) or "no arguments"
            raise ValueError(
                f"{name} takes {takes}, got {given}={_nearest(given, taken)}: see help(ks.{maker.__name__})"
            )
    missing = [key for key, argument in taken.items() if argument.required and key not in arguments]
    if missing:
        example = ", ".join(f"{key}=..." for key in missing)
        raise ValueError(
            f"{name} needs {' and '.join(f'{key}=' for key in missing)}, got {', '.join(arguments) or 'nothing'}: "
            f'pass ks.from_name("{name}", {example}), see help(ks.{maker.__name__})'
        )


def _nearest(name: str, valid: Any) -> str:
    near = nearest(name, valid)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
