"""Root-loss draws at batches of 1 to 8, as in fine-tuning: what few losses per step teach, and what a weight may be."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import kairostep as ks

SMALL = [1, 2, 4, 8]


def uneven(t: Tensor) -> Tensor:
    """Return a mean loss like that of the linear schedule."""
    return 0.02 + 0.9 * (1 - t) ** 8


def moments(mean_loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what the mean loss tells of single gradients in each of 20 bins."""
    return mean_loss((torch.arange(2000) + 0.5) / 2000).view(20, 100).mean(1)


def steps_of(
    sampler: ks.TimestepSampler, num_rows: int, num_steps: int, mean_loss: Callable[[Tensor], Tensor] = uneven
) -> Iterator[ks.Timesteps]:
    """Show the sampler noisy losses at its own draws, and yield the draws of each step before it learns from them."""
    generator, x0 = torch.Generator().manual_seed(0), torch.zeros(num_rows, 1, dtype=torch.float64)
    for _ in range(num_steps):
        drawn = sampler.sample(x0)
        yield drawn
        noise = torch.randn(num_rows, 8, generator=generator).square().mean(1)  # a spread of half the mean
        with sampler.observe(x0, drawn, mean_loss(drawn.t) * noise):
            pass


@pytest.mark.parametrize("num_rows", SMALL)
def test_the_table_learned_from_few_losses_a_step_saves_nearly_what_the_best_one_does(num_rows: int) -> None:
    sampler, own = ks.RootLoss(), moments(uneven)
    for _ in steps_of(sampler, num_rows, 200):
        pass
    least = float(ks.noise_ratio(ks.least_noise_density(own), own))
    assert float(ks.noise_ratio(sampler.density(20), own)) < least + 0.03
    assert float(sampler.diagnostics()["equivalent_batch"]) > 1.3 * num_rows


@pytest.mark.parametrize("num_rows", SMALL)
def test_a_flat_loss_stays_uniform_though_each_bin_has_few(num_rows: int) -> None:
    sampler, own = ks.RootLoss(), torch.ones(20)
    ratios = [
        float(ks.noise_ratio(sampler.density(20), own)) for _ in steps_of(sampler, num_rows, 300, torch.ones_like)
    ]
    assert max(ratios) < 1.05
    assert ratios[-1] == pytest.approx(1)


@pytest.mark.parametrize("floor", [0.05, 0.1, 0.5])
@pytest.mark.parametrize(
    "mean_loss", [uneven, lambda t: torch.where(t < 0.05, 1e6, 1e-6), lambda t: torch.where(t < 0.5, math.nan, t)]
)
def test_a_single_row_never_counts_more_than_one_over_the_floor(
    mean_loss: Callable[[Tensor], Tensor], floor: float
) -> None:
    sampler = ks.RootLoss(floor=floor, warmup=1, refresh=1)  # follows every single loss
    weights = torch.cat([drawn.weight for drawn in steps_of(sampler, 1, 400, mean_loss)])
    assert bool((weights > 0).all())
    assert float(weights.max()) <= (1 + 1e-6) / floor


@pytest.mark.parametrize("num_rows", SMALL)
def test_weighted_means_are_those_of_uniform_draws_while_the_table_is_learned(num_rows: int) -> None:
    """A table depends on earlier steps alone, so that each step's error has mean 0 whatever was learned."""
    sampler = ks.RootLoss(warmup=1, refresh=1, seed=2)
    drawn = list(steps_of(sampler, num_rows, 2000 // num_rows))
    assert float(20 * sampler.mass().max()) > 2
    for function, integral in ((torch.square, 1 / 3), (torch.exp, math.e - 1), (uneven, 0.02 + 0.9 / 9)):
        errors = torch.stack([(own.weight * function(own.t)).mean() for own in drawn]) - integral
        assert abs(float(errors.mean())) < 4 * float(errors.std()) / len(errors) ** 0.5


@pytest.mark.parametrize(("num_batches", "num_rows"), [(8, 16), (4, 1), (32, 4)])
def test_accumulated_micro_batches_teach_what_one_batch_of_the_same_draws_does(num_batches: int, num_rows: int) -> None:
    accumulated, whole = ks.RootLoss(), ks.RootLoss()
    generator, x0 = torch.Generator().manual_seed(0), torch.zeros(num_batches * num_rows, 1)
    for _ in range(70):  # past the warm-up, over several changes of the density
        t = torch.rand(len(x0), generator=generator)
        losses = uneven(t) * torch.rand(len(x0), generator=generator)
        drawn = ks.Timesteps(t, torch.ones_like(t))
        *earlier, last = zip(x0.split(num_rows), t.split(num_rows), losses.split(num_rows), strict=True)
        for rows, times, own in earlier:
            accumulated.show(rows, ks.Timesteps(times, torch.ones_like(times)), own)
        with accumulated.observe(last[0], ks.Timesteps(last[1], torch.ones_like(last[1])), last[2]):
            pass
        with whole.observe(x0, drawn, losses):
            pass
    one, other = accumulated.state_dict(), whole.state_dict()
    assert set(one) == set(other)
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    assert int(accumulated.squares.num_seen.sum()) == 70 * len(x0)
    assert accumulated.diagnostics()["equivalent_batch"] == whole.diagnostics()["equivalent_batch"]


def test_least_noise_learns_from_the_losses_of_all_micro_batches_and_probes_the_last() -> None:
    """The micro-batches of a step end as one batch would, but for the rows of the probes."""
    weights = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.0)
    sampler, root_loss = ks.LeastNoise(optimizer, warmup=4, refresh=2), ks.RootLoss(warmup=4, refresh=2)
    generator, asked = torch.Generator().manual_seed(0), list[int]()

    def loss_at(rows: Tensor, t: Tensor) -> Tensor:
        asked.extend(rows.tolist())
        return uneven(t) * (1 + weights).square()

    for _ in range(30):  # the first sweep begins at step 16
        for number in range(4):
            t = torch.rand(8, generator=generator)
            shown = torch.zeros(8, 1), ks.Timesteps(t, torch.ones_like(t)), uneven(t)
            if number < 3:
                sampler.show(*shown)
                root_loss.show(*shown)
        for own in (sampler, root_loss):
            with own.observe(*shown, loss_at):
                optimizer.step()
    assert len(asked) == 10 * 8  # all rows of the last micro-batch, which has fewer than a probe takes
    assert max(asked) == 7
    for key, value in root_loss.squares.state_dict().items():
        assert torch.equal(value, sampler.squares.state_dict()[key])
    found = sampler.diagnostics()
    assert float(found["equivalent_batch"] * found["noise_ratio"]) == pytest.approx(32)
