"""What is optimised: factors on the squared error, right for every prediction.

A weighting is a function of log-SNR in x0 space; `weighting(log_snr, prediction)` turns it into the factor on that
prediction's own mean squared error (Min-SNR's conversions for all of them at once). `constant()` alone stays with the
prediction it is used on. Nothing is normalised: Adam does not care, gradient clipping does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kairostep.checks import finite, positive
from kairostep.diffusion.prediction import Prediction
from kairostep.diffusion.process import Process
from kairostep.registry import weightings
from kairostep.timesteps.representation import represent_value

Weighting = Callable[[Tensor, Prediction], Tensor]

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
    return X0Weighting(partial(torch.clamp, max=math.log(positive("gamma", gamma))), f"min_snr({gamma=})")


@weightings.register("soft_min_snr")
def soft_min_snr(gamma: float = 4.0) -> Weighting:
    """Return gamma SNR / (gamma + SNR) on x0 (k-diffusion), gamma = 1 / sigma_data**2."""
    return X0Weighting(
        partial(_log_soft_min_snr, log_gamma=math.log(positive("gamma", gamma))), f"soft_min_snr({gamma=})"
    )


@weightings.register("p2")
def p2(k: float = 1.0, gamma: float = 1.0) -> Weighting:
    """Return 1 / (k + SNR)**gamma on epsilon (Choi et al. 2022)."""
    log_weight = partial(_log_p2, log_k=math.log(positive("k", k)), gamma=finite("gamma", gamma))
    return X0Weighting(log_weight, f"p2({k=}, {gamma=})")


@weightings.register("debias")
def debias() -> Weighting:
    """Return 1 / sqrt(SNR) on epsilon (Yu et al. 2024); it grows without bound toward pure noise."""
    return X0Weighting(_half, "debias()")


@weightings.register("edm")
def edm(sigma_data: float = 0.5) -> Weighting:
    """Return (sigma**2 + sigma_data**2) / (sigma sigma_data)**2 on x0 (Karras et al. 2022): 1 on EDM's own target."""
    log_weight = partial(_log_sum, log_other=-2 * math.log(positive("sigma_data", sigma_data)))
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
