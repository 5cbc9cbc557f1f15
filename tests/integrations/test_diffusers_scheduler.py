"""diffusers: noise schedule, prediction and direction of time are read from a scheduler; what cannot be read raises."""

import copy
import math

import diffusers
import pytest
import torch
from diffusers import (
    DDPMScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from schedulers import FLOWS, WITH_ALPHAS_CUMPROD, ZERO_SNR, T, described, every_step
from torch.testing import assert_close

import kairostep as ks
from kairostep.integrations.diffusers import Scheduled, prediction_of, process_of

SOLVERS = ("DPMSolverMultistepScheduler", "DEISMultistepScheduler", "UniPCMultistepScheduler")
HIDING = ("DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "EulerDiscreteScheduler")


# Processes


@pytest.mark.parametrize("scheduler", WITH_ALPHAS_CUMPROD, ids=described)
def test_the_process_adds_the_noise_that_the_scheduler_adds(scheduler: DDPMScheduler) -> None:
    process = process_of(scheduler)
    t = every_step(scheduler.config.num_train_timesteps)
    x0, noise = torch.randn(2, len(t), 3, generator=torch.Generator().manual_seed(0))
    noisy = scheduler.add_noise(x0, noise, process.time(t))
    alpha, sigma = process.alpha(t)[:, None], process.sigma(t)[:, None]
    if isinstance(scheduler, EulerDiscreteScheduler):  # the network sees it scaled to the variance that others keep
        noisy = noisy * alpha
    assert_close(alpha * x0 + sigma * noise, noisy, rtol=1e-4, atol=1e-5)
    assert process.time(t).dtype == torch.int64
    assert bool((process.log_snr(t).diff() < 0).all())


@pytest.mark.parametrize("name", [*HIDING, "DDPMScheduler"])
def test_zero_terminal_snr_is_read_also_where_a_scheduler_hides_it(name: str) -> None:
    scheduler = getattr(diffusers, name)(**ZERO_SNR)
    process = process_of(scheduler)
    assert isinstance(process, ks.DiscreteProcess)
    expected = ks.DiscreteProcess.linear().with_zero_terminal_snr()
    assert float(process.alphas_cumprod[-1]) == 0
    assert_close(process.alphas_cumprod, expected.alphas_cumprod, rtol=1e-2, atol=1e-6)
    assert bool((process.alphas_cumprod.diff() < 0).all())  # theirs end in 2**-24, above the step before


def test_betas_keep_their_precision() -> None:
    process = process_of(DDPMScheduler())
    assert isinstance(process, ks.DiscreteProcess)
    t = every_step(T)
    assert_close(process.vlb_weight(t), ks.DiscreteProcess.linear().vlb_weight(t), rtol=1e-4, atol=0)


@pytest.mark.parametrize("scheduler", FLOWS, ids=described)
def test_a_flow_is_read_in_the_direction_of_noise(scheduler: FlowMatchEulerDiscreteScheduler) -> None:
    process = process_of(scheduler)
    t = every_step(scheduler.config.num_train_timesteps)
    assert torch.equal(process.time(t), scheduler.timesteps.flip(0))
    assert torch.equal(process.sigma(t), scheduler.sigmas.flip(0))
    x0, noise = torch.randn(2, len(t), 3, generator=torch.Generator().manual_seed(0))
    expected = process.alpha(t)[:, None] * x0 + process.sigma(t)[:, None] * noise
    for row in range(0, len(t), len(t) // 20):
        fresh = copy.deepcopy(scheduler)  # Heun's remembers the one step it was asked for
        noisy = fresh.scale_noise(x0[row, None], process.time(t[row, None]), noise[row, None])
        assert_close(expected[row, None], noisy)
    assert bool((process.log_snr(t).diff() < 0).all())
    assert_close(process.t_at(process.log_snr(t)), t, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_the_bound_of_a_shifted_flow_is_half_the_slope_of_its_log_snr(shift: float) -> None:
    process = process_of(FlowMatchEulerDiscreteScheduler(num_train_timesteps=4000, shift=shift))
    t = every_step(4000).double()
    log_snr = process.log_snr(t)
    slope = (log_snr[:-2] - log_snr[2:]) * 4000 / 2  # at the steps between
    middle = slice(400, 3600)
    assert_close(process.vlb_weight(t)[1:-1][middle], slope[middle] / 2, rtol=2e-2, atol=0)


def test_a_dynamic_shift_demands_its_mu() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    with pytest.raises(ValueError, match="mu must be given exactly where use_dynamic_shifting is set, got mu=None"):
        process_of(scheduler)
    t = every_step(T)
    assert_close(process_of(scheduler, mu=0.0).sigma(t), scheduler.sigmas.flip(0))
    shifted = FlowMatchEulerDiscreteScheduler(shift=math.exp(1.15))
    assert_close(process_of(scheduler, mu=1.15).sigma(t), process_of(shifted).sigma(t))
    assert_close(process_of(scheduler, mu=1.15).time(t), process_of(shifted).time(t))
    drawn, expected = (
        sampler.sample(torch.empty(64, 0))
        for sampler in (Scheduled(ks.Uniform(), scheduler, mu=1.15), Scheduled(ks.Uniform(), shifted))
    )
    assert_close(drawn.sigmas, expected.sigmas)
    for fixed in (shifted, DDPMScheduler()):
        with pytest.raises(ValueError, match="mu"):
            process_of(fixed, mu=1.0)


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (EDMEulerScheduler(), "must have alphas_cumprod or, for a flow, scale_noise, got EDMEulerScheduler"),
        (object(), "whose process cannot be read"),
        (FlowMatchEulerDiscreteScheduler(invert_sigmas=True), "time must run from data to noise"),
        (UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True), "FlowMatchEuler"),
    ],
    ids=["edm", "no scheduler", "inverted", "flow sigmas beside betas"],
)
def test_what_cannot_be_read_raises(scheduler: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        process_of(scheduler)
    with pytest.raises(ValueError, match=message):
        Scheduled(ks.Uniform(), scheduler)


def test_a_flow_scheduler_set_for_making_images_is_refused() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(20)
    with pytest.raises(ValueError, match=r"must be as made, .*from_config"):
        process_of(scheduler)
    process_of(FlowMatchEulerDiscreteScheduler.from_config(scheduler.config))


@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_that_adds_the_noise_of_the_other_end_is_refused(name: str) -> None:
    scheduler = getattr(diffusers, name)()
    one, zero = torch.ones(1), torch.zeros(1)
    assert float(scheduler.add_noise(one, zero, torch.tensor([999]))) > 0.99  # the trap: hardly any noise
    with pytest.raises(ValueError, match="must add the noise that its alphas_cumprod states"):
        Scheduled(ks.Uniform(), scheduler)
    Scheduled(ks.Uniform(), DDPMScheduler.from_config(scheduler.config))


# Predictions


@pytest.mark.parametrize(
    ("name", "prediction"), [("epsilon", ks.EPSILON), ("sample", ks.X0), ("v_prediction", ks.V)], ids=str
)
def test_the_prediction_is_the_schedulers(name: str, prediction: ks.Prediction) -> None:
    scheduler = DDPMScheduler(prediction_type=name)
    assert prediction_of(scheduler) is prediction
    x0, noise = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    steps = torch.tensor([0, 300, 600, 999])
    process, t = process_of(scheduler), (steps + 0.5) / T
    targets = {"epsilon": noise, "sample": x0, "v_prediction": scheduler.get_velocity(x0, noise, steps)}
    found = prediction.target(x0, noise, process.alpha(t)[:, None], process.sigma(t)[:, None])
    assert_close(found, targets[name], rtol=1e-4, atol=1e-4)


def test_a_flow_predicts_the_velocity_that_its_step_integrates() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    prediction = prediction_of(scheduler)
    assert prediction is ks.VELOCITY
    x0, noise = torch.randn(2, 1, 3, generator=torch.Generator().manual_seed(0))
    sampling = copy.deepcopy(scheduler)
    sampling.set_timesteps(1)
    one = torch.ones(())
    velocity = prediction.target(x0, noise, 0 * one, one)
    assert_close(sampling.step(velocity, sampling.timesteps[0], noise).prev_sample, x0)


def test_an_unknown_prediction_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"prediction_type must be one of 'epsilon', 'sample'.* got 'noise'"):
        prediction_of(DDPMScheduler(prediction_type="noise"))
    with pytest.raises(ValueError, match="cannot be read"):
        prediction_of(EDMEulerScheduler())  # its "epsilon" is EDM's own target
