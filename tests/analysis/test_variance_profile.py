"""The variance of gradients, against models whose gradients have a known covariance."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kairostep as ks
from kairostep.analysis import Rows, variance_profile
from kairostep.analysis.gradient_profile import bootstrapped_ratio
from kairostep.analysis.table import variance_table, variance_verdict

NUM_DIMENSIONS = 8


class Offset(nn.Module):
    """Predicts a vector whatever it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.linspace(-1, 1, NUM_DIMENSIONS))

    def forward(self, xt: Tensor, time: Tensor) -> Tensor:
        """Return the prediction."""
        return self.vector.expand_as(xt)


class Factor(nn.Module):
    """Predicts x_t times a number, 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))

    def forward(self, xt: Tensor, time: Tensor) -> Tensor:
        """Return the prediction."""
        return self.number * xt


def within(estimate: object, expected: float, errors: float = 4) -> None:
    value, error = estimate.value, estimate.error  # type: ignore[attr-defined]
    assert abs(value - expected) < errors * error
    assert error < 0.2 * abs(expected)


def test_of_an_offset_the_variance_is_that_of_the_target() -> None:
    model, rows = Offset(), Rows(torch.randn(5000, NUM_DIMENSIONS, generator=torch.Generator().manual_seed(1)) * 2)
    noise = variance_profile(model, ks.Objective(ks.DiscreteProcess.linear()), rows, times=(0.3,), num_pairs=200).at[0]
    within(noise.variance, 4 / NUM_DIMENSIONS)  # g = 2 (b - noise) / D
    within(noise.signal, 4 * float(model.vector.detach().square().sum()) / NUM_DIMENSIONS**2)
    within(noise.loss, 1 + float(model.vector.detach().square().mean()))
    velocity = ks.Objective(ks.FlowProcess(), ks.VELOCITY)
    flow = variance_profile(model, velocity, rows, times=(0.6,), num_pairs=200).at[0]
    within(flow.variance, 4 / NUM_DIMENSIONS * (1 + 4))  # the target is noise - x0


def test_over_time_it_follows_the_formula_and_the_bound_adds_its_weight_squared() -> None:
    process, times = ks.DiscreteProcess.linear(), (0.1, 0.15, 0.5, 0.9)
    profile = variance_profile(
        Factor(), ks.Objective(process), Rows(torch.zeros(10, NUM_DIMENSIONS)), times=times, num_pairs=400
    )
    for at in profile.at:
        t = torch.tensor([at.t], dtype=torch.float64)
        within(at.variance, 8 * float(process.sigma(t)) ** 2 / NUM_DIMENSIONS)  # g = -2 sigma |noise|^2 / D
        within(at.signal, 4 * float(process.sigma(t)) ** 2)
        assert at.vlb_weight == pytest.approx(float(process.vlb_weight(t)), rel=1e-5)
        assert at.vlb_variance.value == pytest.approx(at.vlb_weight**2 * at.variance.value)
        assert at.log_snr == pytest.approx(float(process.log_snr(t)))
    ratio = profile.early_to_late()
    expected = float((process.sigma(torch.tensor([0.1, 0.15])) ** 2).mean() / process.sigma(torch.tensor([0.9])) ** 2)
    assert ratio.low <= expected * 1.001
    assert ratio.high >= expected * 0.999  # the same noise at all times: the interval is narrow
    assert ratio.value == pytest.approx(expected, rel=1e-3)
    assert "larger early than late, does not hold" in variance_verdict("L", ratio, claimed=True)
    assert len(variance_table(profile).splitlines()) == 6


def test_the_weighting_of_the_objective_plays_no_part() -> None:
    rows, process = Rows(torch.zeros(10, NUM_DIMENSIONS)), ks.DiscreteProcess.linear()
    one, other = (
        variance_profile(Factor(), ks.Objective(process, ks.EPSILON, weighting), rows, num_pairs=2)
        for weighting in (ks.constant(), ks.min_snr())
    )
    assert torch.equal(one.per_pair, other.per_pair)


def test_standard_errors_are_the_spread_over_seeds() -> None:
    rows, objective = Rows(torch.zeros(10, NUM_DIMENSIONS)), ks.Objective(ks.FlowProcess(), ks.EPSILON)
    profiles = [
        variance_profile(Factor(), objective, rows, times=(0.5,), num_pairs=20, rows_per_gradient=4, seed=seed).at[0]
        for seed in range(60)
    ]
    values = torch.tensor([at.variance.value for at in profiles])
    errors = torch.tensor([at.variance.error for at in profiles])
    assert_close(values.std(), errors.square().mean().sqrt(), rtol=0.3, atol=0)


def test_nothing_is_left_behind() -> None:
    model = Factor().train()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    profile = variance_profile(model, ks.Objective(ks.FlowProcess(), ks.VELOCITY), Rows(torch.zeros(3, 2)), num_pairs=2)
    assert torch.equal(torch.rand(1), expected)
    assert model.training
    assert model.number.grad is None
    assert profile.num_evaluations == 20 * 4 * 16


def test_classes_are_told_to_the_model() -> None:
    seen = []

    class Conditional(Factor):
        def forward(self, xt: Tensor, time: Tensor, class_labels: Tensor | None = None) -> Tensor:
            assert class_labels is not None
            seen.append(class_labels)
            return super().forward(xt, time)

    rows = Rows(torch.zeros(6, 2), torch.arange(6))
    variance_profile(Conditional(), ks.Objective(ks.FlowProcess(), ks.VELOCITY), rows, times=(0.5,), num_pairs=2)
    assert len(torch.cat(seen).unique()) > 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_pairs": 1}, "num_pairs must be a whole number of at least 2, got 1"),
        ({"rows_per_gradient": 0}, "rows_per_gradient must be a whole number of at least 1, got 0"),
    ],
)
def test_sizes_are_checked(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        variance_profile(Factor(), ks.Objective(ks.FlowProcess()), Rows(torch.zeros(3, 2)), **arguments)  # type: ignore[arg-type]


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(ValueError, match="must have parameters that require a gradient"):
        variance_profile(Factor().requires_grad_(False), ks.Objective(ks.FlowProcess()), Rows(torch.zeros(3, 2)))


def test_the_interval_of_a_ratio_covers_it_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(200):
        above, below = (torch.rand(32, generator=generator, dtype=torch.float64) + 0.5 for _ in range(2))
        ratio = bootstrapped_ratio(2 * above, below)
        covered += ratio.low < 2 < ratio.high
    assert 0.88 < covered / 200 < 0.99
    assert math.isclose(bootstrapped_ratio(torch.ones(4), torch.ones(4)).value, 1)
