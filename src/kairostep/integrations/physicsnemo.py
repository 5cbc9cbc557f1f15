"""Samplers as a `NoiseScheduler` of NVIDIA PhysicsNeMo: one of its schedulers, with times drawn by ours.

scheduler = SampledNoiseScheduler(ks.RootLoss(), EDMNoiseScheduler())
loss_fn = MSEDSMLoss(model, scheduler, reduction="none")
...
loss = loss_fn(x0)
scheduler.learn(loss, weighted=True)
loss.mean().backward()
"""

import math
from typing import Any

import torch
from torch import Tensor

from kairostep.integrations.noise_levels import DrawnLevels, LogNormal, OfTime, ReadProcess
from kairostep.timesteps import TimestepSampler


class SampledNoiseScheduler(DrawnLevels):
    """A noise scheduler whose times come from a sampler and whose loss weights carry the sampler's.

    t is the share of the scheduler's own training times that are less noisy. So `Uniform` draws as the scheduler does,
    and `RootLoss` keeps its objective. All other attributes are the scheduler's. Do not put it inside a
    DomainParallelNoiseScheduler, which replaces the drawn times and so loses their weights.

    Args:
        quantile: The scheduler's time at each t. Known for EDM, StudentTEDM, EDMLogUniform, VP and VE.
    """

    def __init__(self, sampler: TimestepSampler, scheduler: Any, quantile: OfTime | None = None) -> None:
        for name in ("sample_time", "add_noise", "loss_weight", "timesteps", "init_latents", "get_denoiser"):
            if not callable(getattr(scheduler, name, None)):
                raise ValueError(
                    f"scheduler must be a PhysicsNeMo NoiseScheduler, got {scheduler!r} without {name}(): "
                    "pass for instance EDMNoiseScheduler()"
                )
        super().__init__(sampler, quantile or quantile_of(scheduler), "PhysicsNeMo's sample_time")
        self.scheduler = scheduler

    @property
    def process(self) -> ReadProcess:
        """The scheduler's process, for samplers and weightings that take one."""
        scheduler, quantile = self.scheduler, self.quantile
        if not (callable(getattr(scheduler, "alpha", None)) and callable(getattr(scheduler, "sigma", None))):
            raise ValueError(
                f"a process is read from alpha(t) and sigma(t), got {scheduler!r}, which lacks them: "
                "pass a LinearGaussianNoiseScheduler"
            )
        return ReadProcess(lambda t: scheduler.alpha(quantile(t)), lambda t: scheduler.sigma(quantile(t)), quantile)

    def sample_time(
        self, N: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:  # (N,)
        """Return N diffusion times for training."""
        return self.draw(N, device, dtype)

    def add_noise(self, x0: Tensor, time: Tensor) -> Tensor:
        """Return x0 (B, ...) noised at these times (B,)."""
        noisy: Tensor = self.scheduler.add_noise(x0, time)
        return noisy

    def loss_weight(self, t: Tensor) -> Tensor:
        """Return the scheduler's weight, (N,) or (N, C), times the sampler's: 1 for times that were not drawn last."""
        weight: Tensor = self.scheduler.loss_weight(t)
        return weight * self.weight(t).to(weight.dtype).view(-1, *[1] * (weight.ndim - 1))

    def timesteps(self, num_steps: int, **options: Any) -> Tensor:
        """Return the times of generation, as the scheduler has them."""
        times: Tensor = self.scheduler.timesteps(num_steps, **options)
        return times

    def init_latents(self, spatial_shape: tuple[int, ...], tN: Tensor, **options: Any) -> Tensor:
        """Return the noise that generation starts from, as the scheduler has it."""
        latents: Tensor = self.scheduler.init_latents(spatial_shape, tN, **options)
        return latents

    def get_denoiser(self, **options: Any) -> Any:
        """Return the scheduler's denoiser."""
        return self.scheduler.get_denoiser(**options)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet, while a copy or a pickle is put together
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def quantile_of(scheduler: Any) -> OfTime:
    """Return the time under which a share t of the scheduler's training times lies."""
    owner = next((cls.__name__ for cls in type(scheduler).__mro__ if "sample_time" in vars(cls)), "")
    if owner in ("EDMNoiseScheduler", "StudentTEDMNoiseScheduler"):
        return LogNormal(scheduler.P_mean, scheduler.P_std)
    if owner in ("EDMLogUniformNoiseScheduler", "VENoiseScheduler"):
        low, high = math.log(scheduler.sigma_min), math.log(scheduler.sigma_max)
        return lambda t: scheduler.sigma_inv((low + t * (high - low)).exp())
    if owner == "VPNoiseScheduler":
        return lambda t: scheduler.epsilon_s + t * (scheduler.t_max - scheduler.epsilon_s)
    raise ValueError(
        f"how {type(scheduler).__name__} draws its training times is not known: pass quantile=, the function of t "
        "in (0, 1) that returns the time under which a share t of them lies"
    )
