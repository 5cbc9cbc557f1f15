"""W ranks, here threads, do what one rank does with the whole batch: every sampler, its draws, weights and state."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from samplers import LEARNING, SAMPLERS, batch, build, build_model, tilted_losses_of, train_step
from threads import run_ranks
from torch import Tensor, nn
from torch.testing import assert_close

import kairostep as ks
from kairostep import ranks
from kairostep.ranks import own_positions, own_rows, spread_rows
from kairostep.timesteps.least_noise import gradient_size

NUM_ROWS, NUM_STEPS, SEED = 64, 50, 7
COSTLY = tuple(name for name in LEARNING if name.startswith(("adaptive", "gradient_variance")))
BUILDING = threading.Lock()  # networks are made with torch's global generator, which threads share

Make = Callable[[nn.Module], ks.TimestepSampler]


def gentle(model: nn.Module) -> ks.TimestepSampler:
    """Return "adaptive_pair_unbiased" with the usual rate: at 0.3 it runs to its bounds, where rounding shows."""
    return ks.Adaptive(
        ks.ConstantBeta(), probing=ks.Probing(every=2, credit="batch"), floor=0.1, unbiased=True, seed=SEED
    )


def by_name(name: str) -> Make:
    return gentle if name == "adaptive_pair_unbiased" else lambda model: build(name, model, SEED)


@dataclass
class Trained:
    """What a rank drew and knows after training."""

    t: Tensor  # (steps, B)
    weight: Tensor  # (steps, B)
    state: dict[str, Tensor]
    density: Tensor
    asked: list[int]  # rows of each call of `loss_at` from a probe


def train(make: Make, rank: int = 0, world_size: int = 1, num_steps: int = NUM_STEPS) -> Trained:
    """Train on this rank's rows in float64 by losses that are functions of row and t."""
    with BUILDING:
        model = build_model().double()
        sampler = make(model)
    drawn, asked, num_local = [], [], NUM_ROWS // world_size

    def counted_losses_of(model: nn.Module, x0: Tensor) -> ks.LossAt:
        def loss_at(rows: Tensor, t: Tensor) -> Tensor:
            asked.append(len(rows))
            return tilted_losses_of(model, x0)(rows, t)

        return loss_at

    for step in range(num_steps):
        x0 = batch(step, NUM_ROWS).double()[rank * num_local : (rank + 1) * num_local]
        drawn.append(train_step(sampler, model, x0, counted_losses_of))
        asked.remove(num_local)  # that of training
    state = {key: value.clone() for key, value in sampler.state_dict().items()}
    t, weight = (torch.stack([getattr(own, key) for own in drawn]) for key in ("t", "weight"))
    return Trained(t, weight, state, sampler.density(), asked)


def assert_same_as_one_rank(monkeypatch: pytest.MonkeyPatch, make: Make, world_size: int) -> list[Trained]:
    """Train on one rank and on several, compare, and return what the several did."""
    one = train(make)
    several, _ = run_ranks(monkeypatch, world_size, lambda rank: train(make, rank, world_size))
    assert_close(torch.cat([own.t for own in several], dim=1), one.t, rtol=0, atol=1e-6)
    assert_close(torch.cat([own.weight for own in several], dim=1), one.weight, rtol=2e-6, atol=1e-6)
    for key, value in one.state.items():
        assert all(torch.equal(own.state[key], several[0].state[key]) for own in several), key
        assert_close(several[0].state[key], value, rtol=2e-6, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
    assert_close(several[0].density, one.density, rtol=1e-5, atol=1e-6)
    return several


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in LEARNING])
def test_ranks_draw_bitwise_what_one_draws(monkeypatch: pytest.MonkeyPatch, name: str, world_size: int) -> None:
    def draw(rank: int, world_size: int = world_size) -> tuple[Tensor, Tensor]:
        with BUILDING:
            sampler = build(name, build_model(), SEED)
        x0 = torch.zeros(NUM_ROWS // world_size, 4)
        drawn = [sampler.sample(x0) for _ in range(NUM_STEPS)]
        return torch.stack([own.t for own in drawn]), torch.stack([own.weight for own in drawn])

    several, calls = run_ranks(monkeypatch, world_size, draw)
    for parts, whole in zip(zip(*several, strict=True), draw(0, 1), strict=True):
        assert torch.equal(torch.cat(parts, dim=1), whole)
    assert not calls


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", LEARNING)
def test_ranks_learn_what_one_learns(monkeypatch: pytest.MonkeyPatch, name: str, world_size: int) -> None:
    assert_same_as_one_rank(monkeypatch, by_name(name), world_size)


@pytest.mark.parametrize("name", [name for name in LEARNING if name not in COSTLY])
def test_eight_ranks_learn_what_one_learns(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert_same_as_one_rank(monkeypatch, by_name(name), 8)


def test_ranks_without_a_probed_row_are_not_asked_for_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: nn.Module) -> ks.TimestepSampler:
        probing = ks.Probing(every=5, reward_rows=3, sweep=16, queue_size=4)
        return ks.Adaptive(ks.BetaPolicy.for_input((4,), 16), probing=probing, seed=SEED)

    several = assert_same_as_one_rank(monkeypatch, make, 8)
    paid = [len(own_positions_of(rank, 8, 3)) for rank in range(8)]
    assert paid == [1, 0, 1, 0, 0, 1, 0, 0]
    assert all(num > 0 for own in several for num in own.asked)
    num_asked = [sum(own.asked) for own in several]
    swept = [num - 10 * 2 * 3 * own for num, own in zip(num_asked, paid, strict=True)]  # ten probes, before and after
    assert sum(swept) == 10 * 2 * 16
    assert all(num % (2 * 16) == 0 for num in swept)  # one rank sweeps all timesteps
    assert sum(num > 0 for num in swept) > 2  # another one each time


def own_positions_of(rank: int, world_size: int, num: int) -> list[int]:
    return [i for i in range(num) if i * world_size // num == rank]


@pytest.mark.parametrize("rows_per_probe", [1, 12, 24, 100])
def test_rows_of_a_probe_may_lie_on_several_ranks(monkeypatch: pytest.MonkeyPatch, rows_per_probe: int) -> None:
    def make(model: nn.Module) -> ks.TimestepSampler:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return ks.LeastNoise(optimizer, rows_per_probe=rows_per_probe, warmup=1, refresh=2, gate=0.999, seed=SEED)

    several = assert_same_as_one_rank(monkeypatch, make, 4)
    assert sum(sum(own.asked) for own in several) == int(several[0].state["num_probes"]) == 20 * min(rows_per_probe, 64)


@pytest.mark.parametrize(("num_bins", "history"), [(20, 1), (10, 3), (4, 5)])
def test_rings_smaller_than_a_batch_hold_on_ranks_what_they_hold_on_one(
    monkeypatch: pytest.MonkeyPatch, num_bins: int, history: int
) -> None:
    assert_same_as_one_rank(monkeypatch, lambda model: ks.LossSecondMoment(num_bins, history, seed=SEED), 2)


def test_skipped_losses_of_all_ranks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> int:
        sampler = ks.LossSecondMoment(2, 1)
        drawn = sampler.sample(torch.zeros(8, 1))
        losses = torch.full((8,), torch.nan) if rank else torch.ones(8)
        with sampler.observe(torch.zeros(8, 1), drawn, losses):
            pass
        return int(sampler.num_skipped)

    assert run_ranks(monkeypatch, 2, work)[0] == [8, 8]


def test_a_rank_without_paid_rows_sends_the_dtype_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        slopes = ks.Adaptive(ks.ConstantBeta()).slopes(
            torch.zeros(0, 1), torch.zeros(0), torch.zeros(0), torch.zeros(0)
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert slopes.dtype == torch.float32


def test_gradients_over_rows_of_two_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: nn.Module, rows_per_gradient: int = 12) -> ks.TimestepSampler:
        return ks.GradientVariance(model.parameters(), num_bins=4, every=2, rows_per_gradient=rows_per_gradient)

    with pytest.raises(ValueError, match=r"of 4 ranks, here 16, got 12: pass rows_per_gradient=4, or go on with fewer"):
        run_ranks(monkeypatch, 4, lambda rank: train(make, rank, 4, num_steps=1))
    with pytest.raises(ValueError, match=r"of each of 64 ranks, here 1, got 12: pass another batch size"):
        run_ranks(monkeypatch, 64, lambda rank: train(make, rank, 64, num_steps=1))
    assert_same_as_one_rank(monkeypatch, lambda model: make(model, 4), 4)


def sizes_of_messages(
    rank: int, make: Make, losses_of: Callable[[nn.Module, Tensor], ks.LossAt], num_steps: int
) -> tuple[list[list[int]], list[bool]]:
    """Return what observing sent at each step, in numbers, as rank 0 knows it, and which steps had a probe.

    Sampling must send nothing.
    """
    group: Any = ranks.dist
    with BUILDING:
        model = build_model()
        sampler = make(model)
    sent, probed, none = [], [], torch.tensor(0)
    for step in range(num_steps):
        x0 = batch(step, NUM_ROWS)[rank * 32 : rank * 32 + 32]
        loss_at, num_before = losses_of(model, x0), len(group.sizes)
        drawn = sampler.sample(x0)
        assert rank or len(group.sizes) == num_before  # listed by rank 0, which may be ahead of others
        asked_before = int(sampler.diagnostics().get("probe_evaluations", none))
        with sampler.observe(x0, drawn, loss_at(torch.arange(32), drawn.t).detach(), loss_at):
            pass
        sent.append(group.sizes[num_before:] if rank == 0 else [])
        probed.append(int(sampler.diagnostics().get("probe_evaluations", none)) > asked_before)
    return sent, probed


@pytest.mark.parametrize("name", LEARNING)
def test_sampling_sends_nothing_and_observing_one_small_message(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Long are only messages of a probe: of `Adaptive`, with three gradients of its policy, and of `LeastNoise` here.

    `LossSecondMoment` begins with a message that has room for all its bins.
    """
    num_steps = 64 if name == "least_noise" else 20  # its first sweep begins at step 60
    work = partial(sizes_of_messages, make=by_name(name), losses_of=tilted_losses_of, num_steps=num_steps)
    (sent, probed), _ = run_ranks(monkeypatch, 2, work)[0]
    assert any(probed) == name.startswith(("adaptive", "gradient_variance", "least_noise"))
    for step, sizes in enumerate(sent):
        assert len(sizes) <= 1
        if not (probed[step] and name.startswith(("adaptive", "least_noise"))):
            assert sum(sizes) <= (8192 if step == 0 and name == "loss_second_moment" else 1024)


def test_a_probe_whose_rows_lie_on_one_rank_sends_nothing_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the built-in trainer, where ranks have equal batches and `loss_at` measures gradients."""

    def make(model: nn.Module) -> ks.TimestepSampler:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return ks.LeastNoise(optimizer, rows_per_probe=16, warmup=1, refresh=2, gate=0.999, seed=SEED)

    def measured_losses_of(model: nn.Module, x0: Tensor) -> ks.LossAt:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss_at: Any = tilted_losses_of(model, x0)
        loss_at.gradient_size = partial(gradient_size, tilted_losses_of(model, x0), optimizer)
        return loss_at  # type: ignore[no-any-return]

    work = partial(sizes_of_messages, make=make, losses_of=measured_losses_of, num_steps=50)
    (sent, probed), _ = run_ranks(monkeypatch, 2, work)[0]
    assert sum(probed) == 20
    assert sent == [[45 if own else 42] for own in probed]  # sums and numbers of 20 bins and what was skipped; and 3


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("num", [1, 3, 64, 256])
def test_positions_are_spread_over_the_rows_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, num: int, world_size: int
) -> None:
    def spread(rank: int, num_local: int = 24) -> tuple[list[int], list[int]]:
        rows = spread_rows(num, num_local, torch.device("cpu"))
        assert own_rows(torch.arange(24 * world_size), 24).tolist() == list(range(24 * rank, 24 * rank + 24))
        return list(own_positions(num)), (rows + rank * num_local).tolist()

    several, _ = run_ranks(monkeypatch, world_size, spread)
    assert [i for positions, _ in several for i in positions] == list(range(num))
    assert [row for _, rows in several for row in rows] == [i * 24 * world_size // num for i in range(num)]


@pytest.mark.parametrize("saved_after", [None, 3])
def test_second_moments_keep_what_a_rank_sends_over_a_resume(
    monkeypatch: pytest.MonkeyPatch, saved_after: int | None
) -> None:
    """A run may resume just before the small last batch of an epoch."""
    sizes = [32, 32, 32, 1, 32, 32, 32, 1]

    def work(rank: int) -> dict[str, Tensor]:
        sampler = ks.LossSecondMoment(num_bins=10, history=40)
        for step, num in enumerate(sizes):
            if step == saved_after:
                state, sampler = sampler.state_dict(), ks.LossSecondMoment(num_bins=10, history=40)
                sampler.load_state_dict(state)
            x0 = torch.zeros(num, 1)
            drawn = sampler.sample(x0)
            with sampler.observe(x0, drawn, 1 + drawn.t):
                pass
        return sampler.state_dict()

    (first, second), _ = run_ranks(monkeypatch, 2, work)
    assert_close(first, second, rtol=0, atol=0)
    assert int(first["num_seen"].sum()) == 2 * sum(sizes)
    assert int(first["num_shown"]) == 64


def test_second_moments_say_that_a_larger_batch_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> int:
        sampler = ks.LossSecondMoment(num_bins=10, history=40)
        for num in (2, 32, 32):
            x0 = torch.zeros(num, 1)
            drawn = sampler.sample(x0)
            with sampler.observe(x0, drawn, 1 + drawn.t):
                pass
        return int(sampler.num_seen.sum())

    with pytest.warns(UserWarning, match="has room for 2 losses of each process in a step.*got 32"):
        found, _ = run_ranks(monkeypatch, 2, work)
    assert found == [12, 12]
