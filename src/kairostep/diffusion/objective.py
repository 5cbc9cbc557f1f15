"""The loss: takes t, returns one value per sample."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kairostep.diffusion.prediction import EPSILON, Prediction
from kairostep.diffusion.process import Process
from kairostep.diffusion.weighting import LOG_SNR_LIMIT, Weighting, constant

Target = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`target(x0, xt, alpha, sigma)`: what stands for x0 in the regression target."""


class Objective:
    """`objective(model, x0, t)` gives the weighted squared error of each sample, (B,).

    The model is called as model(x_t, time, **cond) and returns a tensor or an object with `.sample`, as in diffusers;
    time is the step for a DiscreteProcess, t for a flow, log(sigma) / 4 for EDM.
    """

    def __init__(
        self,
        process: Process,
        prediction: Prediction = EPSILON,
        weighting: Weighting | None = None,  # constant()
        target: Target | None = None,  # x0 itself
    ) -> None:
        self.process = process
        self.prediction = prediction
        self.weighting = weighting or constant()
        self.target = target

    def __call__(
        self, model: Callable[..., Any], x0: Tensor, t: Tensor, *, noise: Tensor | None = None, **cond: Any
    ) -> Tensor:
        """Return the losses (B,) of x0 (B, ...) at t (B,), in float32 or better; `noise` is drawn unless given."""
        if t.shape != x0.shape[:1]:
            raise ValueError(f"t must have one time per row of x0, {tuple(x0.shape[:1])}, got {tuple(t.shape)}")
        noise = torch.randn_like(x0) if noise is None else noise
        if noise.shape != x0.shape:
            raise ValueError(f"noise must have the shape of x0, {tuple(x0.shape)}, got {tuple(noise.shape)}")
        alpha, sigma = (
            f(t).to(x0.dtype).view(-1, *[1] * (x0.ndim - 1)) for f in (self.process.alpha, self.process.sigma)
        )
        xt = alpha * x0 + sigma * noise
        scale = self.process.input_scale(t).to(x0.dtype).view_as(alpha)
        returned = model(scale * xt, self.process.time(t), **cond)
        output: Tensor = getattr(returned, "sample", returned)
        if output.shape != x0.shape:
            raise ValueError(
                f"the model must return the shape of its input, {tuple(x0.shape)}, got {tuple(output.shape)}: "
                "a model that also predicts a variance has to be cut, for instance output.chunk(2, dim=1)[0]"
            )
        if self.target is not None:
            x0 = self.target(x0, xt, alpha, sigma)
            noise = torch.where(sigma > 0, (xt - alpha * x0) / sigma, noise)
        error = output - self.prediction.target(x0, noise, alpha, sigma)
        dtype = torch.promote_types(error.dtype, torch.float32)
        losses = error.to(dtype).square().flatten(1).mean(1)  # (B,)
        weight = self.weighting(self.process.log_snr(t), self.prediction).to(dtype)
        return losses * weight

    def x0_weight(self, log_snr: Tensor) -> Tensor:
        """Return the factor that this loss puts on the squared error of x0, as `InfoNoise(loss_weight=)` wants it."""
        log_snr = log_snr.clamp(-LOG_SNR_LIMIT, LOG_SNR_LIMIT)
        return self.weighting(log_snr, self.prediction) / self.prediction.log_x0_error(log_snr).exp()
