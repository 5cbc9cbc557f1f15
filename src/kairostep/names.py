"""Samplers and weightings by name: the names of the command line, the arguments of the library."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints, overload

from kairostep.diffusion import Weighting, constant, debias, edm, min_snr, p2, soft_min_snr, vlb
from kairostep.renamed_options import new_names
from kairostep.timesteps import (
    Adaptive,
    Curriculum,
    FixedBeta,
    GradientVariance,
    InfoNoise,
    Laplace,
    LeastNoise,
    LogitNormal,
    LogNormalSigma,
    LossSecondMoment,
    Mode,
    RootLoss,
    Speed,
    Tabulated,
    TimestepSampler,
    Uniform,
)

SAMPLERS: dict[str, type[TimestepSampler]] = {
    "uniform": Uniform,
    "logit_normal": LogitNormal,
    "mode": Mode,
    "beta": FixedBeta,
    "tabulated": Tabulated,
    "log_normal_sigma": LogNormalSigma,
    "laplace": Laplace,
    "speed": Speed,
    "loss_second_moment": LossSecondMoment,
    "root_loss": RootLoss,
    "least_noise": LeastNoise,
    "infonoise": InfoNoise,
    "gradient_variance": GradientVariance,
    "adaptive": Adaptive,
    "curriculum": Curriculum,
}
WEIGHTINGS: dict[str, Callable[..., Weighting]] = {
    "constant": constant,
    "vlb": vlb,
    "min_snr": min_snr,
    "soft_min_snr": soft_min_snr,
    "p2": p2,
    "debias": debias,
    "edm": edm,
}
REMOVED = {  # names of samplers that are no longer here -> why, and what to take
    "progress": "the sampler progress was removed, since no setting of it beat uniform draws: take root_loss "
    "(ks.RootLoss()), which asks the network for nothing"
}
MIN_BEGINNING = 3  # letters of a name that are taken for its beginning
CLOSE = 0.75  # similarity of a slip, as difflib measures it: one wrong letter in four at most
WeightingName = Literal["constant", "vlb", "min_snr", "soft_min_snr", "p2", "debias", "edm"]  # for type checkers
SamplerName = Literal[
    "uniform",
    "logit_normal",
    "mode",
    "beta",
    "tabulated",
    "log_normal_sigma",
    "laplace",
    "speed",
    "loss_second_moment",
    "root_loss",
    "least_noise",
    "infonoise",
    "gradient_variance",
    "adaptive",
    "curriculum",
]


@dataclass(frozen=True)
class Argument:
    """One argument of a function or class."""

    hint: Any
    required: bool
    default: Any = None


@overload
def from_name(name: SamplerName, /, **arguments: Any) -> TimestepSampler: ...
@overload
def from_name(name: WeightingName, /, **arguments: Any) -> Weighting: ...
@overload
def from_name(name: str, /, **arguments: Any) -> TimestepSampler | Weighting: ...
def from_name(name: str, /, **arguments: Any) -> TimestepSampler | Weighting:
    """Return the sampler or weighting of this name, made with the arguments that its class or function takes.

    `ks.from_name("min_snr", gamma=5.0)` is `ks.min_snr(gamma=5.0)`, and `ks.from_name("speed", process=process)` is
    `ks.Speed(process)`. The names are those of `kairostep train --sampler=` and `--weighting=`.
    """
    makers: dict[str, Callable[..., TimestepSampler | Weighting]] = {**SAMPLERS, **WEIGHTINGS}
    if name in REMOVED:
        raise ValueError(REMOVED[name])
    if name not in makers:
        raise ValueError(
            f"name must be that of a sampler or a weighting, got {name!r}{_nearest(name, makers)}: samplers are "
            f"{', '.join(SAMPLERS)}; weightings are {', '.join(WEIGHTINGS)}"
        )
    maker = makers[name]
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
    return maker(**arguments)


def arguments_of(call: Callable[..., Any]) -> dict[str, Argument]:
    """Return the arguments of a function or class, those of `**options: Unpack[...]` among them."""
    hints = get_type_hints(call.__init__ if inspect.isclass(call) else call)
    arguments: dict[str, Argument] = {}
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            required = parameter.default is parameter.empty
            arguments[name] = Argument(hints.get(name, Any), required, None if required else parameter.default)
            continue
        for unpacked in get_args(hints.get(name)):
            arguments |= {key: Argument(hint, required=False) for key, hint in get_type_hints(unpacked).items()}
    return arguments


def nearest(name: str, valid: Iterable[str]) -> list[str]:
    """Return the name that a slip of the hand turns into this one, else those that begin with it.

    Leading dashes and case do not count: with them any two short flags would look alike.
    """
    plain = {_plain(one): one for one in valid}
    written = _plain(name)
    if close := difflib.get_close_matches(written, list(plain), n=1, cutoff=CLOSE):
        return [plain[close[0]]]
    return [one for key, one in plain.items() if len(written) >= MIN_BEGINNING and key.startswith(written)]


def unknown(kind: str, name: str, valid: Iterable[str]) -> str:
    """Return the message for a name that is not among the valid ones: those near it, or all."""
    if kind == "sampler" and name in REMOVED:
        return REMOVED[name]
    valid = list(valid)
    if near := nearest(name, valid):
        return f"unknown {kind} {name}: did you mean {' or '.join(near)}?"
    return f"unknown {kind} {name}: valid are {', '.join(valid) or 'none'}"


def _plain(name: str) -> str:
    return str(name).lstrip("-").lower().replace("-", "_")


def _nearest(name: str, valid: Iterable[str]) -> str:
    near = nearest(name, valid)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
