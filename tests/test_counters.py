"""Seeds from counters: every counter counts, and neighbours have nothing in common; random numbers of rows likewise."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from kairostep.counters import RowRandom, key_tensor, mix_seed

NUM_ROWS, NUM_COLUMNS = 1000, 2000
MAX_SIGMAS = 5.0  # of a test statistic: one fair statistic in two million is beyond


def test_seeds_of_different_counters_differ() -> None:
    seeds = [mix_seed(*counters) for counters in itertools.product(range(20), repeat=3)]
    assert len(set(seeds)) == len(seeds)


def test_the_low_32_bits_that_a_cpu_generator_keeps_differ_too() -> None:
    seeds = {mix_seed(0, 1, 0, step) & 0xFFFFFFFF for step in range(2000)}
    assert len(seeds) == 2000


def test_order_and_number_of_counters_matter() -> None:
    assert len({mix_seed(1, 2), mix_seed(2, 1), mix_seed(1, 2, 0), mix_seed(0, 1, 2)}) == 4


def test_one_more_step_flips_half_of_the_bits() -> None:
    flipped = [(mix_seed(7, step) ^ mix_seed(7, step + 1)).bit_count() for step in range(500)]
    assert abs(sum(flipped) / len(flipped) - 32) < 1
    assert min(flipped) > 12


def test_seeds_fit_into_64_bits_whatever_the_counters() -> None:
    assert all(0 <= mix_seed(counter, counter) < 2**64 for counter in (0, 2**63, 2**64, 2**70))


def test_a_key_is_the_seed_of_its_counters_in_64_bits() -> None:
    for counters in itertools.product((0, 1, 2**40), repeat=2):
        assert int(key_tensor(*counters)) % 2**64 == mix_seed(*counters)


@pytest.fixture(scope="module")
def normal() -> Tensor:
    """Return two million normal numbers, (1000, 2000)."""
    return random().normal((NUM_COLUMNS,)).double()


def random(*counters: int, first_row: int = 0, num_rows: int = NUM_ROWS) -> RowRandom:
    return RowRandom(key_tensor(*(counters or (5, 1))), first_row + torch.arange(num_rows))


def sigmas(values: Tensor, mean: float, variance: float) -> float:
    """Return how many standard errors the mean of independent values lies from what it should be."""
    return abs(float(values.double().mean()) - mean) / math.sqrt(variance / values.numel())


def correlation_in_sigmas(one: Tensor, other: Tensor) -> float:
    """Return the mean product of two sets of standard normal numbers, which has variance 1/n, in standard errors."""
    return sigmas(one * other, 0, 1)


@pytest.mark.parametrize(
    ("power", "moment", "moment_of_square"), [(1, 0, 1), (2, 1, 3), (3, 0, 15), (4, 3, 105), (6, 15, 10395)]
)
def test_moments_are_those_of_the_normal_distribution(
    normal: Tensor, power: int, moment: int, moment_of_square: int
) -> None:
    assert sigmas(normal**power, moment, moment_of_square - moment**2) < MAX_SIGMAS
    by_row, by_column = (normal**power).mean(1), (normal**power).mean(0)
    spread = math.sqrt(moment_of_square - moment**2)
    if power < 4:  # means of higher powers are skewed
        assert float((by_row - moment).abs().max()) < 5.5 * spread / math.sqrt(NUM_COLUMNS)
        assert float((by_column - moment).abs().max()) < 5.5 * spread / math.sqrt(NUM_ROWS)


@pytest.mark.parametrize("num_sigmas", [1, 2, 3, 4, 5])
def test_tails_hold_what_they_should(num_sigmas: int) -> None:
    """Of twenty million numbers 11.5 are beyond 5 sigmas."""
    num = beyond = above = 0
    for step in range(10):
        values = random(9, step).normal((NUM_COLUMNS,))
        num += values.numel()
        beyond += int((values.abs() > num_sigmas).sum())
        above += int((values > num_sigmas).sum())
    share = math.erfc(num_sigmas / math.sqrt(2))
    assert abs(beyond - num * share) < 4.5 * math.sqrt(num * share)
    assert abs(above - num * share / 2) < 4.5 * math.sqrt(num * share / 2)


def test_the_distribution_is_normal_between_the_tails(normal: Tensor) -> None:
    """Chi-square over 200 parts of equal probability: mean 199, variance 398."""
    part = (torch.special.ndtr(normal) * 200).long().clamp(max=199).flatten()
    num = part.bincount(minlength=200).double()
    chi_square = float(((num - num.mean()).square() / num.mean()).sum())
    assert abs(chi_square - 199) < MAX_SIGMAS * math.sqrt(2 * 199)


@pytest.mark.parametrize("shift", [1, 2, 3, 7, 64, 128, 500])
def test_rows_and_their_columns_are_independent(normal: Tensor, shift: int) -> None:
    for values in (normal, normal.square().sub(1).div(math.sqrt(2)), normal.sign()):
        assert correlation_in_sigmas(values[shift:], values[:-shift]) < MAX_SIGMAS
        assert correlation_in_sigmas(values[:, shift:], values[:, :-shift]) < MAX_SIGMAS
        assert correlation_in_sigmas(values[shift:, shift:], values[:-shift, :-shift]) < MAX_SIGMAS
    halves = normal[:, : NUM_COLUMNS // 2], normal[:, NUM_COLUMNS // 2 :]  # cosines and sines of the same angles
    assert correlation_in_sigmas(*halves) < MAX_SIGMAS
    assert correlation_in_sigmas(*(half.square().sub(1).div(math.sqrt(2)) for half in halves)) < MAX_SIGMAS


def test_no_two_rows_are_alike(normal: Tensor) -> None:
    """The largest of 499,500 correlations of rows; beyond 6 standard errors is one in a thousand such tests."""
    correlation = normal @ normal.T / NUM_COLUMNS
    correlation.fill_diagonal_(0)
    assert float(correlation.abs().max()) < 6 / math.sqrt(NUM_COLUMNS)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("the next step", lambda: random(5, 2).normal((NUM_COLUMNS,))),
        ("the next seed", lambda: random(6, 1).normal((NUM_COLUMNS,))),
        ("both swapped", lambda: random(1, 5).normal((NUM_COLUMNS,))),
        ("the next call", lambda: [(r := random()).normal((NUM_COLUMNS,)), r.normal((NUM_COLUMNS,))][1]),
        ("the next call, after uniform ones", lambda: [(r := random()).uniform(), r.normal((NUM_COLUMNS,))][1]),
    ],
)
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_steps_seeds_and_calls_are_independent(normal: Tensor, name: str, other: object, shift: int) -> None:
    values = other().double()  # type: ignore[operator]
    for one, two in ((normal, values), (normal.square() - 1, values.square() - 1)):
        scale = float(one.std() * two.std())
        for shifted in (one[: NUM_ROWS - shift] * two[shift:], one[:, : NUM_COLUMNS - shift] * two[:, shift:]):
            assert sigmas(shifted / scale, 0, 1) < MAX_SIGMAS, name


def chi_square_of_pairs(one: Tensor, other: Tensor, num_parts: int = 16) -> float:
    """Return how far pairs of uniform numbers lie from even over a grid, in standard deviations of chi-square."""
    pair = (one * num_parts).long() * num_parts + (other * num_parts).long()
    num = pair.flatten().bincount(minlength=num_parts**2).double()
    expected = num.sum() / num_parts**2
    degrees = num_parts**2 - 1
    return abs(float(((num - expected).square() / expected).sum()) - degrees) / math.sqrt(2 * degrees)


def test_uniform_numbers_are_even_alone_and_in_pairs() -> None:
    steps = torch.stack([random(3, step).uniform() for step in range(400)])  # (400, 1000)
    assert float(steps.min()) >= 0
    assert float(steps.max()) < 1
    assert sigmas(steps, 0.5, 1 / 12) < MAX_SIGMAS
    assert sigmas(steps.double().square(), 1 / 3, 4 / 45) < MAX_SIGMAS
    for shift in (1, 2, 8, 100):
        assert chi_square_of_pairs(steps[:, shift:], steps[:, :-shift]) < MAX_SIGMAS  # rows
        assert chi_square_of_pairs(steps[shift:], steps[:-shift]) < MAX_SIGMAS  # steps
    calls = random()
    several = torch.stack([calls.uniform() for _ in range(400)])
    assert chi_square_of_pairs(several[1:], several[:-1]) < MAX_SIGMAS
    low_bits = several * 2**12 % 1
    assert chi_square_of_pairs(low_bits[1:], low_bits[:-1]) < MAX_SIGMAS


@pytest.mark.parametrize("world_size", [2, 4, 5, 1000])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3, 4)])
def test_a_row_has_its_numbers_whoever_makes_it(world_size: int, shape: tuple[int, ...]) -> None:
    num_local = NUM_ROWS // world_size
    whole = random()
    expected = [whole.uniform(), whole.normal(shape), whole.normal(shape)]
    assert expected[1].shape == (NUM_ROWS, *shape)
    parts = [random(first_row=rank * num_local, num_rows=num_local) for rank in range(world_size)]
    for values in expected:
        made = [part.uniform() if values is expected[0] else part.normal(shape) for part in parts]
        assert torch.equal(torch.cat(made), values)


def test_rows_far_out_and_none_at_all_are_no_trouble() -> None:
    assert random(num_rows=0).normal((3,)).shape == (0, 3)
    assert random(num_rows=0).uniform().shape == (0,)
    far = random(first_row=2**40).normal((NUM_COLUMNS,)).double()
    assert sigmas(far, 0, 1) < MAX_SIGMAS
    assert sigmas(far.square(), 1, 2) < MAX_SIGMAS
