"""The F-statistic against scikit-learn, and the queue that it selects from."""

import numpy as np
import pytest
import torch
from sklearn.feature_selection import SelectKBest, f_regression
from torch.testing import assert_close

import kairostep as ks
from kairostep.timesteps.selection import DropQueue


def random_queue(num_rows: int, num_columns: int, seed: int) -> torch.Tensor:
    """Return loss drops with a common part, on scales from 1e-6 to 1."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(num_rows, 1, generator=generator, dtype=torch.float64)
    own = torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)
    scale = 10 ** (6 * torch.rand(num_columns, generator=generator, dtype=torch.float64) - 6)
    return (common + own) * scale


@pytest.mark.parametrize(("num_rows", "num_columns"), [(3, 10), (20, 1000), (7, 64)])
@pytest.mark.parametrize("seed", range(5))
def test_f_statistic_is_that_of_scikit_learn(num_rows: int, num_columns: int, seed: int) -> None:
    queue = random_queue(num_rows, num_columns, seed)
    queue[:, 3] = 0.25  # constant: explains nothing
    target = queue.sum(1)
    queue[:, 5] = -2 * target  # perfect
    expected, _ = f_regression(queue.numpy(), target.numpy())
    f = ks.f_statistic(queue, target)
    assert float(f[3]) == expected[3] == 0
    assert float(f[5]) > 1e10  # scikit-learn's may be as large and negative: its r passes 1 by rounding
    assert abs(expected[5]) > 1e10
    ordinary = [column for column in range(num_columns) if column not in (3, 5)]
    assert_close(f[ordinary], torch.tensor(expected)[ordinary], rtol=1e-6, atol=0)


@pytest.mark.parametrize("target", [[1.0, 2.0], [1.0, 1.0]])
def test_f_statistic_of_two_rows_is_zero(target: list[float]) -> None:
    queue = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 3.0]], dtype=torch.float64)
    with np.errstate(all="ignore"):
        expected, _ = f_regression(queue.numpy(), np.array(target))
    f = ks.f_statistic(queue, torch.tensor(target, dtype=torch.float64))
    assert_close(f, torch.tensor(expected))
    assert_close(f, torch.zeros(3, dtype=torch.float64))


def test_rows_that_are_not_present_do_not_count() -> None:
    queue = random_queue(20, 50, seed=1)
    present = torch.rand(20, generator=torch.Generator().manual_seed(2)) < 0.5
    target = queue.sum(1)
    assert_close(ks.f_statistic(queue, target, present), ks.f_statistic(queue[present], target[present]))


@pytest.mark.parametrize("k", [1, 3, 10])
def test_selection_is_that_of_select_k_best(k: int) -> None:
    queue = random_queue(20, 200, seed=k)
    expected = SelectKBest(f_regression, k=k).fit(queue.numpy(), queue.sum(1).numpy()).get_support(indices=True)
    assert ks.select_timesteps(queue, k).tolist() == expected.tolist()


def test_equal_scores_go_to_the_later_timesteps() -> None:
    assert ks.select_timesteps(torch.zeros(5, 10), 3).tolist() == [7, 8, 9]


def test_another_rule_can_be_passed() -> None:
    queue = random_queue(20, 30, seed=0)
    largest_variance = ks.select_timesteps(queue, 2, rule=lambda x, y, present: x[present].var(0))
    assert largest_variance.tolist() == sorted(queue.var(0).argsort()[-2:].tolist())
    with pytest.raises(ValueError, match=r"one score per timestep, \(30,\), got \(\)"):
        ks.select_timesteps(queue, 2, rule=lambda x, y, present: x.sum())
    with pytest.raises(ValueError, match=r"k must be in 1..30, the timesteps of the queue, got 31"):
        ks.select_timesteps(queue, 31)


@pytest.mark.parametrize(("num_steps", "sweep"), [(1000, 64), (1000, 1000), (10, 3), (7, 7), (1000, 999)])
def test_a_sweep_covers_all_steps_from_first_to_last(num_steps: int, sweep: int) -> None:
    queue = DropQueue(num_steps, sweep, 20, 3, rule=ks.f_statistic)
    index = (queue.sweep_t.double() * num_steps).floor().long()
    assert index[0] == 0
    assert index[-1] == num_steps - 1
    assert len(index.unique()) == sweep
    width = torch.bincount(queue.nearest)
    assert int(width.max()) <= -(-num_steps // (sweep - 1)) + 1
    assert bool(((queue.step_t - queue.sweep_t[queue.nearest]).abs() <= 0.5 / (sweep - 1) + 0.5 / num_steps).all())


def test_a_row_sums_to_the_weighted_drop_over_all_steps() -> None:
    process = ks.DiscreteProcess.cosine()
    queue = DropQueue(1000, 64, 20, 3, rule=ks.f_statistic)
    weight = process.vlb_weight(queue.step_t)
    assert bool(queue.push(torch.full((64,), 2.0), weight, 0))
    assert_close(queue.drops[0].sum(), 2 * weight.sum())


def test_the_queue_is_a_ring_and_skips_what_is_not_finite() -> None:
    queue = DropQueue(10, 10, 4, 2, rule=ks.f_statistic)
    spread = queue.selected.clone()
    rows = random_queue(6, 10, seed=3).float()
    for slot, row in enumerate(rows[:2]):
        queue.push(row, torch.ones(10), slot)
    assert torch.equal(queue.selected, spread)  # two rows correlate perfectly with anything
    assert not bool(queue.push(torch.full((10,), torch.nan), torch.ones(10), 2))
    assert queue.present.tolist() == [True, True, False, False]
    for slot, row in enumerate(rows):
        queue.push(row, torch.ones(10), slot % 4)
    assert_close(queue.drops, rows[[4, 5, 2, 3]])
    assert torch.equal(queue.selected, ks.select_timesteps(rows[2:].double(), 2))
