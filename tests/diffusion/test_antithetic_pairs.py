"""Antithetic pairs: the rule in words, and the expected gradient against full enumeration."""

import itertools
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


def drawn_at(t: Tensor) -> ks.Timesteps:
    return ks.Timesteps(t, torch.ones_like(t))


def partners(process: ks.FlowProcess, t: list[float], threshold: float = 1.0) -> dict[int, int]:
    """Return second -> first for each pair, by the rule in words."""
    order = sorted(range(len(t)), key=lambda i: t[i])
    pairs = {}
    for first, second in zip(order[0::2], order[1::2], strict=False):
        alpha, sigma = (float(f(torch.tensor([t[first]], dtype=torch.float64))) for f in (process.alpha, process.sigma))
        if sigma < threshold * alpha:
            pairs[second] = first
    return pairs


@pytest.mark.parametrize(
    ("process", "t", "threshold", "rows"),
    [
        (ks.FlowProcess(), [0.4, 0.1, 0.9, 0.2], 1.0, [0, 1, 0, 1]),  # the first of a pair decides
        (ks.FlowProcess(), [0.6, 0.1, 0.9, 0.2], 1.0, [0, 1, 2, 1]),
        (ks.FlowProcess(), [0.1, 0.2, 0.3], 1.0, [0, 0, 2]),
        (ks.FlowProcess(), [0.2], 1.0, [0]),
        (ks.FlowProcess(), [0.6, 0.7, 0.8, 0.9], 1.0, [0, 1, 2, 3]),
        (ks.FlowProcess(), [0.6, 0.7, 0.8, 0.9], 2.0, [0, 0, 2, 3]),
        (ks.FlowProcess(), [0.3, 0.1, 0.2, 0.05], 0.2, [0, 3, 2, 3]),
        (ks.FlowProcess(), [1.0, 0.0, 0.999999, 0.49], 1.0, [0, 1, 2, 1]),
        (ks.EDMProcess(), [0.5, 0.9, 0.55, 0.95, 0.1], 1.0, [4, 2, 2, 3, 4]),  # sigma = 1 at t = 0.5865
        (ks.EDMProcess(), [0.59, 0.9, 0.6, 0.95], 1.0, [0, 1, 2, 3]),
        (ks.DiscreteProcess.linear(), [0.9995, 0.0005, 0.2, 0.1], 1.0, [2, 1, 2, 1]),
        (PROCESSES["zero_terminal"], [0.9999, 0.9998, 0.0, 0.9], 1.0, [0, 1, 2, 2]),
    ],
)
def test_neighbours_in_time_are_paired_where_there_is_little_noise(
    process: ks.FlowProcess, t: list[float], threshold: float, rows: list[int]
) -> None:
    x0 = torch.zeros(len(t), 3, dtype=torch.float64)
    pairs = ks.antithetic_pairs(process, x0, drawn_at(torch.tensor(t, dtype=torch.float64)), threshold=threshold)
    assert pairs.rows.tolist() == rows
    for row, first in enumerate(rows):
        if row != first:
            assert torch.equal(pairs.noise[row], -pairs.noise[first])


@every_process
@pytest.mark.parametrize("num_rows", [1, 2, 5, 32, 33])
@pytest.mark.parametrize("threshold", [0.25, 1.0, 3.0])
def test_pairs_are_those_of_the_rule(name: str, num_rows: int, threshold: float) -> None:
    process, t = PROCESSES[name], torch.rand(num_rows, generator=torch.Generator().manual_seed(num_rows))
    pairs = ks.antithetic_pairs(process, torch.zeros(num_rows, 2, 3), drawn_at(t), threshold=threshold)
    expected = partners(process, t.tolist(), threshold)
    assert pairs.rows.dtype == torch.int64
    assert pairs.rows.tolist() == [expected.get(row, row) for row in range(num_rows)]
    sign = torch.tensor([-1.0 if row in expected else 1.0 for row in range(num_rows)])
    assert torch.equal(pairs.noise, pairs.noise[pairs.rows] * sign[:, None, None])
    assert len(pairs.noise.flatten().abs().unique()) == (num_rows - len(expected)) * 6


@every_process
def test_at_pure_noise_nothing_is_paired(name: str) -> None:
    t = torch.tensor([1.0, 1 - 2**-24, 0.9999, 1.0])
    pairs = ks.antithetic_pairs(PROCESSES[name], torch.zeros(4, 2), drawn_at(t))
    assert pairs.rows.tolist() == [0, 1, 2, 3]
    assert bool(pairs.noise.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_noise_is_like_x0_and_from_the_global_generator(dtype: torch.dtype) -> None:
    x0, drawn = torch.zeros(6, 3, 4, dtype=dtype), drawn_at(torch.rand(6))
    torch.manual_seed(0)
    first, second = (ks.antithetic_pairs(ks.FlowProcess(), x0, drawn).noise for _ in range(2))
    torch.manual_seed(0)
    again = ks.antithetic_pairs(ks.FlowProcess(), x0, drawn).noise
    assert first.shape == x0.shape
    assert first.dtype == dtype
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_noise_is_standard_normal_and_correlated_within_pairs_alone() -> None:
    torch.manual_seed(0)
    drawn, num = drawn_at(torch.tensor([0.3, 0.1, 0.8, 0.2, 0.9, 0.45, 0.7])), 40_000
    pairs = ks.antithetic_pairs(ks.FlowProcess(), torch.zeros(7, num, dtype=torch.float64), drawn)
    assert pairs.rows.tolist() == [0, 1, 2, 1, 4, 0, 6]
    expected = torch.eye(7, dtype=torch.float64)
    for one, other in ((1, 3), (0, 5)):
        expected[one, other] = expected[other, one] = -1
    assert_close(pairs.noise.mean(1), torch.zeros(7, dtype=torch.float64), rtol=0, atol=5 / num**0.5)
    assert_close(pairs.noise @ pairs.noise.T / num, expected, rtol=0, atol=5 * (2 / num) ** 0.5)
    assert_close(
        pairs.noise.pow(4).mean(1), torch.full((7,), 3.0, dtype=torch.float64), rtol=0, atol=5 * (96 / num) ** 0.5
    )


def cases(process: ks.FlowProcess, x0: Tensor, t: Tensor, nodes: Tensor, *, paired: bool) -> tuple[Tensor, ...]:
    """Return x0, noise, t of every batch: all orders of the times (P, B) times all noises of rows from nodes (Q, D).

    Each is (C, B, ...); what a batch does with its noises is read off one call per order.
    """
    num_rows = len(x0)
    choices = torch.tensor(list(itertools.product(range(len(nodes)), repeat=num_rows)))  # (Q**B, B)
    all_x0, all_noise, all_t = [], [], []
    for order in itertools.permutations(range(num_rows)):
        times, rows, sign = t[list(order)], torch.arange(num_rows), torch.ones(num_rows, 1, dtype=x0.dtype)
        if paired:
            pairs = ks.antithetic_pairs(process, x0, drawn_at(times))
            rows = pairs.rows
            sign = torch.where(rows == torch.arange(num_rows), 1.0, -1.0).to(x0.dtype)[:, None]
            assert torch.equal(pairs.noise, sign * pairs.noise[rows])
        all_noise.append(sign * nodes[choices][:, rows])
        all_x0.append(x0[rows].expand(len(choices), -1, -1))
        all_t.append(times.expand(len(choices), -1))
    return torch.cat(all_x0), torch.cat(all_noise), torch.cat(all_t)


def batch_gradients(
    process: ks.FlowProcess, prediction: ks.Prediction, parameters: Tensor, batches: tuple[Tensor, ...]
) -> Tensor:
    """Return the gradient (C, P) of the weighted mean loss of each batch."""
    x0, noise, t = batches
    num_cases, num_rows = t.shape
    of_rows = (
        parameters.expand(t.numel(), -1).clone().requires_grad_()
    )  # a copy for each row: its gradient is the row's

    def model(x: Tensor, time: Tensor) -> Tensor:
        slope, bend, shift, tilt = of_rows[:, :, None].unbind(1)  # (C B, 1) each
        return slope * x + bend * torch.tanh(x + shift) + tilt * torch.cos(time.to(x.dtype) / 500)[:, None]

    losses = ks.Objective(process, prediction)(model, x0.flatten(0, 1), t.flatten(), noise=noise.flatten(0, 1))
    weight = 1 + t.flatten()  # of the draws; they stay with their times
    (gradient,) = torch.autograd.grad((weight * losses).sum(), of_rows)
    return gradient.view(num_cases, num_rows, -1).mean(1)


ENUMERATED = {
    "linear": (ks.DiscreteProcess.linear(), ks.EPSILON, [0.05, 0.15, 0.22, 0.8]),
    "flow": (ks.FlowProcess(), ks.VELOCITY, [0.1, 0.35, 0.6, 0.9]),
    "edm": (ks.EDMProcess(), ks.EDMProcess().prediction, [0.2, 0.4, 0.55, 0.8]),
}
HERMITE = torch.tensor([[-math.sqrt(3)], [0.0], [math.sqrt(3)]], dtype=torch.float64)
HERMITE_WEIGHT = torch.tensor([1 / 6, 2 / 3, 1 / 6], dtype=torch.float64)
SIGNS = torch.tensor([[-1.0, -0.5], [-1.0, 0.5], [1.0, -0.5], [1.0, 0.5]], dtype=torch.float64)


@pytest.mark.parametrize("nodes", [HERMITE, SIGNS], ids=["one dimension", "two dimensions"])
@pytest.mark.parametrize("name", ENUMERATED)
def test_pairs_leave_the_expected_gradient_unchanged(name: str, nodes: Tensor) -> None:
    process, prediction, times = ENUMERATED[name]
    x0 = torch.randn(4, nodes.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t, parameters = torch.tensor(times, dtype=torch.float64), torch.tensor([0.3, -0.7, 0.4, 0.2], dtype=torch.float64)
    weight = HERMITE_WEIGHT if nodes is HERMITE else torch.full((4,), 0.25, dtype=torch.float64)
    probability = torch.cartesian_prod(*[weight] * 4).prod(1).repeat(24) / 24  # (C,)
    means = []
    for paired in (False, True):
        batches = cases(process, x0, t, nodes, paired=paired)
        gradients = batch_gradients(process, prediction, parameters, batches)
        means.append((probability[:, None] * gradients).sum(0))
    assert_close(probability.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert float(means[0].abs().min()) > 1e-3
    assert_close(means[1], means[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["linear", "flow"])
def test_pairs_lower_the_variance_of_a_nearly_linear_model_at_low_noise(name: str) -> None:
    """A model close to its optimum: what is left of the gradient's noise comes from eps, and +eps and -eps cancel."""
    process, prediction, _ = ENUMERATED[name]
    t = torch.tensor([0.01, 0.02, 0.03, 0.04], dtype=torch.float64)
    x0 = torch.randn(4, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slope = -1.0 if prediction is ks.VELOCITY else 0.0
    parameters = torch.tensor([slope, 0.01, 0.1, 0.0], dtype=torch.float64)
    probability = torch.cartesian_prod(*[HERMITE_WEIGHT] * 4).prod(1).repeat(24)[:, None] / 24
    variances = []
    for paired in (False, True):
        gradients = batch_gradients(process, prediction, parameters, cases(process, x0, t, HERMITE, paired=paired))
        mean = (probability * gradients).sum(0)
        variances.append((probability * (gradients - mean).square()).sum())
    assert float(variances[1]) < 0.1 * float(variances[0])
