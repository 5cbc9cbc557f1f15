"""Turns noise into samples."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kairostep.diffusion import Prediction
from kairostep.diffusion.conditions import class_condition
from kairostep.diffusion.process import Process
from kairostep.generation.solvers import Plan, plan_for

StepNoise = Callable[[int], Tensor]
"""`step_noise(k)`: the noise (B, ...) that ancestral step k = 1, 2, ... adds."""


@torch.no_grad()
def generate(
    model: Callable[..., Any],
    process: Process,
    prediction: Prediction,
    noise: Tensor,  # (B, ...) standard normal
    *,
    solver: str = "ddim",  # Euler's method for flows and EDM; or "ddpm", or "heun"
    steps: int | None = None,  # 200 for ddim, 1000 for ddpm, 50 for heun
    clip: bool = True,  # keep x0 of pixels in [-1, 1] on the way; not where a flow or EDM is native
    labels: Tensor | None = None,  # (B,)
    guidance: float = 1.0,  # 1 is none; above 1, samples are more typical of their class
    null_label: int | None = None,  # of guidance: the class that stands for none
    step_noise: StepNoise | None = None,  # of ddpm, torch.randn_like unless given
) -> Tensor:
    """Return samples (B, ...); on a GPU nothing in the loop waits for the device."""
    plan = plan_for(process, prediction, solver, steps, clip=clip)
    network = with_guidance(model, labels, guidance, null_label)
    x = noise * plan.start
    times = plan.times.to(noise.device, non_blocking=True)
    for k, (key, alpha, sigma) in enumerate(zip(plan.keys, plan.alpha, plan.sigma, strict=True)):
        seen = x if plan.to_input is None else x * plan.to_input[k]
        output = network(seen, times[k]).to(x.dtype)
        if plan.native != prediction:
            xt = x if plan.to_xt is None else x * plan.to_xt[k]
            output = convert(output, xt, prediction, plan.native, alpha, sigma, clip=plan.clips)
        x = plan.scheduler.step(output, key, x, **added_noise(plan, k, x, step_noise)).prev_sample
    return x


def with_guidance(
    model: Callable[..., Any], labels: Tensor | None, guidance: float, null_label: int | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function (x, time ()) -> output in float32: null + guidance (conditional - null), in one batch."""
    if guidance == 1:
        cond = class_condition(labels)
        return lambda x, time: _tensor(model(x, time.expand(len(x)), **cond))
    if labels is None or null_label is None:
        raise ValueError(
            f"guidance needs a model with classes, labels and the null class, got guidance {guidance} without: "
            "pass guidance=1.0, or a model that was trained with --label_dropout"
        )
    both = torch.cat([labels, torch.full_like(labels, null_label)])  # (2B,)

    def guided(x: Tensor, time: Tensor) -> Tensor:
        returned = model(torch.cat([x, x]), time.expand(2 * len(x)), **class_condition(both))
        conditional, null = _tensor(returned).chunk(2)
        return null + guidance * (conditional - null)

    return guided


def _tensor(returned: Any) -> Tensor:
    output: Tensor = returned[0] if isinstance(returned, tuple) else getattr(returned, "sample", returned)
    return output.float() if output.dtype.itemsize < 4 else output  # half precision is for the network alone


def convert(
    output: Tensor, xt: Tensor, prediction: Prediction, native: Prediction, alpha: Tensor, sigma: Tensor, *, clip: bool
) -> Tensor:
    """Return the network's output converted, by way of x0, to the prediction that the scheduler expects."""
    x0 = prediction.to_x0(output, xt, alpha, sigma)
    x0 = x0.clamp(-1, 1) if clip else x0
    return native.target(x0, (xt - alpha * x0) / sigma, alpha, sigma)


def added_noise(plan: Plan, k: int, x: Tensor, step_noise: StepNoise | None) -> dict[str, Any]:
    """Return the noise that turns a DDIM step into a DDPM step, or None for other solvers and the last step."""
    if plan.noise_scale is None or k == len(plan.keys) - 1:
        return {}
    noise = torch.randn_like(x) if step_noise is None else step_noise(k + 1)
    return {"eta": 1.0, "use_clipped_model_output": True, "variance_noise": plan.noise_scale[k] * noise}
