"""The stable target against plain loops in double precision, alone and in an objective."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import kairostep as ks

PROCESSES = {
    "linear": ks.DiscreteProcess.linear(),
    "zero_terminal": ks.DiscreteProcess.linear().with_zero_terminal_snr(),
    "flow": ks.FlowProcess(),
    "edm": ks.EDMProcess(),
}
PREDICTIONS = {"epsilon": ks.EPSILON, "x0": ks.X0, "v": ks.V, "velocity": ks.VELOCITY}
every_process = pytest.mark.parametrize("name", PROCESSES)


def column(value: float | list[float], like: Tensor) -> Tensor:
    """Return the factor of each row, (B, 1, ..)."""
    factor = torch.as_tensor(value, dtype=like.dtype)
    return factor.expand(len(like)).reshape(-1, *[1] * (like.ndim - 1))


def posterior_mean(reference: Tensor, x0: Tensor, xt: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """Return the same by loops in float64 over what float32 was given."""
    means = []
    for row in range(len(x0)):
        own, seen = x0[row].double().flatten(), xt[row].double().flatten()
        a, s = float(alpha[row].flatten()[0]), float(sigma[row].flatten()[0])
        candidates = [*reference.double().flatten(1), own]
        logits = [-float((seen - a * x).square().sum()) / (2 * s**2) for x in candidates]
        weights = [math.exp(logit - max(logits)) for logit in logits]
        means.append(sum(w * x for w, x in zip(weights, candidates, strict=True)) / sum(weights))
    return torch.stack(means).view(x0.shape)


def crowd(shape: tuple[int, ...], spread: float, num: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Return a reference (num, *shape), half of it within `spread` of the rows of x0 (4, *shape), and noise."""
    generator = torch.Generator().manual_seed(0)
    x0 = torch.randn(4, *shape, generator=generator)
    reference = torch.randn(num, *shape, generator=generator)
    size = math.prod(shape) ** 0.5
    near = torch.randn(num // 2, *shape, generator=generator) / size  # of length 1
    reference[: num // 2] = x0.repeat(num // 8, *[1] * len(shape)) + spread * near
    return reference, x0, torch.randn(4, *shape, generator=generator)


@pytest.mark.parametrize("sigma", [1e-3, 1e-2, 0.1, 1.0])
@pytest.mark.parametrize("shape", [(1,), (2,), (64,), (3, 32, 32)])
def test_target_is_exact_to_float32_also_among_near_duplicates(shape: tuple[int, ...], sigma: float) -> None:
    reference, x0, noise = crowd(shape, spread=2 * sigma)
    alpha, sigma_ = column(math.sqrt(1 - min(sigma, 0.99) ** 2), x0), column(sigma, x0)
    xt = alpha * x0 + sigma_ * noise
    target = ks.StableTarget(reference, num=None)(x0, xt, alpha, sigma_)
    expected = posterior_mean(reference, x0, xt, alpha, sigma_)
    assert target.dtype == torch.float32
    assert target.shape == x0.shape
    moved = float((expected - x0.double()).abs().max())
    assert moved > 0.01 * sigma / math.prod(shape) ** 0.5
    assert_close(target.double(), expected, rtol=1.3e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(2,), (3, 32, 32)])
@pytest.mark.parametrize("alpha", [0.0, 1e-6, 1e-3, 0.05])
def test_target_is_exact_where_the_data_vanishes(alpha: float, shape: tuple[int, ...]) -> None:
    reference, x0, noise = crowd(shape, spread=0.5)
    factors = column(alpha, x0), column(1.0, x0)
    xt = factors[0] * x0 + factors[1] * noise
    target = ks.StableTarget(reference, num=None)(x0, xt, *factors)
    assert_close(target.double(), posterior_mean(reference, x0, xt, *factors), rtol=1.3e-6, atol=1e-6)
    if alpha == 0:
        total = reference.sum(0) + x0
        assert_close(target, total / 41, rtol=1e-5, atol=1e-6)


def test_target_is_exact_on_edm_up_to_its_largest_noise() -> None:
    reference, x0, noise = crowd((3, 8, 8), spread=0.5)
    alpha, sigma = column(1.0, x0), column([0.002, 0.5, 5.0, 80.0], x0)
    xt = x0 + sigma * noise
    target = ks.StableTarget(reference, num=None)(x0, xt, alpha, sigma)
    assert_close(target.double(), posterior_mean(reference, x0, xt, alpha, sigma), rtol=1.3e-6, atol=1e-6)


def test_in_float64_the_target_is_exact_to_float64() -> None:
    reference, x0, noise = (x.double() for x in crowd((16,), spread=0.1))
    alpha, sigma = column(0.9, x0), column(0.05, x0)
    xt = alpha * x0 + sigma * noise
    target = ks.StableTarget(reference, num=None)(x0, xt, alpha, sigma)
    assert target.dtype == torch.float64
    assert_close(target, posterior_mean(reference, x0, xt, alpha, sigma), rtol=1e-9, atol=1e-10)


def test_in_half_precision_the_target_is_that_of_the_rounded_inputs() -> None:
    reference, x0, noise = crowd((3, 8, 8), spread=0.5)
    reference, x0 = reference.bfloat16(), x0.bfloat16()
    alpha, sigma = column(0.75, x0), column(0.5, x0)
    xt = alpha * x0 + sigma * noise.bfloat16()
    target = ks.StableTarget(reference, num=None)(x0, xt, alpha, sigma)
    assert target.dtype == torch.bfloat16
    assert_close(target.double(), posterior_mean(reference, x0, xt, alpha, sigma), rtol=1e-2, atol=1e-2)


def test_without_noise_the_target_is_x0_itself() -> None:
    reference, x0, noise = crowd((3, 8, 8), spread=1e-3)
    alpha, sigma = column(1.0, x0), column([0.0, 0.5, 0.0, 3e-8], x0)
    target = ks.StableTarget(reference)(x0, alpha * x0 + sigma * noise, alpha, sigma)
    assert bool(target.isfinite().all())
    assert_close(target[[0, 2, 3]], x0[[0, 2, 3]], rtol=1e-6, atol=1e-6)
    assert float((target[1] - x0[1]).abs().max()) > 1e-5


def test_far_from_every_other_point_the_target_is_x0_itself() -> None:
    _, x0, noise = crowd((3, 32, 32), spread=0.0)
    alpha, sigma = column(0.9, x0), column(0.1, x0)
    target = ks.StableTarget(torch.full((10, 3, 32, 32), 50.0))(x0, alpha * x0 + sigma * noise, alpha, sigma)
    assert_close(target, x0, rtol=1e-6, atol=1e-6)


def test_as_many_random_rows_of_the_reference_as_asked_for_and_the_own() -> None:
    """At zero SNR all count alike, so that unit vectors tell which were used, and how often."""
    reference, x0 = torch.eye(100)[:99], torch.eye(100)[99:].repeat(8, 1)
    stable, factors = ks.StableTarget(reference, num=5), (column(0.0, x0), column(1.0, x0))
    torch.manual_seed(0)
    used = [stable(x0, torch.randn_like(x0), *factors) * 6 for _ in range(100)]
    for times in used:
        assert_close(times, times.round(), rtol=0, atol=1e-5)
        assert_close(times[:, :99].sum(1), torch.full((8,), 5.0))
        assert_close(times[:, 99], torch.ones(8))
    assert not torch.equal(used[0], used[1])
    ever = torch.cat(used).sum(0)[:99] > 0
    assert bool(ever.all())
    torch.manual_seed(0)
    assert_close(stable(x0, torch.randn_like(x0), *factors) * 6, used[0])


@pytest.mark.parametrize("num", [40, 256])
def test_a_small_reference_is_used_as_a_whole(num: int) -> None:
    reference, x0, noise = crowd((4,), spread=0.5)
    alpha, sigma = column(0.9, x0), column(0.3, x0)
    xt = alpha * x0 + sigma * noise
    target, whole = (ks.StableTarget(reference, num=n)(x0, xt, alpha, sigma) for n in (num, None))
    assert_close(target, whole)


def test_target_does_not_depend_on_the_size_of_its_chunks() -> None:
    reference, x0, noise = crowd((4,), spread=0.5)
    alpha, sigma = column([0.9, 0.5, 0.1, 0.0], x0), column([0.01, 0.3, 0.9, 1.0], x0)
    xt = alpha * x0 + sigma * noise
    whole = ks.StableTarget(reference, num=None)(x0, xt, alpha, sigma)
    for chunk_size in (1, 7, 40):
        chunked = ks.StableTarget(reference, num=None, chunk_size=chunk_size)(x0, xt, alpha, sigma)
        assert_close(chunked, whole, rtol=1e-5, atol=1e-6)


def test_target_has_no_gradient_and_leaves_its_inputs() -> None:
    reference, x0, noise = crowd((4,), spread=0.5)
    before = reference.clone(), x0.clone()
    alpha, sigma = column(0.9, x0), column(0.3, x0)
    xt = (alpha * x0 + sigma * noise).requires_grad_()
    target = ks.StableTarget(reference.requires_grad_())(x0.requires_grad_(), xt, alpha, sigma)
    assert not target.requires_grad
    assert torch.equal(reference, before[0])
    assert torch.equal(x0, before[1])


@pytest.mark.parametrize("prediction_name", PREDICTIONS)
@pytest.mark.parametrize("name", PROCESSES)
def test_objective_regresses_on_the_stable_target(name: str, prediction_name: str) -> None:
    t = torch.tensor([0.01, 0.3, 0.6, 0.9999], dtype=torch.float64)
    process, prediction = PROCESSES[name], PREDICTIONS[prediction_name]
    reference, x0, noise = (x.double() for x in crowd((3, 4), spread=0.3))
    objective = ks.Objective(process, prediction, target=ks.StableTarget(reference, num=None))
    losses = objective(lambda x, time: torch.sin(x), x0, t, noise=noise)
    alpha, sigma = (f(t).view(-1, 1, 1) for f in (process.alpha, process.sigma))
    xt = alpha * x0 + sigma * noise
    mean = posterior_mean(reference, x0, xt, alpha, sigma)
    implied = (xt - alpha * mean) / sigma
    target = {
        "epsilon": implied,
        "x0": mean,
        "v": (alpha * implied - sigma * mean) / (alpha**2 + sigma**2).sqrt(),
        "velocity": implied - mean,
    }[prediction_name]
    scale = process.input_scale(t).view_as(alpha)
    assert_close(losses, (torch.sin(scale * xt) - target).square().mean((1, 2)), rtol=1e-8, atol=1e-10)
    plain = ks.Objective(process, prediction)(lambda x, time: torch.sin(x), x0, t, noise=noise)
    assert float((losses - plain).abs().max()) > 1e-4


@pytest.mark.parametrize("t", [0.002, 0.02, 0.1, 0.9])
def test_in_half_precision_the_noise_to_predict_is_not_that_of_rounding(t: float) -> None:
    x0, noise = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    far = ks.StableTarget(x0[:1] + 1000, num=None)  # so that the target is x0 itself
    losses = ks.Objective(ks.FlowProcess(), target=far)(lambda x, time: noise, x0, torch.full((8,), t), noise=noise)
    assert float(losses.max()) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reference_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="reference must be finite"):
        ks.StableTarget(torch.tensor([[1.0, 2.0], [3.0, bad]]))


def test_objective_with_a_stable_target_trains_the_model_alone() -> None:
    reference, x0, noise = crowd((4,), spread=0.5)
    slope = torch.tensor(0.5, requires_grad=True)
    objective = ks.Objective(ks.FlowProcess(), ks.VELOCITY, target=ks.StableTarget(reference))
    t = torch.tensor([0.0, 0.3, 0.9, 1.0])
    losses = objective(lambda x, time: slope * x, x0, t, noise=noise)
    (gradient,) = torch.autograd.grad(losses.sum(), slope)
    assert bool(losses.isfinite().all())
    assert bool(gradient.isfinite())
    assert float(gradient.abs()) > 0


@pytest.mark.parametrize("shape", [(5,), (3, 4), (4, 1)])
def test_a_reference_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    x0 = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"reference must .*"):
        ks.StableTarget(torch.zeros(10, *shape))(x0, x0, column(0.9, x0), column(0.1, x0))


@pytest.mark.parametrize("num", [0, -1, 2.5])
def test_a_wrong_number_of_rows_is_refused(num: int) -> None:
    with pytest.raises(ValueError, match=rf"num must .*got {num}"):
        ks.StableTarget(torch.zeros(10, 4), num=num)
