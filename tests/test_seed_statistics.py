"""Intervals are those of scipy, hold what they promise, and find nothing where labels mean nothing."""

import math
import random

import numpy as np
import pytest
from scipy import stats

from kairostep.seed_statistics import (
    PairedRatio,
    Ratio,
    cost_ratio,
    cost_to_reach,
    paired_ratio,
    spread_of,
    student_quantile,
    student_within,
)

NUM_DRAWS = 2000


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 10, 29, 30, 31, 100, 999])
def test_quantiles_are_those_of_student(degrees: int) -> None:
    assert student_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-9)
    assert student_quantile(degrees, 0.5) == pytest.approx(stats.t.ppf(0.75, degrees), rel=1e-9)
    for t in (0.1, 1.0, 7.0):
        assert student_within(t, degrees) == pytest.approx(1 - 2 * stats.t.sf(t, degrees), rel=1e-12)


@pytest.mark.parametrize("num_seeds", [2, 3, 5, 12])
def test_a_paired_ratio_is_scipys_interval_of_the_logarithms(num_seeds: int) -> None:
    chance = np.random.default_rng(num_seeds)
    arm, base = chance.lognormal(size=(2, num_seeds))
    found = paired_ratio(dict(enumerate(arm)), dict(enumerate(base)))
    assert found is not None
    logs = np.log(arm / base)
    expected = stats.t.interval(0.95, num_seeds - 1, loc=logs.mean(), scale=stats.sem(logs))
    assert found.mean == pytest.approx(stats.gmean(arm / base))
    assert found.interval == pytest.approx(tuple(np.exp(expected)))
    differs = stats.ttest_rel(np.log(arm), np.log(base)).pvalue < 0.05
    assert bool(found.decided) == differs


@pytest.mark.parametrize("num_seeds", [2, 3, 5])
def test_the_interval_holds_the_truth_as_often_as_it_says(num_seeds: int) -> None:
    chance = np.random.default_rng(0)
    truth, num_held = 0.64, 0
    for _ in range(NUM_DRAWS):
        seeds = chance.normal(scale=0.5, size=num_seeds)  # what runs of a seed share
        arm, base = np.exp(seeds + chance.normal(scale=0.05, size=(2, num_seeds)))
        found = paired_ratio(dict(enumerate(truth * arm)), dict(enumerate(base)))
        assert found is not None
        assert found.interval is not None
        num_held += found.interval[0] <= truth <= found.interval[1]
    assert num_held / NUM_DRAWS == pytest.approx(0.95, abs=0.02)


def test_permuted_labels_show_no_difference() -> None:
    """Runs of two arms that truly differ, dealt to `arm` and `baseline` at random: a verdict is an accident."""
    chance = random.Random(0)
    num_seeds, num_decided = 12, 0
    for _ in range(NUM_DRAWS):
        arm, base = ({}, {})
        for seed in range(num_seeds):
            pair = [0.8 * math.exp(chance.gauss(0, 0.02)), math.exp(chance.gauss(0, 0.02))]
            chance.shuffle(pair)
            arm[seed], base[seed] = pair
        found = paired_ratio(arm, base)
        assert found is not None
        num_decided += found.decided != 0
    assert num_decided / NUM_DRAWS < 0.07


def test_one_seed_decides_nothing_however_large_the_ratio() -> None:
    found = paired_ratio({0: 0.01}, {0: 1.0})
    assert found is not None
    assert (found.interval, found.decided, str(found)) == (None, 0, "0.010 (one seed)")


def test_only_seeds_that_both_have_are_paired() -> None:
    found = paired_ratio({0: 1.0, 1: 2.0, 3: math.nan, 4: -1.0}, {1: 4.0, 2: 1.0, 3: 1.0, 4: 1.0})
    assert found is not None
    assert dict(found.by_seed) == {1: Ratio(0.5)}
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None
    assert paired_ratio({0: 1.0}, {0: 0.0}) is None


def test_a_run_that_never_gets_there_leaves_a_bound_and_no_interval() -> None:
    found = PairedRatio({0: Ratio(0.9), 1: Ratio(1.2, reached=False)})
    assert (found.interval, found.decided) == (None, 0)
    assert str(found) == "> 1.04 (1 of 2)"


def test_ratios_have_as_many_digits_as_their_interval_needs() -> None:
    def of(*values: float) -> str:
        return str(PairedRatio(dict(enumerate(map(Ratio, values)))))

    assert of(0.62, 0.64, 0.66) == "0.64 (0.59\u20130.69)"
    assert of(0.987, 0.988, 0.989) == "0.988 (0.986\u20130.990)"
    assert of(1.0, 1.0) == "1"


def test_the_cost_of_a_value_is_linear_in_its_logarithm() -> None:
    costs, values = [10.0, 20.0, 30.0], [1.0, 0.25, 0.1]
    assert cost_to_reach(costs, values, 0.5) == pytest.approx(15)
    assert cost_to_reach(costs, values, 0.1) == pytest.approx(30)
    assert cost_to_reach(costs, values, 2.0) == 10
    assert cost_to_reach(costs, values, 0.05) is None
    assert cost_to_reach([], [], 1.0) is None
    assert cost_to_reach([10, 20], [1.0, -1.0], 0.0) == 20  # KID can be below 0
    assert cost_to_reach([10, 20, 30], [1.0, 0.2, 0.6], 0.5) < 20  # the first time counts, whatever follows


def test_costs_are_compared_at_the_same_value() -> None:
    base = ([10.0, 20.0, 30.0], [1.0, 0.25, 0.1])
    assert cost_ratio(base, base, 0.1) == Ratio(1.0)
    assert cost_ratio(([10.0, 15.0], [1.0, 0.1]), base, 0.1) == Ratio(0.5)
    assert cost_ratio(([10.0, 60.0], [1.0, 0.2]), base, 0.1) == Ratio(2.0, reached=False)
    assert cost_ratio(base, base, 0.01) is None
    assert cost_ratio(([], []), base, 0.1) is None


def test_spread_of_one_value_has_no_width() -> None:
    assert spread_of([2.0]).half_width is None
    assert spread_of([1.0, 3.0]).half_width == pytest.approx(stats.t.ppf(0.975, 1) * math.sqrt(2) / math.sqrt(2))
