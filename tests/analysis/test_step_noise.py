"""Gradient noise by bin of t against gradients computed by brute force."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kairostep as ks
from kairostep.analysis import Rows, gradient_noise
from kairostep.analysis.noise_ratios import LeastRatio, least_ratio, ratio_of
from kairostep.analysis.step_noise import LEAST, METRICS, GradientNoise
from kairostep.commands.noise_analysis import noise_verdict

PROCESS = ks.DiscreteProcess.linear(100)
NUM_BINS, NUM_ROWS = 5, 6


class Network(nn.Module):
    """Two layers on 3-d rows, told the time, with dropout that a measurement must not see."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return the prediction."""
        output: Tensor = self.layers(torch.cat([x, time[:, None].to(x) / 100], 1))
        return output


@pytest.fixture(scope="module")
def measured():
    """Return a trained network, its optimizer, objective, rows and their gradient noise."""
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    objective = ks.Objective(PROCESS, ks.EPSILON, ks.min_snr())
    x0 = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(20):
        objective(model, x0, torch.rand(40)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    noise = gradient_noise(model, objective, Rows(x0), optimizer, num_bins=NUM_BINS, rows_per_bin=NUM_ROWS, seed=3)
    return model, optimizer, objective, x0, noise


def test_moments_and_ratios_agree_with_brute_force(measured) -> None:
    model, optimizer, objective, x0, noise = measured
    assert model.training
    model.eval()
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(40, (NUM_ROWS,), generator=generator)
    eps = torch.randn(NUM_ROWS, 3, generator=generator)
    place = (torch.randperm(NUM_ROWS, generator=generator) + 0.5) / NUM_ROWS
    gradients = torch.zeros(NUM_BINS, NUM_ROWS, sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    losses = torch.zeros(NUM_BINS, NUM_ROWS, dtype=torch.float64)
    for k in range(NUM_BINS):
        for row in range(NUM_ROWS):
            t = ((k + place[row]) / NUM_BINS)[None]
            model.zero_grad()
            loss = objective(model, x0[index[row]][None], t, noise=eps[row][None]).sum()
            loss.backward()
            losses[k, row] = float(loss.detach())
            gradients[k, row] = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    second = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in model.parameters()]).double()
    divisor = (second / (1 - 0.999**20)).sqrt() + 1e-8
    for metric, factor in {"plain": divisor**0, "half": divisor**-0.5, "adam": 1 / divisor}.items():
        scaled = gradients * factor
        squared = scaled.square().sum(2)
        assert_close(noise.squared[metric], squared, rtol=1e-4, atol=0)
        pairs = torch.einsum("kip,kjp->kij", scaled, scaled)
        apart = (pairs.sum((1, 2)) - squared.sum(1)) / (NUM_ROWS * (NUM_ROWS - 1))
        assert_close(noise.mean_squared[metric], apart, rtol=1e-3, atol=1e-4 * float(squared.mean()))
        q = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.1], dtype=torch.float64)
        expected = float((squared.mean(1) / (NUM_BINS**2 * q)).sum() / squared.mean())
        assert noise.ratio(q, metric).value == pytest.approx(expected, rel=1e-4)
        assert 0 <= noise.within_share(metric) <= 1
    assert_close(noise.losses, losses, rtol=1e-4, atol=0)


def test_it_warns_where_the_metric_cannot_be_read() -> None:
    model = Network()
    optimizer = torch.optim.Adafactor(model.parameters())
    x0, objective = torch.randn(4, 3), ks.Objective(PROCESS, ks.EPSILON)
    objective(model, x0, torch.rand(4)).mean().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="what Adafactor divides gradients by cannot be read"):
        noise = gradient_noise(model, objective, Rows(x0), optimizer, num_bins=2, rows_per_bin=2)
    assert_close(noise.squared["adam"], noise.squared["plain"], rtol=0, atol=0)


def test_root_loss_draws_are_predicted_from_the_losses(measured) -> None:
    *_, noise = measured
    densities = noise.densities({"uniform": torch.ones(NUM_BINS)}, "adam")
    assert list(densities) == ["uniform", "root_loss of these losses", "least"]
    assert noise.predicted_ratio(densities["uniform"]) == pytest.approx(1)
    assert noise.predicted_ratio(densities["root_loss of these losses"]) < 1
    for metric in METRICS:
        least = noise.ratio(noise.densities({}, metric)["least"], metric)
        assert all(least.value <= noise.ratio(density, metric).value + 1e-9 for density in densities.values())
        found = noise.ratios(densities, metric, least_in="adam")
        assert list(found) == list(densities)
        assert found["uniform"].value == pytest.approx(1)
        assert found[LEAST] == noise.least_ratio(metric, least_in="adam").ratio
        assert found[LEAST].error > 0
        assert found[LEAST].equivalent_batch == pytest.approx(1 / found[LEAST].value)
        same_rows = noise.least_ratio(metric, least_in="adam").same_rows
        assert same_rows == pytest.approx(noise.ratio(densities[LEAST], metric).value)


FLAT, UNEVEN = torch.ones(20), torch.linspace(0, -3, 20).exp()


def drawn(moments: Tensor, rows_per_bin: int, *, seed: int = 0, num: int = 150) -> Tensor:
    """Return `num` tables of log-normal squared sizes with these moments (K,), half of their noise that of the row."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(num, len(moments), rows_per_bin, generator=generator, dtype=torch.float64)
    of_row = torch.randn(num, 1, rows_per_bin, generator=generator, dtype=torch.float64)
    return moments[:, None] * (0.9 * (own + of_row) / 2**0.5 - 0.9**2 / 2).exp()


def measured_least(tables: Tensor) -> tuple[list[LeastRatio], Tensor, Tensor]:
    """Return the least ratio of each table (N, K, R), and the values and errors of all, (N,)."""
    found = [least_ratio(squared, squared) for squared in tables]
    return found, torch.tensor([f.ratio.value for f in found]), torch.tensor([f.ratio.error for f in found])


@pytest.mark.parametrize("rows_per_bin", [4, 8, 16])
@pytest.mark.parametrize("moments", [FLAT, UNEVEN], ids=["flat", "uneven"])
def test_the_least_noise_is_not_biased_by_learning_from_the_rows_that_measure_it(
    moments: Tensor, rows_per_bin: int
) -> None:
    truth = float(moments.sqrt().mean().square() / moments.mean())  # 1 if moments are flat
    found, values, errors = measured_least(drawn(moments, rows_per_bin))
    assert abs(float(values.mean()) - truth) < 0.2 * float(errors.mean())
    assert 0.75 < float(errors.square().mean().sqrt() / values.std()) < 2
    assert float(((values - truth).abs() < 2 * errors).double().mean()) > 0.8  # few rows: errors are rough
    same = sum(each.same_rows for each in found) / len(found)
    other = sum(each.other_rows for each in found) / len(found)
    assert same < truth - 0.2 * float(errors.mean())
    assert truth + 0.2 * float(errors.mean()) < other


@pytest.mark.parametrize(("rows_per_bin", "num_parts"), [(4, 4), (16, 16), (64, 16)])
def test_the_least_noise_weighs_both_estimates_by_the_rows_they_learn_from(rows_per_bin: int, num_parts: int) -> None:
    """The density misses by 1/R of all R rows on them, and by 1/(R - R/G) on a part of them with the others."""
    for each in measured_least(drawn(UNEVEN, rows_per_bin, num=3))[0]:
        same_weight = 1 / (1 + (num_parts - 1) / num_parts)
        expected = same_weight * each.same_rows + (1 - same_weight) * each.other_rows
        assert each.ratio.value == pytest.approx(expected, rel=1e-9)


def test_errors_of_a_known_density_allow_for_rows_that_bins_share() -> None:
    density = torch.linspace(1, 3, 20, dtype=torch.float64)
    found = [ratio_of(density, squared) for squared in drawn(UNEVEN, 32)]
    spread = torch.tensor([each.value for each in found]).std()
    assert float(torch.tensor([each.error for each in found]).mean()) == pytest.approx(float(spread), rel=0.15)


@pytest.mark.parametrize("rows_per_bin", [2, 3])
def test_few_rows_give_the_least_noise_without_an_error(rows_per_bin: int) -> None:
    _, values, errors = measured_least(drawn(FLAT, rows_per_bin))
    assert bool(errors.isnan().all())
    assert float(values.mean()) == pytest.approx(1, abs=0.01)


def test_a_bin_with_a_gradient_in_one_row_alone_has_finite_noise() -> None:
    squared = torch.ones(3, 4, dtype=torch.float64)
    squared[0, 1:] = 0
    least = least_ratio(squared, squared)
    assert 0 < least.same_rows < least.ratio.value < least.other_rows < 2


def test_counts_are_checked(measured) -> None:
    model, optimizer, objective, x0, _ = measured
    with pytest.raises(ValueError, match="rows_per_bin must be a whole number of at least 2"):
        gradient_noise(model, objective, Rows(x0), optimizer, rows_per_bin=1)


@pytest.mark.parametrize(
    ("moments", "says"),
    [
        (FLAT, "in AdamW's metric no density over t is clearly better than uniform: the best has "),
        (UNEVEN, "in AdamW's metric the best density over t has "),
    ],
    ids=["flat", "uneven"],
)
def test_the_verdict_claims_a_gain_only_where_there_is_one(moments: Tensor, says: str) -> None:
    squared = drawn(moments, 16, num=1)[0]
    noise = GradientNoise(dict.fromkeys(METRICS, squared), dict.fromkeys(METRICS, moments), squared, squared)
    assert noise_verdict(noise, 8, "AdamW").startswith(says)


@pytest.mark.gpu
def test_replayed_rows_equal_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from kairostep.training.cuda_graphs import Graphs, Replayed

    torch.backends.cuda.matmul.allow_tf32 = False
    model, x0 = Network().cuda(), torch.randn(40, 3, generator=torch.Generator().manual_seed(1)).cuda()
    optimizer, objective = torch.optim.Adam(model.parameters()), ks.Objective(PROCESS, ks.EPSILON)
    objective(model, x0, torch.rand(40).cuda()).mean().backward()
    optimizer.step()

    def measure() -> GradientNoise:
        return gradient_noise(model, objective, Rows(x0), optimizer, num_bins=NUM_BINS, rows_per_bin=NUM_ROWS)

    replays: list[Replayed] = []

    def wrap(*given: Any) -> Replayed:
        replays.append(original(*given))
        return replays[-1]

    original = Graphs.wrap
    monkeypatch.setattr(Graphs, "wrap", wrap)
    replayed = measure()
    monkeypatch.setattr(Graphs, "wrap", lambda graphs, name, compute: compute)
    eager = measure()
    assert [len(each.recordings) for each in replays] == [1]
    assert_close(replayed.losses, eager.losses, rtol=1e-5, atol=0)
    for metric in METRICS:
        assert_close(replayed.squared[metric], eager.squared[metric], rtol=1e-5, atol=0)
        size = float(eager.squared[metric].mean())
        assert_close(replayed.mean_squared[metric], eager.mean_squared[metric], rtol=1e-5, atol=1e-5 * size)
