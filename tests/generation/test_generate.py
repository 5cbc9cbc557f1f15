"""Samples: what diffusers' own pipelines and schedulers give, and the distribution that an exact network stands for.

For Gaussian data the exact network is known. It is affine, and so is every deterministic sampler with it: from the
noise 0 and the noise 1 follow mean and standard deviation of all that is generated, without drawing anything.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import DDIMPipeline, DDIMScheduler, EDMEulerScheduler, FlowMatchEulerDiscreteScheduler, UNet2DModel
from torch import Tensor
from torch.testing import assert_close

from kairostep.diffusion import EPSILON, VELOCITY, X0, DiscreteProcess, EDMProcess, FlowProcess, Prediction, V
from kairostep.diffusion.process import Process
from kairostep.generation import generate
from kairostep.networks import ddpm_unet

MEAN, STD = 0.3, 0.6
PROCESSES: dict[str, Process] = {
    "linear": DiscreteProcess.linear(),
    "cosine": DiscreteProcess.cosine(),
    "flow": FlowProcess(1000.0),
    "flow, time in [0, 1]": FlowProcess(),
    "edm": EDMProcess(),
    "edm, other range": EDMProcess(sigma_data=0.7, sigma_min=0.01, sigma_max=50.0),
}
every_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
PREDICTIONS = {EPSILON: "epsilon", X0: "sample", V: "v_prediction"}


def network(in_channels: int = 3, **options: Any) -> UNet2DModel:
    torch.manual_seed(0)
    model = ddpm_unet(8, in_channels, channels=8, multipliers=(1, 2), blocks=1, attention=(), dropout=0.0, **options)
    for parameter in model.parameters():  # diffusers starts some at 0
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def noise_of(num: int = 2, channels: int = 3) -> Tensor:
    return torch.randn(num, channels, 8, 8, generator=torch.Generator().manual_seed(1))


class Exact:
    """What a network that was trained to perfection on N(mean, std**2) would return."""

    def __init__(self, process: Process, prediction: Prediction, mean: float = MEAN, std: float = STD) -> None:
        self.process, self.prediction, self.mean, self.std = process, prediction, mean, std

    def __call__(self, seen: Tensor, time: Tensor) -> Tensor:
        """Return the prediction for x_t as the process shows it, (B, 1), at the times (B,)."""
        t = self.t_of(time.double())
        alpha, sigma = (f(t)[:, None] for f in (self.process.alpha, self.process.sigma))
        scale = (sigma**2 + self.process.sigma_data**2).rsqrt() if isinstance(self.process, EDMProcess) else 1.0
        xt = seen.double() / scale
        gain = alpha * self.std**2 / (alpha**2 * self.std**2 + sigma**2)
        x0 = self.mean + gain * (xt - alpha * self.mean)
        return self.prediction.target(x0, (xt - alpha * x0) / sigma, alpha, sigma).to(seen.dtype)

    def t_of(self, time: Tensor) -> Tensor:
        """Return t in [0, 1] of what the network is told."""
        if isinstance(self.process, DiscreteProcess):
            return (time + 0.5) / self.process.num_steps
        if isinstance(self.process, FlowProcess):
            return time / self.process.time_scale
        return self.process.t_at(-2 * 4 * time)


def natural(process: Process) -> Prediction:
    if isinstance(process, EDMProcess):
        return process.prediction
    return VELOCITY if isinstance(process, FlowProcess) else EPSILON


# Against diffusers


@pytest.mark.parametrize(("prediction", "name"), PREDICTIONS.items())
@pytest.mark.parametrize(
    ("process", "betas"),
    [
        (DiscreteProcess.linear(), {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}),
        (DiscreteProcess.cosine(), {"beta_schedule": "squaredcos_cap_v2"}),
        (DiscreteProcess.scaled_linear(), {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}),
    ],
)
@pytest.mark.parametrize("steps", [1, 8])
def test_a_discrete_process_generates_as_the_pipeline_of_diffusers(
    process: DiscreteProcess, betas: dict[str, Any], prediction: Prediction, name: str, steps: int
) -> None:
    model = network()
    pipeline = DDIMPipeline(model, DDIMScheduler(prediction_type=name, timestep_spacing="trailing", **betas))
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    expected = pipeline(2, generator, num_inference_steps=steps, output_type="np").images  # NHWC in [0, 1]
    samples = generate(model, process, prediction, noise_of(), steps=steps)
    assert_close((samples / 2 + 0.5).clamp(0, 1), torch.from_numpy(expected).permute(0, 3, 1, 2), rtol=0, atol=2e-4)
    assert not samples.requires_grad


@pytest.mark.parametrize("steps", [1, 7])
def test_a_flow_is_followed_by_euler_steps(steps: int) -> None:
    model = network()
    x = noise_of()
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000)
    scheduler.set_timesteps(steps)
    times = [*torch.linspace(1, 0.001, steps).tolist(), 0.0]
    assert_close(scheduler.sigmas, torch.tensor(times))
    with torch.no_grad():
        for t, after in pairwise(times):
            x = x + (after - t) * model(x, torch.full((2,), 1000 * t)).sample
    assert_close(generate(model, FlowProcess(1000.0), VELOCITY, noise_of(), steps=steps), x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 7])
def test_edm_is_followed_by_the_scheduler_of_diffusers(steps: int) -> None:
    model = network()
    scheduler = EDMEulerScheduler(sigma_min=0.002, sigma_max=80.0, sigma_data=0.5, prediction_type="epsilon")
    scheduler.set_timesteps(steps)
    x = noise_of() * scheduler.init_noise_sigma
    with torch.no_grad():
        for time in scheduler.timesteps:
            target = -model(scheduler.scale_model_input(x, time), time).sample  # ours is minus EDM's own
            x = scheduler.step(target, time, x).prev_sample
    process = EDMProcess()
    samples = generate(model, process, process.prediction, noise_of(), steps=steps)
    assert_close(samples, x, rtol=1e-4, atol=1e-4)


# With the exact network


def affine(process: Process, prediction: Prediction, steps: int, model: Callable[..., Any] | None = None) -> Tensor:
    """Return mean and standard deviation of what is generated from standard normal noise."""
    noise = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    model = model or Exact(process, prediction)
    at_zero, at_one = generate(model, process, prediction, noise, steps=steps, clip=False).squeeze(1).double()
    return torch.stack([at_zero, at_one - at_zero])


def limit(process: Process) -> Tensor:
    """Return mean and standard deviation that infinitely many steps would give, from the noise that is started at."""
    last = torch.tensor([1.0], dtype=torch.float64)
    alpha, sigma = process.alpha(last), process.sigma(last)
    start = math.sqrt(process.sigma_max**2 + 1) if isinstance(process, EDMProcess) else 1.0
    ratio = STD / (alpha**2 * STD**2 + sigma**2).sqrt()
    return torch.cat([MEAN - ratio * alpha * MEAN, ratio * start])


@every_process
def test_samples_of_an_exact_network_have_the_mean_and_deviation_of_the_data(process: Process) -> None:
    errors = [(affine(process, natural(process), steps) - limit(process)).abs() for steps in (125, 250, 500)]
    assert float(errors[-1].max()) < 0.01
    for coarse, fine in pairwise(errors):  # methods of first order: twice the steps, half of it
        ratio = coarse / fine
        assert bool(((ratio > 1.4) & (ratio < 5) | (coarse < 1e-3)).all()), errors
    assert_close(limit(process), torch.tensor([MEAN, STD], dtype=torch.float64), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(
    ("process", "prediction"),
    [
        (process, prediction)
        for process in PROCESSES.values()
        for prediction in (EPSILON, X0, V, VELOCITY)
        if not (isinstance(process, FlowProcess) and prediction == EPSILON)  # see the next test
    ],
)
def test_what_the_network_predicts_changes_nothing_if_it_is_exact(process: Process, prediction: Prediction) -> None:
    expected = affine(process, X0, 20)
    tolerance = 1e-3 if prediction == EPSILON else 1e-5  # float32 noise, divided by an alpha that is almost 0
    assert_close(affine(process, prediction, 20), expected, rtol=tolerance, atol=tolerance)
    assert_close(affine(process, natural(process), 20), expected, rtol=1e-3, atol=1e-3)


def test_noise_predicted_on_a_flow_loses_one_step_only() -> None:
    """At t = 1 the noise alone says nothing about x0: the first step is blind."""
    process, steps = FlowProcess(1000.0), 100
    found, native = affine(process, EPSILON, steps), affine(process, VELOCITY, steps)
    assert_close(found, native, rtol=0, atol=2 / steps * max(MEAN, STD))


@every_process
@pytest.mark.parametrize("prediction", [EPSILON, X0, V, VELOCITY, None])
@pytest.mark.parametrize("clip", [True, False])
def test_any_network_gives_finite_samples(process: Process, prediction: Prediction | None, clip: bool) -> None:
    samples = generate(network(), process, prediction or natural(process), noise_of(), steps=4, clip=clip)
    assert samples.shape == (2, 3, 8, 8)
    assert samples.dtype == torch.float32
    assert bool(samples.isfinite().all())


@pytest.mark.parametrize(
    ("process", "prediction"),
    [
        (process, prediction)
        for process in PROCESSES.values()
        for prediction in (EPSILON, X0, V, VELOCITY)
        if isinstance(process, DiscreteProcess) or prediction != natural(process)  # which diffusers does not clip
    ],
)
def test_clipping_keeps_pixels_in_their_range_and_its_absence_leaves_latents_alone(
    process: Process, prediction: Prediction
) -> None:
    wide = Exact(process, prediction, std=5.0)
    noise = torch.tensor([[-3.0], [0.0], [3.0]])
    assert float(generate(wide, process, prediction, noise, steps=20).abs().max()) < 1.001
    assert float(generate(wide, process, prediction, noise, steps=20, clip=False).abs().max()) > 5


@every_process
def test_labels_are_passed_on_and_the_global_stream_is_left_alone(process: Process) -> None:
    model, labels = network(num_classes=3), torch.tensor([0, 3])
    before = torch.get_rng_state()
    both = generate(model, process, natural(process), noise_of(), steps=3, labels=labels)
    assert torch.equal(torch.get_rng_state(), before)
    again = generate(model, process, natural(process), noise_of(), steps=3, labels=labels)
    other = generate(model, process, natural(process), noise_of(), steps=3, labels=labels.flip(0))
    assert torch.equal(both, again)
    assert not torch.allclose(both, other)
