"""What a preview says, against formulas written down a second time."""

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from torch.testing import assert_close

import kairostep as ks
from kairostep.analysis import preview_of
from kairostep.analysis.table import preview_table
from kairostep.analysis.untrained import untrained_parts
from kairostep.experiments import Component, Config
from kairostep.registry import samplers

LINEAR = ks.DiscreteProcess.linear()
REQUIRED = {"beta": {"a": 0.7, "b": 2.0}, "tabulated": {"mass": [1, 3]}, "curriculum": {"start": 5, "end": 9}}


def snr_of_the_linear_schedule() -> np.ndarray:
    alpha_bar = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    return alpha_bar / (1 - alpha_bar)


def test_logit_normal_with_min_snr_is_what_both_formulas_say() -> None:
    seen = preview_of(ks.Objective(LINEAR, ks.EPSILON, ks.min_snr(5.0)), ks.LogitNormal(mean=0.0, std=1.0))
    edges, snr = np.linspace(0, 1, 1001), snr_of_the_linear_schedule()
    with np.errstate(divide="ignore"):
        mass = np.diff(ndtr(np.log(edges) - np.log1p(-edges)))
    weight = np.minimum(snr, 5) / snr
    assert_close(seen.log_snr.numpy(), np.log(snr))
    assert_close(seen.density.numpy(), 1000 * mass, rtol=1e-4, atol=1e-4)
    assert_close(seen.weight.numpy(), weight)
    assert_close(seen.epsilon_weight.numpy(), weight)
    assert_close(seen.x0_weight.numpy(), np.minimum(snr, 5))
    product = mass * weight
    assert_close(seen.product.numpy(), 1000 * product / product.sum(), rtol=1e-4, atol=1e-4)
    parts = seen.over_t(10)
    assert_close([part.draws for part in parts], mass.reshape(10, 100).sum(1).tolist(), rtol=1e-4, atol=1e-6)
    assert_close([part.weight for part in parts], weight.reshape(10, 100).mean(1).tolist(), rtol=1e-6, atol=0)
    shares = product.reshape(10, 100).sum(1) / product.sum()
    assert_close([part.product for part in parts], shares.tolist(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("prediction", [ks.EPSILON, ks.X0, ks.V])
def test_one_objective_has_the_same_shares_on_noise_and_data_whatever_is_predicted(prediction: object) -> None:
    parts = preview_of(ks.Objective(LINEAR, prediction, ks.p2()), ks.Uniform()).over_t(10)  # type: ignore[arg-type]
    weight = 1 / (1 + snr_of_the_linear_schedule())  # on the error of the noise
    expected = weight.reshape(10, 100).sum(1) / weight.sum()
    assert_close([part.epsilon for part in parts], expected.tolist(), rtol=1e-6, atol=0)


def test_a_flow_weighs_the_error_of_x0_by_one_over_t_squared() -> None:
    seen = preview_of(ks.Objective(ks.FlowProcess(), ks.VELOCITY), ks.Uniform())
    assert_close(seen.x0_weight, 1 / seen.t.square())
    assert_close(seen.epsilon_weight, 1 / (1 - seen.t).square())


def test_unbiased_draws_leave_the_objective_as_it_is() -> None:
    objective = ks.Objective(LINEAR, ks.EPSILON, ks.min_snr())
    plain, unbiased = (preview_of(objective, sampler) for sampler in (ks.Uniform(), ks.LogitNormal(unbiased=True)))
    for one, other in zip(plain.over_t(), unbiased.over_t(), strict=True):
        assert other.product == pytest.approx(one.product, rel=0.01)


def test_the_weight_of_a_sampler_is_part_of_the_weight() -> None:
    sampler = ks.Speed(LINEAR)
    seen = preview_of(ks.Objective(LINEAR), sampler)
    assert_close(seen.weight, sampler.step_weight.double())


def test_parts_of_log_snr_hold_the_draws_at_their_times() -> None:
    sampler = ks.LogitNormal()
    seen = preview_of(ks.Objective(LINEAR), sampler)
    parts = seen.over_log_snr(8)
    assert sum(part.draws for part in parts) == pytest.approx(1)
    middle = parts[3]
    log_snr = np.log(snr_of_the_linear_schedule())
    there = (log_snr >= middle.start) & (log_snr < middle.end)
    assert middle.draws == pytest.approx(float(sampler.density(1000).numpy()[there].sum()), rel=1e-5)
    total = torch.trapezoid(seen.per_log_snr(seen.density).flip(0), seen.log_snr.flip(0))
    assert float(total) == pytest.approx(1, rel=2e-3)


def test_parts_without_a_time_say_so() -> None:
    seen = preview_of(ks.Objective(ks.DiscreteProcess.linear(10, 1e-4, 0.9)), ks.Uniform())
    assert any(part.weight is None and part.draws == 0 for part in seen.over_log_snr(40))
    assert " - " in preview_table(seen, 40)


def test_looking_leaves_the_sampler_as_it_was() -> None:
    one, other = ks.LogitNormal(seed=3), ks.LogitNormal(seed=3)
    preview_of(ks.Objective(LINEAR), one)
    assert torch.equal(one.sample(torch.zeros(7, 1)).t, other.sample(torch.zeros(7, 1)).t)


@pytest.mark.parametrize("name", samplers.registered)
def test_every_sampler_has_a_preview_without_data(name: str) -> None:
    sampler = Component(name, REQUIRED.get(name, {}))
    config = Config(sampler=sampler, process=Component("cosine"), weighting=Component("vlb"))
    seen = untrained_parts(config).preview()
    assert seen.learns == (samplers.find(name).observe is not ks.TimestepSampler.observe)
    assert seen.density.mean() == pytest.approx(1, rel=1e-4)
    assert bool(seen.weight.isfinite().all())
    assert (seen.weight > 0).all()


@pytest.mark.gpu
def test_a_sampler_on_a_gpu_is_previewed_where_it_is() -> None:
    sampler = ks.RootLoss().cuda()
    seen = preview_of(ks.Objective(LINEAR), sampler)
    assert_close(seen.density, preview_of(ks.Objective(LINEAR), ks.RootLoss()).density)
    assert sampler.density().is_cuda
