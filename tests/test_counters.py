"""Seeds from counters: every counter counts, and neighbours have nothing in common."""

import itertools

from kairostep.counters import mix_seed


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
