"""What is optimised: factors on the squared error, right for every prediction.

A weighting is a function of log-SNR in x0 space; `weighting(log_snr, prediction)` turns it into the factor on that
prediction's own mean squared error (Min-SNR's conversions for all of them at once). `constant()` alone stays with the
prediction it is used on. Nothing is normalised: Adam does not care, gradient clipping does.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kairostep.arguments import arguments_of
from kairostep.checks import finite, positive
from kairostep.diffusion.prediction import Prediction
from kairostep.diffusion.process import Process
from kairostep.registry import samplers, weightings
from kairostep.timesteps.histogram import bin_index
from kairostep.timesteps.representation import represent_value
from kairostep.timesteps.sampler import TimestepSampler

Weighting = Callable[[Tensor, Prediction], Tensor]

NUM_DENSITY_BINS = 4000  # of a density as a weighting in continuous time: as many as fixed densities have
LOG_SNR_LIMIT = 40.0  # beyond it, log-SNR counts as this: limits at zero and infinite SNR come out finite, never NaN


@dataclass(frozen=True)
class X0Weighting:
    """The weighting whose factor on the squared error of x0 has the log `log_weight(log_snr)`.

    Args:
        log_weight: Log of the factor, as a function of log-SNR.
        call: How it prints: the call that makes it.
    """

    log_weight: Callable[[Tensor], Tensor]
    call: str = field(default="", compare=False)

    def __repr__(self) -> str:
        """Return the call that makes it, such as `min_snr(gamma=5.0)`."""
        return self.call or f"X0Weighting({represent_value(self.log_weight)})"

    def __call__(self, log_snr: Tensor, prediction: Prediction) -> Tensor:
        """Return the factor on the squared error of this prediction, in the shape of log_snr."""
        log_snr = log_snr.clamp(-LOG_SNR_LIMIT, LOG_SNR_LIMIT)
        return (self.log_weight(log_snr) + prediction.log_x0_error(log_snr)).exp()


@dataclass(frozen=True)
class ConstantWeighting:
    """The weighting that is 1 on whatever is predicted."""

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return "constant()"

    def __call__(self, log_snr: Tensor, prediction: Prediction) -> Tensor:
        """Return 1 in the shape of log_snr."""
        return torch.ones_like(log_snr)


@dataclass(frozen=True)
class DensityWeighting:
    """The weighting that trains by uniform draws what draws of a density train unweighted.

    Args:
        sampler: Whose density it is: a fixed one, or a learned one as it is now.
        process: Tells t from log-SNR.
        prediction: On whose squared error the density counts; None for whatever is predicted.
    """

    sampler: TimestepSampler
    process: Process
    prediction: Prediction | None = None
    relative: Tensor = field(init=False, repr=False, compare=False)  # (K,) density over that of uniform draws

    def __post_init__(self) -> None:
        """Read the density."""
        density = self.sampler.density(getattr(self.process, "num_steps", NUM_DENSITY_BINS)).double()
        object.__setattr__(self, "relative", density * len(density) / density.sum())

    def __repr__(self) -> str:
        """Return the call that makes it."""
        of_prediction = "" if self.prediction is None else f", prediction={self.prediction!r}"
        return f"as_weighting({self.sampler!r}, {self.process!r}{of_prediction})"

    def __call__(self, log_snr: Tensor, prediction: Prediction) -> Tensor:
        """Return the factor on the squared error of this prediction, in the shape of log_snr."""
        relative = self.relative.to(log_snr)[bin_index(self.process.t_at(log_snr), len(self.relative))]
        if self.prediction is None:
            return relative
        log_snr = log_snr.clamp(-LOG_SNR_LIMIT, LOG_SNR_LIMIT)
        return relative * (prediction.log_x0_error(log_snr) - self.prediction.log_x0_error(log_snr)).exp()


def as_weighting(sampler: TimestepSampler, process: Process, prediction: Prediction | None = None) -> Weighting:
    """Return the density of a sampler as a weighting: what is optimised, apart from where compute goes.

    Draws of a logit-normal density train another objective than uniform draws. With
    `ks.Objective(process, ks.VELOCITY, ks.as_weighting(ks.LogitNormal(), process))` that objective can be trained with
    any draws, such as those of `ks.RootLoss(loss_weight=objective.weight)`.

    Args:
        sampler: Whose density it is. Its weights must be 1: with 1/density it trains what uniform draws do, and with
            weights of its own, as `Speed`, its density alone is not its objective.
        process: The process that is trained.
        prediction: On whose squared error the density counts, for a network that predicts another; by default on that
            of whatever is predicted.
    """
    if not isinstance(sampler, TimestepSampler) or not hasattr(process, "t_at"):
        raise ValueError(
            f"as_weighting takes a sampler and a process, got {sampler!r} and {process!r}: pass for instance "
            "ks.as_weighting(ks.LogitNormal(), ks.FlowProcess())"
        )
    if prediction is not None and not hasattr(prediction, "log_x0_error"):
        raise ValueError(f"prediction must be one such as ks.VELOCITY or ks.EPSILON, got {prediction!r}")
    together = list(with_inner(sampler))
    if any(each.unbiased for each in together):
        raise ValueError(
            f"a weighting must come of a density that changes the objective, got {sampler!r}, whose weights undo it: "
            "pass a sampler with unbiased=False, such as ks.LogitNormal(), or leave as_weighting out and draw by it"
        )
    if any(each.own_weights for each in together):
        raise ValueError(
            f"a weighting must come of a density alone, got {sampler!r}, whose objective has weights too: pass a "
            "sampler whose weights are 1, such as ks.LogitNormal(), or leave as_weighting out and draw by it"
        )
    return DensityWeighting(sampler, process, prediction)


def with_inner(sampler: TimestepSampler) -> Iterator[TimestepSampler]:
    """Yield a sampler and all inside it."""
    yield sampler
    for each in sampler.inner:
        yield from with_inner(each)


@weightings.register("density")
def density_weighting(process: Process, of: str = "logit_normal") -> Weighting:
    """Return the density of a fixed sampler as a weighting: `as_weighting` by name.

    Args:
        process: The process that is trained.
        of: Name of the sampler, with its default options.
    """
    kind = samplers.find(of)
    arguments = arguments_of(kind)
    missing = [name for name, argument in arguments.items() if argument.required and name != "process"]
    if missing:
        raise ValueError(
            f"--weighting.of must name a density that needs no options, got {of}, which needs {', '.join(missing)}: "
            f"in Python, pass them to ks.as_weighting(ks.{kind.__name__}(...), process)"
        )
    sampler: TimestepSampler = kind(**({"process": process} if "process" in arguments else {}))
    if sampler.learns:
        raise ValueError(
            f"--weighting.of must name a fixed density, got {of}, which learns: pass for instance logit_normal"
        )
    return as_weighting(sampler, process)


@weightings.register("constant")
def constant() -> Weighting:
    """Return 1 on whatever is predicted: the simple loss of Ho et al. 2020 for epsilon."""
    return ConstantWeighting()


@weightings.register("vlb")
def vlb(process: Process) -> Weighting:
    """Return the weights of the variational bound, `process.vlb_weight` for epsilon."""
    process.vlb_weight(torch.zeros(1))  # raises here, not in training, where the bound is infinite
    return X0Weighting(partial(_log_vlb, process=process), f"vlb({process!r})")


@weightings.register("min_snr")
def min_snr(gamma: float = 5.0) -> Weighting:
    """Return min(SNR, gamma) on x0 (Hang et al. 2023)."""
    return X0Weighting(partial(torch.clamp, max=math.log(positive("gamma", gamma, example=5.0))), f"min_snr({gamma=})")


@weightings.register("soft_min_snr")
def soft_min_snr(gamma: float = 4.0) -> Weighting:
    """Return gamma SNR / (gamma + SNR) on x0 (k-diffusion), gamma = 1 / sigma_data**2."""
    return X0Weighting(
        partial(_log_soft_min_snr, log_gamma=math.log(positive("gamma", gamma, example=5.0))), f"soft_min_snr({gamma=})"
    )


@weightings.register("p2")
def p2(k: float = 1.0, gamma: float = 1.0) -> Weighting:
    """Return 1 / (k + SNR)**gamma on epsilon (Choi et al. 2022)."""
    log_weight = partial(_log_p2, log_k=math.log(positive("k", k)), gamma=finite("gamma", gamma, example=5.0))
    return X0Weighting(log_weight, f"p2({k=}, {gamma=})")


@weightings.register("debias")
def debias() -> Weighting:
    """Return 1 / sqrt(SNR) on epsilon (Yu et al. 2024); it grows without bound toward pure noise."""
    return X0Weighting(_half, "debias()")


@weightings.register("edm")
def edm(sigma_data: float = 0.5) -> Weighting:
    """Return (sigma**2 + sigma_data**2) / (sigma sigma_data)**2 on x0 (Karras et al. 2022): 1 on EDM's own target."""
    log_weight = partial(_log_sum, log_other=-2 * math.log(positive("sigma_data", sigma_data, example=0.5)))
    return X0Weighting(log_weight, f"edm({sigma_data=})")


# Logs of factors on the squared error of x0, at the top level so that objectives can be pickled.


def _log_sum(log_snr: Tensor, log_other: float) -> Tensor:
    """Return log(SNR + other)."""
    return torch.logaddexp(log_snr, torch.full_like(log_snr, log_other))


def _half(log_snr: Tensor) -> Tensor:
    return log_snr / 2


def _log_vlb(log_snr: Tensor, process: Process) -> Tensor:
    return process.vlb_weight(process.t_at(log_snr)).log() + log_snr


def _log_soft_min_snr(log_snr: Tensor, log_gamma: float) -> Tensor:
    return log_snr + log_gamma - _log_sum(log_snr, log_gamma)


def _log_p2(log_snr: Tensor, log_k: float, gamma: float) -> Tensor:
    return log_snr - gamma * _log_sum(log_snr, log_k)
