"""What the network predicts of x_t = alpha x0 + sigma noise, and the way back to x0."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kairostep.checks import positive


class Prediction(Protocol):
    """A target linear in x0 and noise; alpha and sigma have the shape of x0 or broadcast to it."""

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return what the network should output."""
        ...

    def to_x0(self, output: Tensor, xt: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return the clean data that this output stands for."""
        ...

    def log_x0_error(self, log_snr: Tensor) -> Tensor:
        """Return the log of the squared error in x0 that comes with a squared error of 1 in the output."""
        ...


@dataclass(frozen=True)
class EpsilonPrediction:
    """The noise. At zero SNR it says nothing about x0, and `to_x0` divides by 0."""

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return the noise."""
        return noise

    def to_x0(self, output: Tensor, xt: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return (x_t - sigma output) / alpha."""
        return (xt - sigma * output) / alpha

    def log_x0_error(self, log_snr: Tensor) -> Tensor:
        """Return -log(SNR)."""
        return -log_snr


@dataclass(frozen=True)
class X0Prediction:
    """The clean data."""

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return x0."""
        return x0

    def to_x0(self, output: Tensor, xt: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return the output."""
        return output

    def log_x0_error(self, log_snr: Tensor) -> Tensor:
        """Return 0."""
        return torch.zeros_like(log_snr)


@dataclass(frozen=True)
class VPrediction:
    """v = (alpha s noise - sigma x0 / s) / sqrt(alpha**2 s**2 + sigma**2), s = `sigma_data`.

    With s = 1 on a variance-preserving process this is alpha noise - sigma x0 (Salimans & Ho 2022); with EDM's
    sigma_data it is minus EDM's network target.
    """

    sigma_data: float = 1.0

    def __post_init__(self) -> None:
        """Check the standard deviation of the data."""
        positive("sigma_data", self.sigma_data, example=0.5)

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return v."""
        s = self.sigma_data
        return (alpha * s * noise - sigma * x0 / s) * (alpha.square() * s**2 + sigma.square()).rsqrt()

    def to_x0(self, output: Tensor, xt: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return c_skip x_t - c_out v."""
        s = self.sigma_data
        total = alpha.square() * s**2 + sigma.square()
        return alpha * s**2 / total * xt - sigma * s * total.rsqrt() * output

    def log_x0_error(self, log_snr: Tensor) -> Tensor:
        """Return log(s**2 / (1 + s**2 SNR)), for s = 1 the usual -log(1 + SNR)."""
        log_s2 = 2 * math.log(self.sigma_data)
        return log_s2 - F.softplus(log_snr + log_s2)


@dataclass(frozen=True)
class VelocityPrediction:
    """The velocity noise - x0 of flow matching."""

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return noise - x0."""
        return noise - x0

    def to_x0(self, output: Tensor, xt: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return (x_t - sigma output) / (alpha + sigma)."""
        return (xt - sigma * output) / (alpha + sigma)

    def log_x0_error(self, log_snr: Tensor) -> Tensor:
        """Return -2 log(1 + sqrt(SNR)): sigma**2 on the straight path."""
        return -2 * F.softplus(log_snr / 2)


EPSILON = EpsilonPrediction()
X0 = X0Prediction()
V = VPrediction()
VELOCITY = VelocityPrediction()
