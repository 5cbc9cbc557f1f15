"""What is optimised: factors on the squared error, right for every prediction.

A weighting is a function of log-SNR in x0 space; `weighting(log_snr, prediction)` turns it into the factor on that
prediction's own mean squared error (Min-SNR's conversions for all of them at once). `constant()` alone stays with the
prediction it is used on. Nothing is normalised: Adam does not care, gradient clipping does.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kairostep.diffusion.prediction import Prediction
from kairostep.diffusion.process import Process
from kairostep.timesteps.arguments import finite, positive

Weighting = Callable[[Tensor, Prediction], Tensor]

LOG_SNR_LIMIT = 40.0  # beyond it, log-SNR counts as this: limits at zero and infinite SNR come out finite, never NaN


def in_x0_space(log_weight: Callable[[Tensor], Tensor]) -> Weighting:
    """Return the weighting whose factor on the squared error of x0 has this log, a function of log-SNR."""

    def weighting(log_snr: Tensor, prediction: Prediction) -> Tensor:
        log_snr = log_snr.clamp(-LOG_SNR_LIMIT, LOG_SNR_LIMIT)
        return (log_weight(log_snr) + prediction.log_x0_error(log_snr)).exp()

    return weighting


def constant() -> Weighting:
    """Return 1 on whatever is predicted: the simple loss of Ho et al. 2020 for epsilon."""

    def weighting(log_snr: Tensor, prediction: Prediction) -> Tensor:
        return torch.ones_like(log_snr)

    return weighting


def vlb(process: Process) -> Weighting:
    """Return the weights of the variational bound, `process.vlb_weight` for epsilon."""
    return in_x0_space(lambda log_snr: process.vlb_weight(process.t_at(log_snr)).log() + log_snr)


def min_snr(gamma: float = 5.0) -> Weighting:
    """Return min(SNR, gamma) on x0 (Hang et al. 2023)."""
    log_gamma = math.log(positive("gamma", gamma))
    return in_x0_space(lambda log_snr: log_snr.clamp(max=log_gamma))


def soft_min_snr(gamma: float = 4.0) -> Weighting:
    """Return gamma SNR / (gamma + SNR) on x0 (k-diffusion), gamma = 1 / sigma_data**2."""
    log_gamma = math.log(positive("gamma", gamma))
    return in_x0_space(lambda log_snr: -torch.logaddexp(-log_snr, torch.full_like(log_snr, -log_gamma)))


def p2(k: float = 1.0, gamma: float = 1.0) -> Weighting:
    """Return 1 / (k + SNR)**gamma on epsilon (Choi et al. 2022)."""
    log_k = math.log(positive("k", k))
    finite("gamma", gamma)
    return in_x0_space(lambda log_snr: log_snr - gamma * torch.logaddexp(log_snr, torch.full_like(log_snr, log_k)))


def debias() -> Weighting:
    """Return 1 / sqrt(SNR) on epsilon (Yu et al. 2024); it grows without bound toward pure noise."""
    return in_x0_space(lambda log_snr: log_snr / 2)


def edm(sigma_data: float = 0.5) -> Weighting:
    """Return (sigma**2 + sigma_data**2) / (sigma sigma_data)**2 on x0 (Karras et al. 2022): 1 on EDM's own target."""
    log_precision = -2 * math.log(positive("sigma_data", sigma_data))
    return in_x0_space(lambda log_snr: torch.logaddexp(log_snr, torch.full_like(log_snr, log_precision)))
