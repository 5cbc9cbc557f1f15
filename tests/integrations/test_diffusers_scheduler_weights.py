"""diffusers: our densities and weights are theirs by name, and right or refused where theirs are wrong."""

import math
from collections.abc import Callable

import pytest
import torch
from diffusers import DDPMScheduler, EDMEulerScheduler, FlowMatchEulerDiscreteScheduler
from diffusers import training_utils as theirs
from schedulers import FLOWS, WITH_ALPHAS_CUMPROD, T, described, every_step
from torch.testing import assert_close

import kairostep as ks
from kairostep.integrations import diffusers as ours
from kairostep.integrations.diffusers import Scheduled, loss_weight, prediction_of, process_of


@pytest.mark.parametrize("scheme", ours.SCHEMES)
def test_densities_by_name_are_theirs(scheme: str) -> None:
    found, expected = (
        module.compute_density_for_timestep_sampling(
            scheme, 1000, 0.3, 0.8, 1.29, generator=torch.Generator().manual_seed(1)
        )
        for module in (ours, theirs)
    )
    assert torch.equal(found, expected)


def test_a_misspelt_scheme_raises_where_theirs_means_uniform() -> None:
    assert theirs.compute_density_for_timestep_sampling("logit-normal", 4, 0.0, 1.0).shape == (4,)
    with pytest.raises(
        ValueError, match=r"weighting_scheme must be one of 'sigma_sqrt', 'logit_normal'.*'logit-normal'"
    ):
        ours.compute_density_for_timestep_sampling("logit-normal", 4, 0.0, 1.0)
    with pytest.raises(ValueError, match="weighting_scheme must be one of"):
        ours.compute_loss_weighting_for_sd3("min_snr", torch.ones(2))
    with pytest.raises(ValueError, match="logit_normal needs both, got logit_mean=None and logit_std=None"):
        ours.compute_density_for_timestep_sampling("logit_normal", 4)
    with pytest.raises(ValueError, match="mode needs mode_scale"):
        ours.compute_density_for_timestep_sampling("mode", 4)


def test_samplers_draw_places_in_the_falling_table() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    noisy = ks.LogitNormal(mean=1.5, seed=2)  # most draws at high noise
    u = ours.compute_density_for_timestep_sampling(noisy, 4000)
    sigmas = scheduler.sigmas[(u * T).long()]
    assert float(sigmas.mean()) > 0.7
    same = ours.compute_density_for_timestep_sampling(
        "logit_normal", 4000, -1.5, 1.0, generator=torch.Generator().manual_seed(0)
    )
    assert float(u.mean()) == pytest.approx(float(same.mean()), abs=0.02)  # a falling table turns the sign of the mean
    drawn = Scheduled(ks.LogitNormal(mean=1.5, seed=2), scheduler).sample(torch.empty(4000, 0))
    assert float((drawn.sigmas == sigmas).float().mean()) > 0.999  # but for t on an edge between two steps


def test_places_stay_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = ks.Tabulated(torch.tensor([1.0] + [0.0] * (2**20 - 1)))
    u = ours.compute_density_for_timestep_sampling(lowest, 64)
    assert int((u * T).long().max()) == T - 1
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.zeros(*size))  # a draw that comes once in 2**24
    u = ours.compute_density_for_timestep_sampling("mode", 1, mode_scale=1.29)
    assert int((u * T).long()) == T - 1  # theirs is T


@pytest.mark.parametrize(
    "make",
    [
        ks.RootLoss,
        lambda: ks.Uniform(unbiased=True),
        lambda: ks.Speed(ks.FlowProcess()),
        lambda: ks.Adaptive(ks.ConstantBeta()),
        lambda: ks.Curriculum(ks.Uniform(), ks.RootLoss(), start=0, end=1),
    ],
)
def test_what_learns_or_weighs_cannot_be_a_density_alone(make: Callable[[], ks.TimestepSampler]) -> None:
    with pytest.raises(ValueError, match=r"use Scheduled\(sampler, noise_scheduler\)"):
        ours.compute_density_for_timestep_sampling(make(), 4)
    with pytest.raises(ValueError, match="by its own seed"):
        ours.compute_density_for_timestep_sampling(make(), 4, generator=torch.Generator())


@pytest.mark.parametrize("scheme", ours.SCHEMES)
def test_flow_weights_by_name_are_theirs(scheme: str) -> None:
    sigmas = FlowMatchEulerDiscreteScheduler(shift=3.0).sigmas.view(-1, 1, 1, 1)
    assert torch.equal(
        ours.compute_loss_weighting_for_sd3(scheme, sigmas), theirs.compute_loss_weighting_for_sd3(scheme, sigmas)
    )
    for wrong in (None, torch.arange(3)):
        with pytest.raises(ValueError, match="sigmas must be the noise of a flow"):
            ours.compute_loss_weighting_for_sd3(scheme, wrong)


@pytest.mark.parametrize("scheduler", [*WITH_ALPHAS_CUMPROD, *FLOWS], ids=described)
def test_snr_is_that_of_the_process_and_always_finite(scheduler: DDPMScheduler) -> None:
    process = process_of(scheduler)
    t = every_step(scheduler.config.num_train_timesteps)
    snr = ours.compute_snr(scheduler, process.time(t))
    assert_close(snr[:-1], process.log_snr(t).exp()[:-1], rtol=2e-3, atol=1e-7)
    assert bool(((snr > 0) & (snr < math.inf)).all())
    if hasattr(scheduler, "alphas_cumprod"):
        assert_close(snr, theirs.compute_snr(scheduler, process.time(t)), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_min_snr_is_right_for_every_prediction(name: str, zero_snr: bool) -> None:
    scheduler = DDPMScheduler(prediction_type=name, rescale_betas_zero_snr=zero_snr)
    timesteps = torch.arange(T)
    snr = ours.compute_snr(scheduler, timesteps)
    weights = torch.stack([snr, 5.0 * torch.ones_like(timesteps)], dim=1).min(dim=1)[0]  # as their scripts have it
    divisor = {"epsilon": snr, "v_prediction": snr + 1, "sample": torch.ones_like(snr)}[name]
    found = loss_weight(ks.min_snr(5.0), scheduler, timesteps)
    assert_close(found, weights / divisor, rtol=1e-4, atol=1e-7)
    assert bool(found.isfinite().all())
    if zero_snr and name == "epsilon":  # theirs: 0 / 0
        bad = theirs.compute_snr(scheduler, timesteps)
        assert bool((torch.minimum(bad, torch.tensor(5.0)) / bad).isnan().any())


def test_weights_of_a_flow_are_those_of_its_velocity() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    sigmas = scheduler.sigmas
    snr = ((1 - sigmas) / sigmas).square()
    expected = snr.clamp(max=5.0) * sigmas.square()  # an error e of the velocity is sigma e of x0
    assert_close(loss_weight(ks.min_snr(5.0), scheduler, scheduler.timesteps), expected, rtol=1e-3, atol=1e-6)
    assert_close(ours.compute_loss_weighting_for_sd3(ks.min_snr(5.0), sigmas), expected, rtol=1e-3, atol=1e-6)
    objective = ks.Objective(process_of(scheduler), prediction_of(scheduler), ks.min_snr(5.0))
    assert_close(objective.weight(every_step(T)), expected.flip(0), rtol=1e-3, atol=1e-6)


def test_a_scheduler_without_snr_has_no_min_snr_weights() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        loss_weight(ks.min_snr(), EDMEulerScheduler(), torch.zeros(3))
    with pytest.raises(ValueError, match="cannot be read"):
        ours.compute_snr(EDMEulerScheduler(), torch.zeros(3))


def test_timesteps_of_the_wrong_kind_are_refused() -> None:
    """A time in [0, 1) would be read as step 0, a place in a flow's falling table as the opposite noise."""
    with pytest.raises(ValueError, match="DDPMScheduler must be whole steps, not times"):
        loss_weight(ks.min_snr(), DDPMScheduler(), torch.rand(4))
    with pytest.raises(ValueError, match="must be floats of its table, not places in it"):
        loss_weight(ks.min_snr(), FlowMatchEulerDiscreteScheduler(), torch.arange(4))


def test_a_weighting_has_to_be_made_first() -> None:
    for weighting in (ks.min_snr, "min_snr"):
        with pytest.raises(ValueError, match="call its maker"):
            loss_weight(weighting, DDPMScheduler(), torch.arange(4))
    with pytest.raises(ValueError, match="call its maker"):
        ours.compute_loss_weighting_for_sd3(ks.min_snr, torch.rand(4))


@pytest.mark.parametrize("scheduler", [DDPMScheduler(prediction_type="v_prediction"), *FLOWS], ids=described)
def test_an_objective_of_the_scheduler_has_the_weight_as_a_function_of_t(scheduler: DDPMScheduler) -> None:
    """What `RootLoss(loss_weight=)` asks for; a shift is part of the process, so that t is not the noise."""
    drawn = Scheduled(ks.Uniform(), scheduler).sample(torch.empty(64, 0))
    objective = ks.Objective(process_of(scheduler), prediction_of(scheduler), ks.min_snr())
    assert_close(objective.weight(drawn.t), loss_weight(ks.min_snr(), scheduler, drawn.timesteps), rtol=1e-3, atol=1e-5)
