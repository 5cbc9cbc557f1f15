"""Curriculum: one sampler first, another one then, and a growing share of the latter in between."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import kairostep as ks
from kairostep.timesteps.noise import SAVINGS


def early(seed: int = 0) -> ks.Tabulated:
    return ks.Tabulated(torch.tensor([1.0, 0.0]), seed=seed)


def late(seed: int = 0) -> ks.Tabulated:
    return ks.Tabulated(torch.tensor([0.0, 1.0]), seed=seed)


class Recorded(ks.TimestepSampler):
    """Another sampler, with a record of what it drew and was shown."""

    def __init__(self, sampler: ks.TimestepSampler, weight: float) -> None:
        super().__init__()
        self.sampler, self.weight = sampler, weight
        self.drawn: list[ks.Timesteps] = []
        self.events: list[str] = []
        self.shown: list[tuple[Tensor, ks.Timesteps, Tensor, ks.LossAt | None]] = []

    def sample(self, x0: Tensor) -> ks.Timesteps:
        """Return draws with weights that tell rows and samplers apart."""
        t = self.sampler.sample(x0).t
        self.drawn.append(ks.Timesteps(t, self.weight + t))
        return self.drawn[-1]

    @contextmanager
    def observe(  # type: ignore[override]
        self, x0: Tensor, drawn: ks.Timesteps, losses: Tensor, loss_at: ks.LossAt | None = None
    ) -> Iterator[None]:
        """Record what is shown, and when the step is."""
        self.shown.append((x0, drawn, losses, loss_at))
        self.events.append("before")
        yield
        self.events.append("after")

    def density(self, num_bins: int = 100) -> Tensor:
        """Return where the draws go."""
        return self.sampler.density(num_bins)


def share_of_late(sampler: ks.TimestepSampler, num_steps: int, num_rows: int = 1000) -> list[float]:
    return [float((sampler.sample(torch.zeros(num_rows, 1)).t >= 0.5).float().mean()) for _ in range(num_steps)]


def show(sampler: ks.TimestepSampler, drawn: ks.Timesteps, losses: Tensor) -> None:
    with sampler.observe(torch.zeros(len(losses), 1), drawn, losses):
        pass


def test_the_share_of_the_second_sampler_rises_linearly_from_start_to_end() -> None:
    shares = share_of_late(ks.Curriculum(early(), late(), start=5, end=15), 20)
    assert shares[:5] == [0.0] * 5
    assert shares[15:] == [1.0] * 5
    for step in range(5, 15):
        expected = (step - 5) / 10
        assert abs(shares[step] - expected) <= 5 * (expected * (1 - expected) / 1000) ** 0.5 + 1e-3


@pytest.mark.parametrize("step", [0, 1, 4])
def test_start_at_end_is_a_switch(step: int) -> None:
    shares = share_of_late(ks.Curriculum(early(), late(), start=step, end=step), 8)
    assert shares == [0.0] * step + [1.0] * (8 - step)


def test_density_is_the_mixture_at_the_next_step() -> None:
    first, then = ks.LogitNormal(), ks.FixedBeta(0.7, 2.0)
    sampler = ks.Curriculum(first, then, start=3, end=13)
    for step in range(20):
        share = min(max((step - 3) / 10, 0.0), 1.0)
        for num_bins in (10, 100):
            expected = (1 - share) * first.density(num_bins) + share * then.density(num_bins)
            assert_close(sampler.density(num_bins), expected, rtol=1e-5, atol=1e-7)
        sampler.sample(torch.zeros(8, 1))


def test_asking_and_observing_do_not_count_as_steps() -> None:
    sampler = ks.Curriculum(early(), late(), start=2, end=4)
    drawn = sampler.sample(torch.zeros(8, 1))
    for _ in range(10):
        sampler.density()
        sampler.diagnostics()
        show(sampler, drawn, torch.ones(8))
    assert share_of_late(sampler, 1) == [0.0]


def test_what_draws_save_is_told_of_the_sampler_that_draws_alone() -> None:
    """Before and between, another density draws than the one that the losses are read for."""
    root_loss = ks.RootLoss(warmup=2, refresh=2)
    sampler = ks.Curriculum(ks.LogitNormal(), root_loss, start=10, end=20)
    seen = []
    for _ in range(25):
        drawn = sampler.sample(torch.zeros(32, 1))
        show(sampler, drawn, 10.0 ** (-4 * drawn.t))
        seen.append({name: float(value) for name, value in sampler.diagnostics().items()})
    assert all(math.isnan(seen[step][key]) for step in range(19) for key in SAVINGS)
    assert seen[-1] == {name: float(value) for name, value in root_loss.diagnostics().items()} | {"share_of_then": 1.0}
    assert seen[-1]["noise_ratio"] < 0.8
    back = ks.Curriculum(root_loss, ks.LogitNormal(), start=1, end=2)
    assert float(back.diagnostics()["noise_ratio"]) == seen[-1]["noise_ratio"]


def test_every_row_has_the_time_and_weight_of_one_of_the_two() -> None:
    first, then = Recorded(ks.Uniform(seed=1), 10.0), Recorded(ks.Uniform(seed=2), 20.0)
    sampler = ks.Curriculum(first, then, start=2, end=12)
    picked = []
    for _ in range(15):
        drawn = sampler.sample(torch.zeros(32, 1))
        of_then = drawn.weight >= 20
        if bool(of_then.any()):
            assert torch.equal(drawn.t[of_then], then.drawn[-1].t[of_then])
            assert torch.equal(drawn.weight[of_then], then.drawn[-1].weight[of_then])
        if not bool(of_then.all()):
            assert torch.equal(drawn.t[~of_then], first.drawn[-1].t[~of_then])
            assert torch.equal(drawn.weight[~of_then], first.drawn[-1].weight[~of_then])
        picked.append(of_then)
    between = torch.stack(picked[4:11]).float().mean(0)  # (32,)
    assert float(between.min()) < 0.5 < float(between.max())
    assert not torch.equal(picked[6], picked[7])


@pytest.mark.parametrize("seeds", [(0, 0, 0), (3, 3, 3), (0, 1, 2)])
def test_who_draws_a_row_does_not_depend_on_where_it_is_drawn(seeds: tuple[int, int, int]) -> None:
    first, then = ks.LogitNormal(seed=seeds[0]), ks.FixedBeta(0.7, 2.0, seed=seeds[1])
    times, expected = torch.zeros(0), torch.zeros(20)
    sampler = ks.Curriculum(first, then, start=0, end=200, seed=seeds[2])
    for _ in range(200):
        expected += sampler.density(20) / 200
        times = torch.cat([times, sampler.sample(torch.zeros(128, 1)).t])
    drawn = torch.histc(times, 20, 0, 1) / len(times)
    assert bool(((drawn - expected).abs() <= 5 * (expected / len(times)).sqrt()).all()), (drawn, expected)


def test_unbiased_samplers_stay_unbiased() -> None:
    sampler = ks.Curriculum(ks.LogitNormal(unbiased=True), ks.FixedBeta(2.0, 1.0, unbiased=True), start=0, end=400)
    drawn = [sampler.sample(torch.zeros(128, 1, dtype=torch.float64)) for _ in range(400)]
    t, weight = torch.stack([d.t for d in drawn]), torch.stack([d.weight for d in drawn])
    for function, integral in ((torch.ones_like, 1.0), (torch.square, 1 / 3)):
        estimate = (weight * function(t)).mean(1)
        error = estimate.std() / len(estimate) ** 0.5
        assert abs(float(estimate.mean()) - integral) < 4 * float(error) + 1e-9


@pytest.mark.parametrize("step", [0, 5, 20])
def test_observations_reach_both_around_the_step(step: int) -> None:
    first, then = Recorded(ks.Uniform(), 1.0), Recorded(ks.Uniform(), 2.0)
    sampler = ks.Curriculum(first, then, start=2, end=10)
    x0, losses = torch.zeros(8, 1), torch.rand(8)
    for _ in range(step + 1):
        drawn = sampler.sample(x0)

    def loss_at(rows: Tensor, t: Tensor) -> Tensor:
        return losses[rows]

    with sampler.observe(x0, drawn, losses, loss_at):
        assert first.events == then.events == ["before"]
    assert first.events == then.events == ["before", "after"]
    for child in (first, then):
        ((shown_x0, shown, shown_losses, shown_loss_at),) = child.shown
        assert torch.equal(shown_x0, x0)
        assert torch.equal(shown.t, drawn.t)
        assert torch.equal(shown_losses, losses)
        assert_close(shown_loss_at(torch.arange(8), drawn.t), losses)


def test_the_second_sampler_has_learned_when_its_turn_comes() -> None:
    then, alone = ks.RootLoss(warmup=1, refresh=1), ks.RootLoss(warmup=1, refresh=1)
    sampler = ks.Curriculum(ks.LogitNormal(), then, start=10, end=20)
    for _ in range(12):
        drawn = sampler.sample(torch.zeros(64, 1))
        losses = 0.01 + (1 - drawn.t) ** 4
        show(sampler, drawn, losses)
        show(alone, drawn, losses)
    assert_close(then.mass(), alone.mass())
    assert float((then.mass() - 0.05).abs().max()) > 0.01


def test_losses_of_the_wrong_shape_are_refused() -> None:
    sampler = ks.Curriculum(ks.RootLoss(), ks.RootLoss(), start=0, end=1)
    drawn = sampler.sample(torch.zeros(8, 1))
    with pytest.raises(ValueError, match="one value per sample"):
        show(sampler, drawn, torch.zeros(8, 2))


@pytest.mark.parametrize("saved_after", [3, 9, 17])
def test_saved_and_loaded_goes_on_bitwise(saved_after: int) -> None:
    def build(seed: int) -> ks.Curriculum:
        first, then = ks.LogitNormal(seed=seed), ks.RootLoss(warmup=1, refresh=1, seed=seed)
        return ks.Curriculum(first, then, start=5, end=15, seed=seed)

    def step(sampler: ks.Curriculum) -> ks.Timesteps:
        drawn = sampler.sample(torch.zeros(32, 1))
        show(sampler, drawn, 0.01 + drawn.t)
        return drawn

    sampler, resumed = build(0), build(9)
    for _ in range(saved_after):
        step(sampler)
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(12):
        assert torch.equal(sampler.density(), resumed.density())
        first, second = step(sampler), step(resumed)
        assert torch.equal(first.t, second.t)
        assert torch.equal(first.weight, second.weight)
    state, other = sampler.state_dict(), resumed.state_dict()
    assert all(torch.equal(state[key], other[key]) for key in state)


def test_the_seed_decides_who_draws_and_leaves_torch_alone() -> None:
    def drawn(seed: int) -> Tensor:
        sampler = ks.Curriculum(early(), late(), start=0, end=10, seed=seed)
        return torch.stack([sampler.sample(torch.zeros(64, 1)).t for _ in range(9)])

    before = torch.get_rng_state()
    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0) >= 0.5, drawn(1) >= 0.5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_draws_follow_the_precision_of_the_batch(dtype: torch.dtype) -> None:
    drawn = ks.Curriculum(early(), late(), start=0, end=2).sample(torch.zeros(8, 3, dtype=dtype))
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert drawn.t.dtype == drawn.weight.dtype == expected
    assert drawn.t.shape == drawn.weight.shape == (8,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 10, "end": 5}, r"start .*10.*5|start .*5.*10|end .*5.*10|end .*10.*5"),
        ({"start": -1, "end": 5}, r"start must .*got -1"),
        ({"start": 0, "end": 2.5}, r"end must .*got 2\.5"),
        ({"start": 0, "end": 1, "seed": -1}, r"seed must .*got -1"),
    ],
)
def test_wrong_steps_are_refused_with_rule_and_value(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ks.Curriculum(ks.Uniform(), ks.LogitNormal(), **options)


@pytest.mark.parametrize(
    "wrong", [lambda: ks.Adaptive(ks.ConstantBeta()), lambda: "uniform"], ids=["adaptive", "a name"]
)
@pytest.mark.parametrize("place", ["first", "then"])
def test_an_adaptive_sampler_or_none_at_all_is_refused(wrong: object, place: str) -> None:
    samplers = {"first": ks.Uniform(), "then": ks.Uniform(), place: wrong()}  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"(?i)adaptive|sampler"):
        ks.Curriculum(**samplers, start=0, end=10)


def test_a_part_of_another_kind_is_refused_before_anything_is_loaded() -> None:
    saved = ks.Curriculum(ks.LogitNormal(), ks.Uniform(), start=1, end=2)
    other = ks.Curriculum(ks.LogitNormal(seed=5), ks.Mode(), start=1, end=2, seed=5)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(ValueError, match="got that of Uniform for Mode"):
        other.load_state_dict(saved.state_dict())
    assert all(torch.equal(before[key], value) for key, value in other.state_dict().items())


@pytest.mark.parametrize("nested", ["first", "then"])
def test_curricula_may_be_nested(nested: str) -> None:
    thirds = [ks.Tabulated(torch.eye(3)[third]) for third in range(3)]
    ramp = {"start": 0, "end": 100}
    if nested == "first":
        sampler = ks.Curriculum(ks.Curriculum(thirds[0], thirds[1], **ramp), thirds[2], **ramp)
    else:
        sampler = ks.Curriculum(thirds[0], ks.Curriculum(thirds[1], thirds[2], **ramp), **ramp)
    x0 = torch.zeros(3000, 1)
    for _ in range(60):
        sampler.sample(x0)
    expected = sampler.density(3)
    drawn = torch.bincount(sampler.sample(x0).index(3), minlength=3) / len(x0)
    assert_close(drawn, expected, rtol=0, atol=0.04)
