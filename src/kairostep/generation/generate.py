"""Noise to samples, deterministically, in few steps."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor

from kairostep.diffusion import DiscreteProcess, FlowProcess, Prediction
from kairostep.diffusion.process import Process
from kairostep.generation.schedulers import native_prediction, scheduler_for

MIN_ALPHA = 1e-5  # a flow starts at alpha = 0, where noise says nothing about x0 and would divide by it


@torch.no_grad()
def generate(
    model: Callable[..., Any],
    process: Process,
    prediction: Prediction,
    noise: Tensor,  # (B, ...) standard normal
    *,
    steps: int = 50,
    clip: bool = True,  # keep x0 of pixels in [-1, 1] on the way; not where a flow or EDM is native
    labels: Tensor | None = None,  # (B,)
) -> Tensor:
    """Return samples (B, ...) by DDIM, Euler's method for flows, or Euler's method for EDM."""
    native = native_prediction(process, prediction)
    scheduler: Any = scheduler_for(process, native, clip=clip)
    if isinstance(process, DiscreteProcess):
        scheduler = DDIMScheduler.from_config(scheduler.config, timestep_spacing="trailing")
    scheduler.set_timesteps(steps, device=noise.device)
    cond = {} if labels is None else {"class_labels": labels}
    x = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    for time in scheduler.timesteps:
        seen = scheduler.scale_model_input(x, time) if hasattr(scheduler, "scale_model_input") else x
        returned = model(seen, told(process, time).expand(len(x)), **cond)
        output = getattr(returned, "sample", returned).float()
        if native != prediction:
            output = convert(output, x, process, prediction, native, time, clip=clip)
        x = scheduler.step(output, time, x).prev_sample
    return x


def told(process: Process, time: Tensor) -> Tensor:
    """Return what the network is told at a scheduler's time, which for flows counts to 1000."""
    return time / 1000 * process.time_scale if isinstance(process, FlowProcess) else time


def convert(
    output: Tensor,
    xt: Tensor,
    process: Process,
    prediction: Prediction,
    native: Prediction,
    time: Tensor,
    *,
    clip: bool,
) -> Tensor:
    """Return the network's output as the scheduler wants it, by way of x0."""
    t = t_of(process, time).to(xt.dtype)
    alpha, sigma = process.alpha(t[None]).clamp(min=MIN_ALPHA), process.sigma(t[None])
    x0 = prediction.to_x0(output, xt, alpha, sigma)
    x0 = x0.clamp(-1, 1) if clip else x0
    return native.target(x0, (xt - alpha * x0) / sigma, alpha, sigma)


def t_of(process: Process, time: Tensor) -> Tensor:
    """Return t in [0, 1] for a scheduler's time: a step, t * 1000, or log(sigma) / 4."""
    if isinstance(process, DiscreteProcess):
        return (time + 0.5) / process.num_steps
    return time / 1000 if isinstance(process, FlowProcess) else process.t_at(-8 * time)
