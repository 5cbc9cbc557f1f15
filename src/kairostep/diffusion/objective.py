"""The loss: takes t, returns one value per sample."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kairostep.diffusion.prediction import EPSILON, Prediction
from kairostep.diffusion.process import Process
from kairostep.diffusion.weighting import Weighting, constant, vlb
from kairostep.timesteps.loss_aware import MAX_LOG_SNR
from kairostep.timesteps.representation import represent

Target = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`target(x0, xt, alpha, sigma)`: what stands for x0 in the regression target."""


class Objective:
    """`objective(model, x0, t)` gives the weighted squared error of each sample, (B,).

    The model is called as model(x_t, time, **cond) and returns a tensor, a tuple with it first, or an object with
    `.sample`, as in diffusers;
    time is the step for a DiscreteProcess, t for a flow, log(sigma) / 4 for EDM.
    """

    _has_read_times: bool = False  # on a GPU

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
        if not hasattr(prediction, "target"):
            raise ValueError(f"prediction must be ks.EPSILON, ks.X0, ks.V or ks.VELOCITY, got {prediction!r}")
        try:
            self.weighting(torch.zeros(1), prediction)
        except TypeError as error:
            raise ValueError(
                f"weighting must take (log_snr, prediction), got {weighting!r}: call its maker, as in ks.min_snr()"
            ) from error

    def __repr__(self) -> str:
        """Return the call that makes it, with its process, prediction and weighting."""
        return represent(self)

    def __call__(
        self, model: Callable[..., Any], x0: Tensor, t: Tensor, *, noise: Tensor | None = None, **cond: Any
    ) -> Tensor:
        """Return the losses (B,) of x0 (B, ...) at t (B,), in float32 or better; `noise` is drawn unless given."""
        check_batch_and_times(x0, t)
        self._check_range(t)
        noise = torch.randn_like(x0) if noise is None else noise
        if noise.shape != x0.shape:
            raise ValueError(
                f"noise must have the shape of x0, {tuple(x0.shape)}, got {tuple(noise.shape)}: torch.randn_like(x0)"
            )
        at = self.process.at(t)
        alpha, sigma = (factor.to(x0.dtype).view(-1, *[1] * (x0.ndim - 1)) for factor in (at.alpha, at.sigma))
        xt = alpha * x0 + sigma * noise
        seen = xt if at.input_scale is None else at.input_scale.to(x0.dtype).view_as(alpha) * xt
        returned = model(seen, at.time, **cond)
        output: Tensor = returned[0] if isinstance(returned, tuple) else getattr(returned, "sample", returned)
        if output.shape != x0.shape:
            raise ValueError(
                f"the model must return the shape of its input, {tuple(x0.shape)}, got {tuple(output.shape)}: "
                "a model that also predicts a variance has to be cut, for instance output.chunk(2, dim=1)[0]"
            )
        if self.target is not None:
            own, x0 = x0, self.target(x0, xt, alpha, sigma)
            noise = torch.where(sigma > 0, noise + alpha * (own - x0) / sigma, noise)  # that leads from x0 to xt
        target = self.prediction.target(x0, noise, alpha, sigma)
        dtype = torch.promote_types(torch.promote_types(output.dtype, target.dtype), torch.float32)
        losses = F.mse_loss(output.to(dtype), target.to(dtype), reduction="none")
        losses = losses.flatten(1).mean(1) if losses.ndim > 1 else losses  # (B,)
        weight = self.weighting(at.log_snr, self.prediction).to(dtype)
        return losses * weight

    def weight(self, t: Tensor) -> Tensor:
        """Return the factor (N,) that this loss puts on the squared error at t (N,): `RootLoss(loss_weight=)`."""
        return self.weighting(self.process.log_snr(t), self.prediction)

    def is_weighted(self) -> bool:
        """Return whether the factor on the squared error differs from 1 at some t, beyond rounding."""
        weight = self.weight((torch.arange(100) + 0.5) / 100)
        return not torch.allclose(weight, torch.ones_like(weight), rtol=1e-4)

    def x0_weight(self, t: Tensor) -> Tensor:
        """Return the factor (N,) on the squared error of x0 at t (N,): `InfoNoise(loss_weight=)`.

        Beyond the log-SNR at which `InfoNoise` takes a process to be at its end, the factor is that at the end.
        """
        log_snr = self.process.log_snr(t).clamp(-MAX_LOG_SNR, MAX_LOG_SNR)
        return self.weighting(log_snr, self.prediction) / self.prediction.log_x0_error(log_snr).exp()

    def reweighting(self, weighting: Weighting) -> Callable[[Tensor], Tensor]:
        """Return the function of t that turns this loss into the one under another weighting.

        `Adaptive(policy, objective.reweighting(ks.vlb(process)))` pays by the bound whatever is predicted and trained.
        """
        return partial(self._reweighted, weighting)

    def bound_reweighting(self) -> Callable[[Tensor], Tensor]:
        """Return the function of t that turns this loss into the variational bound, by which the paper rewards."""
        return self.reweighting(vlb(self.process))

    def _check_range(self, t: Tensor) -> None:
        """Raise for times outside [0, 1]: always on a CPU, elsewhere at the first call, since reading them waits.

        Times that have no values yet, while something is compiled or recorded, are not checked.
        """
        if torch.compiler.is_compiling() or type(t) is not Tensor or t.numel() == 0:
            return
        if t.device.type != "cpu":
            if self._has_read_times or t.is_meta or (t.is_cuda and torch.cuda.is_current_stream_capturing()):
                return
            self._has_read_times = True
        try:
            low, high = (end.item() for end in t.detach().aminmax())
        except RuntimeError:  # under torch.vmap, or where waiting for the device is an error
            return
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"t must be in [0, 1], 0 being clean data and 1 pure noise, got {low:.6g} to {high:.6g}: pass drawn.t, "
                "and for step i of T pass (i + 0.5) / T"
            )

    def _reweighted(self, weighting: Weighting, t: Tensor) -> Tensor:
        return weighting(self.process.log_snr(t), self.prediction) / self.weight(t)


def check_batch_and_times(x0: Tensor, t: Tensor) -> None:
    """Raise unless these are clean samples (B, ...) and one time (B,) for each, in floating point."""
    if not isinstance(x0, Tensor):
        raise ValueError(
            f"x0 must be a tensor, the clean batch (B, ...), got {type(x0).__name__}: write objective(model, x0, t)"
        )
    if x0.ndim == 0:
        raise ValueError("x0 must be a batch (B, ...), got a single number: pass x0[None] and t[None]")
    if not isinstance(t, Tensor):
        raise ValueError(
            f"t must be a float in [0, 1] for each row of x0, {tuple(x0.shape[:1])}, got {type(t).__name__}: pass "
            "drawn.t, where drawn is what `sample` returned"
        )
    if t.shape != x0.shape[:1] or not t.is_floating_point():
        raise ValueError(
            f"t must be a float in [0, 1] for each row of x0, {tuple(x0.shape[:1])}, "
            f"got {t.dtype} of shape {tuple(t.shape)}: pass drawn.t, not drawn.index(...)"
        )
    if not x0.is_floating_point():
        fix = "scale images to [-1, 1] first, and in loss_at pass rows of the batch, x0[rows]"
        raise ValueError(f"x0 must be floating point, got {x0.dtype}: {fix}")
