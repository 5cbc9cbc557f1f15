"""The variational bound: the value that theory gives where there is one, with an error that is its spread."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.testing import assert_close

from kairostep.diffusion import (
    EPSILON,
    VELOCITY,
    X0,
    DiscreteProcess,
    EDMProcess,
    FlowProcess,
    Objective,
    Prediction,
    V,
)
from kairostep.diffusion.process import Process
from kairostep.evaluation import variational_bound
from kairostep.evaluation.bound import log_decoder

STD = 0.6
LINEAR, COSINE, FLOW, EDM = DiscreteProcess.linear(), DiscreteProcess.cosine(), FlowProcess(), EDMProcess()
PROCESSES = pytest.mark.parametrize("process", [LINEAR, COSINE, FLOW, EDM], ids=["linear", "cosine", "flow", "edm"])


def rows(num: int, dims: int = 3, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return STD * torch.randn(num, dims, dtype=torch.float64, generator=generator)


def exact(process: Process, prediction: Prediction = EPSILON) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the best network for data from N(0, STD**2): it gives E[x0 | x_t]."""

    def model(seen: Tensor, time: Tensor) -> Tensor:
        if isinstance(process, EDMProcess):
            alpha, sigma = torch.ones_like(time), (4 * time).exp()
            seen = seen * (sigma**2 + process.sigma_data**2).sqrt()[:, None]
        else:
            t = (time + 0.5) / process.num_steps if isinstance(process, DiscreteProcess) else time
            alpha, sigma = process.alpha(t.double()), process.sigma(t.double())
        alpha, sigma = alpha[:, None], sigma[:, None]
        x0 = alpha * STD**2 * seen / (alpha**2 * STD**2 + sigma**2)
        return prediction.target(x0, (seen - alpha * x0) / sigma, alpha, sigma)

    return model


# Values


def left_of_x0(alpha: Tensor, sigma: Tensor) -> Tensor:
    """Return the variance of x0 once x_t is seen."""
    return STD**2 * sigma**2 / (alpha**2 * STD**2 + sigma**2)


def bits_of_discrete(process: DiscreteProcess) -> float:
    """Return the bound by Ho et al.'s equations: KL of Gaussians with the posterior's mean and variance."""
    beta, alpha_bar = process.betas, process.alphas_cumprod
    left = left_of_x0(alpha_bar.sqrt(), (1 - alpha_bar).sqrt())  # (T,)
    coefficient = alpha_bar[:-1].sqrt() * beta[1:] / (1 - alpha_bar[1:])  # of x0 in the posterior's mean
    variance = beta[1:] * (1 - alpha_bar[:-1]) / (1 - alpha_bar[1:])
    diffusion = (coefficient.square() * left[1:] / (2 * variance)).sum()
    end = alpha_bar[-1]
    prior = (1 - end + end * STD**2 - 1 - (1 - end).log()) / 2
    decoder = (1 - alpha_bar[0]) / alpha_bar[0]
    reconstruction = left[0] / (2 * decoder) + (2 * math.pi * decoder).log() / 2
    return float(diffusion + prior + reconstruction) / math.log(2)


def expected_bits(process: Process) -> float:
    """Return the bound of an exact model, which in continuous time is the entropy of the data."""
    if isinstance(process, DiscreteProcess):
        return bits_of_discrete(process)
    return math.log2(2 * math.pi * math.e * STD**2) / 2


@PROCESSES
def test_an_exact_model_of_gaussian_data_has_the_analytic_bound(process: Process) -> None:
    found = variational_bound(
        exact(process), Objective(process, EPSILON), rows(4000, dims=64), levels=None, batch_size=4000
    )
    assert 0 < found.total.error < 0.02
    assert abs(found.total.value - expected_bits(process)) < 3 * found.total.error
    parts = (found.prior, found.diffusion, found.reconstruction)
    assert found.total.value == pytest.approx(sum(part.value for part in parts), abs=1e-9)
    assert found.num_evaluations == 44_000


@pytest.mark.parametrize("process", [LINEAR, COSINE], ids=["linear", "cosine"])
def test_the_parts_are_those_of_theory(process: DiscreteProcess) -> None:
    found = variational_bound(exact(process), Objective(process), rows(5000), levels=None, batch_size=5000)
    end, decoder = process.alphas_cumprod[-1], (1 - process.alphas_cumprod[0]) / process.alphas_cumprod[0]
    prior = float(1 - end + end * STD**2 - 1 - (1 - end).log()) / 2 / math.log(2)
    assert found.prior.value == pytest.approx(prior, rel=0.05)
    left = left_of_x0(process.alphas_cumprod[0].sqrt(), (1 - process.alphas_cumprod[0]).sqrt())
    reconstruction = float(left / (2 * decoder) + (2 * math.pi * decoder).log() / 2) / math.log(2)
    assert abs(found.reconstruction.value - reconstruction) < 4 * found.reconstruction.error


@pytest.mark.parametrize("prediction", [X0, V, VELOCITY])
@PROCESSES
def test_the_bound_is_the_same_whatever_is_predicted(process: Process, prediction: Prediction) -> None:
    results = [
        variational_bound(exact(process, kind), Objective(process, kind), rows(200), levels=None)
        for kind in (EPSILON, prediction)
    ]
    assert_close(results[0].per_image, results[1].per_image, rtol=1e-5, atol=1e-6)


def test_a_model_that_knows_less_has_a_higher_bound() -> None:
    objective, x0 = Objective(LINEAR), rows(500)
    best = variational_bound(exact(LINEAR), objective, x0, levels=None)

    def worse(xt: Tensor, time: Tensor) -> Tensor:
        return exact(LINEAR)(xt, time) * 0.9

    difference = variational_bound(worse, objective, x0, levels=None).per_image - best.per_image
    assert float(difference.mean()) > 4 * float(difference.std()) / math.sqrt(500)


# Errors


@PROCESSES
def test_the_stated_error_is_the_spread_over_seeds_and_data_and_there_is_no_bias(process: Process) -> None:
    model, objective = exact(process), Objective(process)
    found = [
        variational_bound(model, objective, rows(100, seed=seed), levels=None, num_times=4, seed=seed)
        for seed in range(200)
    ]
    values = torch.tensor([bound.total.value for bound in found], dtype=torch.float64)
    spread = float(values.std())
    stated = float(torch.tensor([bound.total.error for bound in found]).square().mean().sqrt())
    assert spread / stated == pytest.approx(1, abs=0.25)  # 5 sigma of a spread over 200
    assert abs(float(values.mean()) - expected_bits(process)) < 4 * spread / math.sqrt(200)


def test_steps_with_most_of_the_bound_are_seen_most() -> None:
    times: list[Tensor] = []

    def model(xt: Tensor, time: Tensor) -> Tensor:
        times.append(time)
        return torch.zeros_like(xt)

    variational_bound(model, Objective(LINEAR), rows(1000), levels=None, batch_size=1000)
    steps = torch.cat(times[:-1])
    assert int(steps.min()) == 1
    assert bool((times[-1] == 0).all())  # the reconstruction alone sees step 0
    assert float((steps == 1).double().mean()) > 0.09
    assert float((steps > 500).double().mean()) > 0.05


def test_equal_arguments_give_equal_bits_and_leave_the_global_stream_alone() -> None:
    before = torch.get_rng_state()
    one, two = (variational_bound(exact(LINEAR), Objective(LINEAR), rows(50), levels=None, seed=3) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.per_image, two.per_image)
    other = variational_bound(exact(LINEAR), Objective(LINEAR), rows(50), levels=None, seed=4)
    assert not torch.equal(one.per_image, other.per_image)


@pytest.mark.parametrize("batch_size", [1, 7, 50])
def test_the_size_of_batches_does_not_matter(batch_size: int) -> None:
    one, two = (
        variational_bound(exact(LINEAR), Objective(LINEAR), rows(50), levels=None, batch_size=size)
        for size in (batch_size, 256)
    )
    assert_close(one.per_image, two.per_image)


def test_every_row_keeps_its_label() -> None:
    labels = torch.arange(50) % 5
    x0 = (labels / 2 - 1).double()[:, None].expand(50, 2)

    def model(xt: Tensor, time: Tensor, class_labels: Tensor) -> Tensor:
        return (class_labels / 2 - 1).double()[:, None].expand_as(xt)

    assert variational_bound(model, Objective(LINEAR, X0), x0, labels=labels, batch_size=7).diffusion.value == 0
    assert variational_bound(model, Objective(LINEAR, X0), x0, labels=labels.flip(0)).diffusion.value > 1


# Pixels


def test_pixels_have_the_probability_of_their_bin() -> None:
    level = torch.arange(256, dtype=torch.float64) / 127.5 - 1
    for mean, std in ((0.1, 0.01), (-1.0, 0.3), (0.999, 0.002)):
        found = log_decoder(level, torch.full_like(level, mean), std, 256)
        edges = np.concatenate([[-np.inf], (np.arange(255) + 0.5) / 127.5 - 1, [np.inf]])
        expected = np.diff(stats.norm.cdf(edges, mean, std))
        assert_close(found.exp(), torch.from_numpy(expected), rtol=1e-8, atol=1e-14)
        assert float(found.exp().sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("far", [-1.0, 1.0])
def test_pixels_far_from_their_mean_cost_much_but_never_infinitely_much(far: float) -> None:
    x = torch.tensor([0.2 * 2 / 255 + 1 / 255, -1.0, 1.0], dtype=torch.float64)
    found = log_decoder(x, torch.full_like(x, far), 0.002, 256)
    assert bool(found.isfinite().all())
    assert float(found[0]) < -100_000


def test_a_model_that_knows_all_needs_no_bits_and_one_that_knows_nothing_eight() -> None:
    pixels = torch.randint(256, (200, 1, 4, 4), generator=torch.Generator().manual_seed(0)).float() / 127.5 - 1

    def best(xt: Tensor, time: Tensor) -> Tensor:
        return xt / math.sqrt(1 - 1e-4) if bool((time == 0).all()) else level_of(xt, time)

    def level_of(xt: Tensor, time: Tensor) -> Tensor:
        alpha = LINEAR.alpha((time + 0.5) / 1000).view(-1, 1, 1, 1)
        return (((xt / alpha).clamp(-1, 1) + 1) * 127.5).round() / 127.5 - 1

    found = variational_bound(best, Objective(LINEAR, X0), pixels)
    assert found.total.value == pytest.approx(8, abs=3)
    assert found.prior.value < 0.001
    half = variational_bound(lambda xt, time: torch.zeros_like(xt), Objective(LINEAR, X0), pixels)
    assert half.total.value > found.total.value


@pytest.mark.parametrize(("process", "first"), [(FLOW, 1 / 101), (EDM, math.log(0.01) / 4)])
def test_in_continuous_time_pixels_are_decoded_at_a_signal_to_noise_ratio_of_10000(process: Any, first: float) -> None:
    times: list[Tensor] = []

    def model(xt: Tensor, time: Tensor) -> Tensor:
        times.append(time)
        return torch.zeros_like(xt)

    variational_bound(model, Objective(process, X0), rows(100).clamp(-1, 1), batch_size=100)
    assert_close(times[-1], torch.full_like(times[-1], first), rtol=1e-5, atol=0)
    assert float(torch.cat(times).min()) >= first - 1e-6


# Refusals


def test_pixels_outside_their_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x0 must be pixels in \[-1, 1\] where they have 256 levels, got up to"):
        variational_bound(exact(LINEAR), Objective(LINEAR), 3 * rows(50))


def test_noise_that_says_nothing_of_x0_is_refused() -> None:
    process = LINEAR.with_zero_terminal_snr()
    with pytest.raises(ValueError, match="predict v or x0"):
        variational_bound(exact(LINEAR), Objective(process, EPSILON), rows(50), levels=None)
    bound = variational_bound(lambda xt, time: -xt, Objective(process, V), rows(50), levels=None)
    assert math.isfinite(bound.total.value)
