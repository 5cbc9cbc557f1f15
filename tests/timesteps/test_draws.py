"""The counters behind every draw: as random as random numbers, and a function of (seed, step, row of the batch)."""

import pytest
import torch
from scipy import stats

from kairostep.counters import mix
from kairostep.timesteps.draws import Draws, random_bits

NUM_STEPS, NUM_ROWS = 2000, 64


def numbers(seed: int, *, stratified: bool) -> torch.Tensor:
    draws = Draws(seed, stratified=stratified)
    x0 = torch.zeros(NUM_ROWS, 1, dtype=torch.float64)
    return torch.stack([draws(x0) for _ in range(NUM_STEPS)])  # (steps, rows)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
@pytest.mark.parametrize("stratified", [False, True])
def test_each_row_is_uniform_over_steps(seed: int, stratified: bool) -> None:
    u = numbers(seed, stratified=stratified)
    p_values = [stats.kstest(u[:, row].numpy(), "uniform").pvalue for row in range(NUM_ROWS)]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("stratified", [False, True])
def test_rows_steps_and_seeds_do_not_correlate(stratified: bool) -> None:
    first, second = (numbers(seed, stratified=stratified) - 0.5 for seed in (0, 1))
    noise = 1 / 12 / (NUM_STEPS * NUM_ROWS) ** 0.5
    assert abs(float((first[1:] * first[:-1]).mean())) < 4 * noise
    assert abs(float((first * second).mean())) < 4 * noise
    neighbours = float((first[:, 1:] * first[:, :-1]).mean())
    expected = -1 / 12 / (NUM_ROWS - 1) if stratified else 0.0  # strata are drawn without replacement
    assert abs(neighbours - expected) < 4 * noise


def test_independent_draws_leave_strata_empty_and_stratified_ones_do_not() -> None:
    for stratified, share_of_filled in ((True, 1.0), (False, 1 - 1 / torch.e)):
        u = numbers(3, stratified=stratified)
        filled = [len((row * NUM_ROWS).long().unique()) / NUM_ROWS for row in u[:200]]
        assert abs(sum(filled) / 200 - share_of_filled) < 0.01


def test_no_bit_of_the_hash_is_stuck_or_follows_another() -> None:
    bits = random_bits(torch.tensor(0), torch.tensor(0), 2**16)
    table = torch.stack([(bits >> k) & 1 for k in range(64)]).double() - 0.5
    correlation = table @ table.T / (0.25 * 2**16)
    assert float((correlation - torch.eye(64, dtype=torch.float64)).abs().max()) < 5 / 2**8
    assert float(table.mean(1).abs().max()) < 2.5 / 2**8


def test_the_hash_keeps_different_integers_apart() -> None:
    values = torch.cat([torch.arange(-(2**15), 2**15), torch.arange(2**62, 2**62 + 2**15)])
    assert len(mix(values).unique()) == len(values)


def test_ranks_of_unequal_batches_draw_from_streams_of_their_own() -> None:
    key, step = torch.tensor(12345), torch.tensor(7)
    assert not set(random_bits(key, step, 64).tolist()) & set(random_bits(key, step, 40).tolist())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports what torch deprecates
@pytest.mark.filterwarnings("ignore:Skipping serialization of:UserWarning")  # torch 2.6's cache of compiled code
def test_the_hash_wraps_around_in_compiled_code_too() -> None:
    """Signed overflow is what the compiler makes of it."""
    values = torch.arange(-1000, 1000) * 0x1234567890ABC
    assert torch.equal(torch.compile(mix)(values), mix(values))


def test_numbers_never_reach_the_ends() -> None:
    for dtype in (torch.float32, torch.float64):
        for stratified in (False, True):
            u = Draws(0, stratified=stratified)(torch.zeros(200_000, 1, dtype=dtype))
            assert 0 < float(u.min()) <= float(u.max()) < 1
