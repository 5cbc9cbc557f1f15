"""DDPM, DDIM and Heun: what diffusers' own give, and the distribution that an exact network stands for.

With an exact network for Gaussian data all solvers are affine in their noise: mean and covariance of what they generate
follow from unit vectors, without drawing anything.
"""

from typing import Any

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, FlowMatchHeunDiscreteScheduler, HeunDiscreteScheduler
from diffusers.pipelines.ddpm import pipeline_ddpm
from diffusers.schedulers import scheduling_ddpm
from exact import COVARIANCE, MEAN, ExactGaussian, natural, square_root
from small_network import network, our_noise
from torch import Tensor
from torch.testing import assert_close

from kairostep.diffusion import EPSILON, VELOCITY, X0, DiscreteProcess, EDMProcess, FlowProcess, Prediction, V
from kairostep.diffusion.process import Process
from kairostep.generation import generate, network_evaluations, noise_of_images, steps_of
from kairostep.generation.solvers import plan_for

PROCESSES: dict[str, Process] = {
    "linear": DiscreteProcess.linear(),
    "cosine": DiscreteProcess.cosine(),
    "scaled linear": DiscreteProcess.scaled_linear(),
    "flow": FlowProcess(1000.0),
    "edm": EDMProcess(),
    "edm, other range": EDMProcess(sigma_data=0.7, sigma_min=0.01, sigma_max=50.0),
}
PREDICTIONS = {EPSILON: "epsilon", X0: "sample", V: "v_prediction"}


# Against diffusers


@pytest.mark.parametrize(("prediction", "name"), PREDICTIONS.items())
@pytest.mark.parametrize("process", [DiscreteProcess.linear(10, 1e-3, 0.5), DiscreteProcess.cosine(10)])
@pytest.mark.parametrize("clip", [True, False])
def test_ddpm_is_the_pipeline_of_diffusers_given_the_same_numbers(
    process: DiscreteProcess, prediction: Prediction, name: str, clip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, steps = network(), process.num_steps
    numbers = (our_noise(step) for step in range(steps))
    for module in (pipeline_ddpm, scheduling_ddpm):
        monkeypatch.setattr(module, "randn_tensor", lambda shape, **_: next(numbers))
    scheduler = DDPMScheduler(
        steps,
        trained_betas=process.betas.tolist(),
        variance_type="fixed_large",
        prediction_type=name,
        clip_sample=clip,
    )
    pipeline = DDPMPipeline(model, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(2, num_inference_steps=steps, output_type="np").images  # NHWC in [0, 1]
    samples = generate(
        model, process, prediction, our_noise(0), solver="ddpm", steps=steps, clip=clip, step_noise=our_noise
    )
    assert next(numbers, None) is None
    assert_close((samples / 2 + 0.5).clamp(0, 1), torch.from_numpy(expected).permute(0, 3, 1, 2), rtol=0, atol=5e-4)


def test_all_steps_of_ddpm_are_those_of_its_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    process, x = DiscreteProcess.linear(), our_noise(0)
    scheduler = DDPMScheduler(trained_betas=process.betas.tolist(), variance_type="fixed_large")
    numbers = (our_noise(step) for step in range(1, 1000))
    monkeypatch.setattr(scheduling_ddpm, "randn_tensor", lambda shape, **_: next(numbers))
    for time in scheduler.timesteps:
        x = scheduler.step(torch.tanh(x) * 0.9, time, x).prev_sample
    samples = generate(
        lambda x, t: torch.tanh(x) * 0.9, process, EPSILON, our_noise(0), solver="ddpm", step_noise=our_noise
    )
    assert_close(samples, x, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize(("prediction", "name"), PREDICTIONS.items())
@pytest.mark.parametrize("clip", [True, False])
def test_heun_is_the_scheduler_of_diffusers(prediction: Prediction, name: str, clip: bool) -> None:
    model, process = network(), DiscreteProcess.scaled_linear()
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    scheduler = HeunDiscreteScheduler(prediction_type=name, use_karras_sigmas=True, clip_sample=clip, **betas)
    scheduler.set_timesteps(7)
    x = our_noise(0) * scheduler.init_noise_sigma
    with torch.no_grad():
        for time in scheduler.timesteps:
            x = scheduler.step(model(scheduler.scale_model_input(x, time), time).sample, time, x).prev_sample
    samples = generate(model, process, prediction, our_noise(0), solver="heun", steps=7, clip=clip)
    assert_close(samples, x, rtol=1e-3, atol=1e-3)


def test_heun_on_a_flow_is_the_scheduler_of_diffusers() -> None:
    model, x = network(), our_noise(0)
    scheduler = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps(7)
    with torch.no_grad():
        for time in scheduler.timesteps:
            x = scheduler.step(model(x, time).sample, time, x).prev_sample
    assert_close(generate(model, FlowProcess(1000.0), VELOCITY, our_noise(0), solver="heun", steps=7), x)


@pytest.mark.parametrize("process", [EDMProcess(), EDMProcess(sigma_data=0.7, sigma_min=0.01, sigma_max=50.0)])
def test_heun_on_edm_is_algorithm_1_of_karras_et_al(process: EDMProcess) -> None:
    model, num, s = network(), 6, process.sigma_data
    ramp = torch.linspace(0, 1, num, dtype=torch.float64)
    ends = process.sigma_max ** (1 / 7), process.sigma_min ** (1 / 7)
    levels = [*((ends[0] + ramp * (ends[1] - ends[0])) ** 7).tolist(), 0.0]

    def slope(x: Tensor, sigma: float) -> Tensor:
        total = sigma**2 + s**2
        told = torch.full((len(x),), sigma).log() / 4
        output = -model((x * total**-0.5).float(), told).sample  # our V is minus EDM's target F
        return (x - (s**2 / total * x + sigma * s * total**-0.5 * output)) / sigma

    x = our_noise(0).double() * levels[0]
    with torch.no_grad():
        for i in range(num):
            d, step = slope(x, levels[i]), levels[i + 1] - levels[i]
            euler = x + step * d
            x = euler if i == num - 1 else x + step * (d + slope(euler, levels[i + 1])) / 2
    samples = generate(model, process, process.prediction, our_noise(0), solver="heun", steps=num)
    assert_close(samples, x.float(), rtol=1e-3, atol=1e-3)


# With the exact network


def response(process: Process, solver: str, steps: int, prediction: Prediction | None = None) -> tuple[Tensor, Tensor]:
    """Return mean (2,) and covariance (2, 2) of what a deterministic solver makes of standard normal noise."""
    prediction = prediction or natural(process)
    model = ExactGaussian(process, prediction)
    noise = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    made = generate(model, process, prediction, noise, solver=solver, steps=steps, clip=False).double()
    assert model.num_calls == network_evaluations(solver, steps)
    linear = made[1:] - made[0]
    return made[0], linear.T @ linear


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
@pytest.mark.parametrize(("solver", "tolerance"), [("ddim", 0.02), ("heun", 0.01)])
def test_mean_and_covariance_are_those_of_the_data(process: Process, solver: str, tolerance: float) -> None:
    mean, covariance = response(process, solver, 200 if solver == "ddim" else 50)
    start = 0.02 if process is PROCESSES["scaled linear"] else 0.01  # what the last step still shows of the data
    assert_close(mean, MEAN, rtol=0, atol=start)
    assert_close(covariance, COVARIANCE, rtol=0, atol=tolerance)


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_heun_converges_much_faster_than_ddim(process: Process) -> None:
    """At the same number of network evaluations, against the limit of small steps."""
    limit = torch.cat([part.flatten() for part in response(process, "heun", 250)])
    heun, euler = (
        (torch.cat([part.flatten() for part in response(process, solver, steps)]) - limit).abs().max()
        for solver, steps in (("heun", 50), ("ddim", 99))
    )
    assert float(heun) < 5e-3
    assert float(heun) < 0.5 * float(euler)


@pytest.mark.parametrize("process", [PROCESSES["linear"], PROCESSES["cosine"]], ids=["linear", "cosine"])
def test_ddpm_has_the_mean_and_covariance_of_the_data(process: DiscreteProcess) -> None:
    """Row 0 has no noise; every other row has a unit vector in one of the steps, rotated into the eigenvectors."""
    steps = 250
    rows = 1 + 2 * steps
    units = torch.zeros(steps, rows, 2, dtype=torch.float64)
    for step in range(steps):
        units[step, 1 + 2 * step : 3 + 2 * step] = torch.eye(2)
    model = ExactGaussian(process, EPSILON)
    made = generate(
        model, process, EPSILON, units[0], solver="ddpm", steps=steps, clip=False, step_noise=lambda k: units[k]
    )
    linear = made[1:] - made[0]
    assert model.num_calls == steps
    assert_close(made[0], MEAN, rtol=0, atol=0.01)
    assert_close(linear.T @ linear, COVARIANCE, rtol=0, atol=0.02)  # of first order in 1 / steps


def test_samples_of_ddpm_have_the_mean_and_covariance_of_the_data() -> None:
    process, num = DiscreteProcess.linear(), 20_000
    made = generate(
        ExactGaussian(process, EPSILON),
        process,
        EPSILON,
        noise_of_images(1, torch.arange(num), 0, (2,)),
        solver="ddpm",
        steps=100,
        clip=False,
        step_noise=lambda step: noise_of_images(1, torch.arange(num), step, (2,)),
    ).double()
    white = (made - MEAN) @ torch.linalg.inv(square_root(COVARIANCE))
    assert float(white.mean(0).abs().max()) < 0.03
    assert_close(white.T @ white / num, torch.eye(2, dtype=torch.float64), rtol=0, atol=0.15)


@pytest.mark.parametrize("steps", [300, 600])
def test_steps_need_not_divide_those_of_the_process(steps: int) -> None:
    """DDIM of diffusers leaves noise in the samples: its steps add up to steps * floor(T / steps)."""
    process = DiscreteProcess.linear()
    _, covariance = response(process, "ddim", steps)
    assert_close(covariance, response(process, "ddim", 500)[1], rtol=0, atol=0.01)


@pytest.mark.parametrize("prediction", [EPSILON, X0, V, VELOCITY])
@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_heun_does_not_depend_on_what_an_exact_network_predicts(process: Process, prediction: Prediction) -> None:
    if isinstance(process, FlowProcess) and prediction == EPSILON:
        pytest.skip("noise at t = 1 says nothing about x0")
    for found, expected in zip(response(process, "heun", 20, prediction), response(process, "heun", 20), strict=True):
        assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("solver", ["ddpm", "ddim", "heun"])
@pytest.mark.parametrize("prediction", [X0, V])
def test_zero_terminal_snr(solver: str, prediction: Prediction) -> None:
    process = DiscreteProcess.linear().with_zero_terminal_snr()
    samples = generate(network(), process, prediction, our_noise(0), solver=solver, steps=5)
    assert bool(samples.isfinite().all())


# What is asked for


@pytest.mark.parametrize(
    ("process", "solver", "steps"),
    [
        (DiscreteProcess.linear(), "ddpm", 1000),
        (DiscreteProcess.linear(100), "ddpm", 100),
        (DiscreteProcess.linear(), "ddim", 200),
        (DiscreteProcess.linear(100), "ddim", 100),
        (DiscreteProcess.linear(), "heun", 50),
        (DiscreteProcess.linear(20), "heun", 50),
        (FlowProcess(), "ddim", 200),
        (EDMProcess(), "heun", 50),
    ],
)
def test_default_steps_are_the_papers(process: Process, solver: str, steps: int) -> None:
    assert steps_of(process, solver) == steps


def test_heun_starts_where_karras_et_al_do_or_where_the_process_does() -> None:
    for process, start in ((PROCESSES["cosine"], 80.0), (PROCESSES["scaled linear"], 14.61), (EDMProcess(), 80.0)):
        plan = plan_for(process, natural(process), "heun", 10, clip=False)
        assert plan.start == pytest.approx(start, rel=1e-3)
        assert len(plan.keys) == network_evaluations("heun", 10) == 19


@pytest.mark.parametrize(
    ("process", "options", "message"),
    [
        (
            FlowProcess(),
            {"solver": "ddpm"},
            "solver ddpm needs a process of discrete steps, got FlowProcess: pass 'ddim'",
        ),
        (
            EDMProcess(),
            {"solver": "ddpm"},
            "solver ddpm needs a process of discrete steps, got EDMProcess: pass 'ddim'",
        ),
        (EDMProcess(), {"solver": "euler"}, "solver must be one of 'ddpm', 'ddim', 'heun', got 'euler'"),
        (DiscreteProcess.linear(), {"steps": 1001}, "steps must be at most the 1000 of the process, got 1001: pass"),
        (DiscreteProcess.linear(), {"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        (DiscreteProcess.linear(), {"guidance": 2.0}, "guidance needs a model with classes, labels and the null class"),
    ],
)
def test_what_cannot_be_is_refused(process: Process, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(network(), process, natural(process), our_noise(0), **options)
