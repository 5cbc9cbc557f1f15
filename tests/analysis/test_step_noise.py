"""Gradient noise by bin of t against gradients computed by brute force."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kairostep as ks
from kairostep.analysis import Rows, gradient_noise
from kairostep.analysis.step_noise import METRICS

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


def test_root_loss_draws_are_predicted_from_the_losses(measured) -> None:
    *_, noise = measured
    densities = noise.densities({"uniform": torch.ones(NUM_BINS)}, "adam")
    assert list(densities) == ["uniform", "root_loss of these losses", "least"]
    assert noise.predicted_ratio(densities["uniform"]) == pytest.approx(1)
    assert noise.predicted_ratio(densities["root_loss of these losses"]) < 1
    for metric in METRICS:
        least = noise.ratio(noise.densities({}, metric)["least"], metric)
        assert all(least.value <= noise.ratio(density, metric).value + 1e-9 for density in densities.values())
        assert least.error > 0
        assert least.equivalent_batch == pytest.approx(1 / least.value)


def test_counts_are_checked(measured) -> None:
    model, optimizer, objective, x0, _ = measured
    with pytest.raises(ValueError, match="rows_per_bin must be a whole number of at least 2"):
        gradient_noise(model, objective, Rows(x0), optimizer, rows_per_bin=1)
