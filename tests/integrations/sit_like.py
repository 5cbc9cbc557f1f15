"""SiT's transport, as far as training sees it, written again from the paper's equations in the shape of willisma/SiT.

Call shapes: `Transport.check_interval(train_eps, sample_eps)`, `sample(x1)` with times in [t0, t1], 1 being data,
`training_losses(model, x1, model_kwargs)` that returns a dict with `loss` (B,), and a path with `plan(t, x0, x1)`,
`compute_mu_t(t, x0, x1)`, `compute_alpha_t(t)` and `compute_sigma_t(t)`, each with its slope, `compute_drift(x, t)`.
"""

import math
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor


class ModelType(Enum):
    """What the network predicts."""

    NOISE = auto()
    SCORE = auto()
    VELOCITY = auto()


class WeightType(Enum):
    """What the error is multiplied by."""

    NONE = auto()
    VELOCITY = auto()
    LIKELIHOOD = auto()


def expand(t: Tensor, x: Tensor) -> Tensor:
    return t.view(-1, *[1] * (x.ndim - 1))


class ICPlan:
    """The straight path."""

    def compute_alpha_t(self, t: Tensor) -> tuple[Any, Any]:
        """Return the factor of the data and its slope."""
        return t, 1

    def compute_sigma_t(self, t: Tensor) -> tuple[Any, Any]:
        """Return the factor of the noise and its slope."""
        return 1 - t, -1

    def compute_drift(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return minus the drift and the diffusion."""
        t = expand(t, x)
        alpha, alpha_slope = self.compute_alpha_t(t)
        sigma, sigma_slope = self.compute_sigma_t(t)
        ratio = alpha_slope / alpha
        return -ratio * x, ratio * sigma**2 - sigma * sigma_slope

    def compute_mu_t(self, t: Tensor, x0: Tensor, x1: Tensor) -> Tensor:
        """Return the point on the path."""
        t = expand(t, x1)
        return self.compute_alpha_t(t)[0] * x1 + self.compute_sigma_t(t)[0] * x0

    def plan(self, t: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the time, the point there and its velocity."""
        slopes = self.compute_alpha_t(expand(t, x1))[1], self.compute_sigma_t(expand(t, x1))[1]
        return t, self.compute_mu_t(t, x0, x1), slopes[0] * x1 + slopes[1] * x0


class GVPCPlan(ICPlan):
    """The path on a circle."""

    def compute_alpha_t(self, t: Tensor) -> tuple[Any, Any]:
        """Return the factor of the data and its slope."""
        return (t * math.pi / 2).sin(), math.pi / 2 * (t * math.pi / 2).cos()

    def compute_sigma_t(self, t: Tensor) -> tuple[Any, Any]:
        """Return the factor of the noise and its slope."""
        return (t * math.pi / 2).cos(), -math.pi / 2 * (t * math.pi / 2).sin()


class VPCPlan(ICPlan):
    """The variance-preserving path, whose noise has an infinite slope at the data."""

    def compute_alpha_t(self, t: Tensor) -> tuple[Any, Any]:
        """Return the factor of the data and its slope."""
        log = -0.25 * (1 - t) ** 2 * 19.9 - 0.5 * (1 - t) * 0.1
        alpha = log.exp()
        return alpha, alpha * (0.5 * (1 - t) * 19.9 + 0.5 * 0.1)

    def compute_sigma_t(self, t: Tensor) -> tuple[Any, Any]:
        """Return the factor of the noise and its slope."""
        alpha, slope = self.compute_alpha_t(t)
        sigma = (1 - alpha**2).sqrt()
        return sigma, -alpha * slope / sigma


class Transport:
    """What is trained."""

    def __init__(
        self,
        path: ICPlan | None = None,
        model_type: ModelType = ModelType.VELOCITY,
        loss_type: WeightType = WeightType.NONE,
        train_eps: float = 0.0,
    ) -> None:
        self.path_sampler, self.model_type, self.loss_type = path or ICPlan(), model_type, loss_type
        self.train_eps, self.sample_eps = train_eps, 0.5 * train_eps

    def check_interval(self, train_eps: float, sample_eps: float, **options: Any) -> tuple[float, float]:
        """Return the first and the last time that is trained at."""
        if isinstance(self.path_sampler, VPCPlan):
            return 0, 1 - train_eps
        return (0, 1) if self.model_type is ModelType.VELOCITY else (train_eps, 1 - train_eps)

    def sample(self, x1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return times, noise and data."""
        x0 = torch.randn_like(x1)
        first, last = self.check_interval(self.train_eps, self.sample_eps)
        t = torch.rand((x1.shape[0],)) * (last - first) + first
        return t.to(x1), x0, x1

    def training_losses(
        self, model: Callable[..., Tensor], x1: Tensor, model_kwargs: dict[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Return what is predicted and the loss of each sample."""
        t, x0, x1 = self.sample(x1)
        t, xt, ut = self.path_sampler.plan(t, x0, x1)
        output = model(xt, t, **(model_kwargs or {}))
        if self.model_type is ModelType.VELOCITY:
            return {"pred": output, "loss": (output - ut).square().flatten(1).mean(1)}
        _, drift = self.path_sampler.compute_drift(xt, t)
        sigma = self.path_sampler.compute_sigma_t(expand(t, xt))[0]
        weight = {
            WeightType.NONE: 1,
            WeightType.VELOCITY: (drift / sigma) ** 2,
            WeightType.LIKELIHOOD: drift / sigma**2,
        }[self.loss_type]
        error = output - x0 if self.model_type is ModelType.NOISE else output * sigma + x0
        return {"pred": output, "loss": (weight * error.square()).flatten(1).mean(1)}
