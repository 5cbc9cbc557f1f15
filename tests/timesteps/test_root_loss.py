"""Root-loss importance sampling against its recurrence written out in plain numbers (FORMULAS, section 13)."""

import io
import math
from collections.abc import Callable

import pytest
import torch
from root_loss_reference import Reference
from torch import Tensor
from torch.testing import assert_close

import kairostep as ks

NAN, INF = float("nan"), float("inf")


def show(sampler: ks.TimestepSampler, t: Tensor, losses: Tensor) -> None:
    drawn = ks.Timesteps(t, torch.ones_like(t))
    with sampler.observe(torch.zeros(len(t), 1), drawn, losses):
        pass


def centres(num_bins: int) -> Tensor:
    return (torch.arange(num_bins) + 0.5) / num_bins


def eager(num_bins: int = 20, **options: object) -> ks.RootLoss:
    """Return a sampler that follows every observation at once."""
    return ks.RootLoss(num_bins, warmup=1, refresh=1, **options)  # type: ignore[arg-type]


def taught(loss: Callable[[Tensor], Tensor], num_steps: int = 60, **options: object) -> ks.RootLoss:
    """Return a sampler shown this loss of t at its own draws."""
    sampler = ks.RootLoss(**options)  # type: ignore[arg-type]
    for _ in range(num_steps):
        t = sampler.sample(torch.zeros(128, 1)).t
        show(sampler, t, loss(t))
    return sampler


def skewed(t: Tensor) -> Tensor:
    return 0.01 + (1 - t) ** 4


@pytest.mark.parametrize("bad", [None, NAN, INF, -INF])
@pytest.mark.parametrize(
    ("options", "num_rows"),
    [
        ({}, 64),
        ({"num_bins": 7, "decay": 0.9, "floor": 0.3, "warmup": 5, "refresh": 3}, 5),
        ({"num_bins": 50, "decay": 0.999, "floor": 0.01, "warmup": 25, "refresh": 10, "gate": 1.0}, 16),
        ({"num_bins": 4, "decay": 0.0, "warmup": 0, "refresh": 1}, 3),
    ],
)
def test_mass_follows_the_recurrence_at_every_step(options: dict[str, float], num_rows: int, bad: float | None) -> None:
    sampler, reference = ks.RootLoss(**options), Reference(**options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    num_refreshed = 0
    for step in range(120):
        t = torch.rand(num_rows, generator=generator) ** (1 + step % 3)  # crowds the first bins
        losses = torch.randn(num_rows, generator=generator).exp() * (1 + 20 * t)
        if bad is not None:
            losses[torch.rand(num_rows, generator=generator) < 0.2] = bad
        before = reference.mass
        show(sampler, t, losses)
        reference.observe(t, losses)
        num_refreshed += before != reference.mass
        assert_close(sampler.mass().double(), torch.tensor(reference.mass, dtype=torch.float64), rtol=1e-4, atol=1e-6)
    assert num_refreshed > 5


def test_loss_weight_of_the_draw_multiplies_its_loss() -> None:
    def loss_weight(t: Tensor) -> Tensor:
        return (3 * t).exp()

    sampler, reference = ks.RootLoss(loss_weight=loss_weight), Reference()
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        t, losses = torch.rand(32, generator=generator), torch.rand(32, generator=generator)
        show(sampler, t, losses)
        reference.observe(t, loss_weight(t) * losses)
    assert_close(sampler.mass().double(), torch.tensor(reference.mass, dtype=torch.float64), rtol=1e-4, atol=1e-6)


def test_weighted_loss_is_drawn_in_proportion_to_its_weight_times_the_root_of_the_plain_loss() -> None:
    weight, plain = torch.linspace(1, 5, 20), torch.linspace(2, 0.1, 20)
    sampler = eager(loss_weight=lambda t: weight[(t * 20).long()], gate=1.0)
    show(sampler, centres(20), weight * plain)
    expected = weight * plain.sqrt()
    assert_close(sampler.mass(), 0.9 * expected / expected.sum() + 0.1 / 20, rtol=1e-4, atol=1e-6)


def test_density_is_uniform_in_warmup_and_constant_between_refreshes() -> None:
    sampler = ks.RootLoss(10, warmup=12, refresh=5)
    masses = [sampler.mass()]
    for step in range(40):
        t = sampler.sample(torch.zeros(64, 1)).t
        show(sampler, t, skewed(t) * (1 + step))
        masses.append(sampler.mass())
    changed = [step for step in range(1, 41) if not torch.equal(masses[step], masses[step - 1])]
    assert changed == [15, 20, 25, 30, 35, 40]
    assert_close(masses[14], torch.full((10,), 0.1))


@pytest.mark.parametrize("num_rows", [4, 8, 16, 64, 128, 256])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_large_losses_of_the_first_steps_are_forgotten_within_60_steps(num_rows: int, seed: int) -> None:
    sampler = ks.RootLoss(seed=seed)
    for step in range(80):
        t = sampler.sample(torch.zeros(num_rows, 1)).t
        show(sampler, t, torch.ones_like(t) if step < 20 else 0.02 + 0.3 * (1 - t) ** 6)
    assert bool((sampler.mass()[0] > 1.5 * sampler.mass()[10:]).all())


def test_old_losses_fade_no_faster_later_than_the_decay_has_it() -> None:
    sampler, without = eager(1), 0.0
    for step in range(4000):
        loss = float(step % 7)
        show(sampler, torch.tensor([0.5]), torch.tensor([loss]))
        without = 0.99 * without + 0.01 * loss**2
    assert_close(float(sampler.squares.read()), without, rtol=0.01, atol=0)


@pytest.mark.parametrize("num_bins", [1, 3, 7, 20, 41, 1000])
def test_weights_are_exactly_one_while_draws_are_uniform(num_bins: int) -> None:
    sampler = ks.RootLoss(num_bins, floor=0.3)
    assert set(sampler.sample(torch.zeros(64, 1)).weight.tolist()) == {1.0}
    sampler = taught(torch.ones_like, num_bins=num_bins, floor=0.3)  # behind the gate
    assert set(sampler.sample(torch.zeros(64, 1)).weight.tolist()) == {1.0}


def test_a_state_of_version_0_1_goes_on_from_the_same_density() -> None:
    sampler = taught(skewed, num_steps=60)
    state = sampler.state_dict()
    share_seen = 1 - 0.99 ** state["squares.num_seen"][:-1].float()  # what version 0.1 divided by
    mean = state.pop("squares.total") / state.pop("squares.weight") * share_seen
    resumed = ks.RootLoss()
    resumed.load_state_dict({**state, "squares.mean": mean})
    assert_close(resumed.learned_mass(), sampler.learned_mass())
    show(resumed, centres(20), skewed(centres(20)))
    assert_close(resumed.learned_mass(), sampler.learned_mass(), rtol=0.02, atol=0)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_a_thousandfold_loss_is_drawn_by_its_root_whatever_the_unit(scale: float) -> None:
    sampler = taught(lambda t: torch.where(t < 0.05, 1000.0, 1.0) * scale)
    root = torch.tensor([1000.0**0.5, *[1.0] * 19])
    assert_close(sampler.mass(), 0.9 * root / root.sum() + 0.1 / 20, rtol=1e-4, atol=1e-6)


def test_the_mass_sums_to_one_and_density_is_the_mass_in_other_bins() -> None:
    sampler = taught(skewed)
    mass = sampler.mass()
    assert mass.shape == (20,)
    assert_close(mass.sum(), torch.tensor(1.0))
    assert_close(sampler.density(20), mass)
    assert_close(sampler.density(40), mass.repeat_interleave(2) / 2)
    assert_close(sampler.density(5), mass.view(5, 4).sum(1))
    assert sampler.density().shape == (100,)


@pytest.mark.parametrize("loss", [1.0, 0.0, 1e14])
def test_a_flat_loss_is_drawn_uniformly(loss: float) -> None:
    sampler = taught(lambda t: torch.full_like(t, loss))
    assert_close(sampler.mass(), torch.full((20,), 0.05), rtol=1e-6, atol=0)


def test_the_gate_makes_a_noisy_flat_loss_exactly_uniform() -> None:
    def noisy(t: Tensor) -> Tensor:
        return 1 + 0.5 * torch.sin(1e4 * t)

    assert_close(taught(noisy).mass(), torch.full((20,), 0.05), rtol=1e-6, atol=0)
    assert float((taught(noisy, gate=1.0).mass() - 0.05).abs().max()) > 1e-4


@pytest.mark.parametrize(("ratio", "gated"), [(2.5, True), (2.6, False), (1 / 2.5, True), (1 / 2.6, False)])
def test_the_gate_opens_where_the_effective_share_of_bins_falls_to_it(ratio: float, gated: bool) -> None:
    """Two bins with q = (p, 1 - p): 1 / (2 (p**2 + (1 - p)**2)) = 0.95 at p = 0.6147, a loss ratio of 2.546."""
    sampler = eager(2, floor=0.2)
    show(sampler, centres(2), torch.tensor([ratio, 1.0]))
    p = ratio**0.5 / (1 + ratio**0.5)
    expected = [0.5, 0.5] if gated else [0.8 * p + 0.1, 0.8 * (1 - p) + 0.1]
    assert_close(sampler.mass(), torch.tensor(expected), rtol=1e-4, atol=0)


def test_a_bin_never_drawn_counts_as_the_largest_of_those_drawn() -> None:
    sampler = eager(gate=1.0)
    show(sampler, centres(20)[[3, 7, 11]], torch.tensor([1.0, 9.0, 4.0]))
    root = torch.full((20,), 3.0)
    root[3], root[11] = 1.0, 2.0
    assert_close(sampler.mass(), 0.9 * root / root.sum() + 0.1 / 20, rtol=1e-4, atol=1e-6)


def test_tiny_batches_leave_a_proper_density() -> None:
    sampler, reference = eager(40, seed=3), Reference(40, warmup=1, refresh=1)
    for _ in range(6):
        drawn = sampler.sample(torch.zeros(2, 1))
        show(sampler, drawn.t, skewed(drawn.t))
        reference.observe(drawn.t, skewed(drawn.t))
    assert min(reference.num_drawn) == 0
    assert_close(sampler.mass().double(), torch.tensor(reference.mass, dtype=torch.float64), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e38])
def test_a_window_without_finite_losses_changes_nothing_and_is_counted(bad: float) -> None:
    sampler = taught(skewed)
    before = sampler.mass()
    for _ in range(50):
        drawn = sampler.sample(torch.zeros(64, 1))
        show(sampler, drawn.t, torch.full((64,), bad))
    assert_close(sampler.mass(), before, rtol=1e-6, atol=0)
    assert int(sampler.diagnostics()["skipped_losses"]) == 50 * 64
    assert all(bool(value.isfinite().all()) for value in sampler.state_dict().values())
    show(sampler, centres(20), torch.ones(20))
    assert int(sampler.diagnostics()["skipped_losses"]) == 50 * 64


def test_without_any_finite_loss_draws_are_uniform() -> None:
    sampler = taught(lambda t: torch.full_like(t, NAN))
    assert_close(sampler.mass(), torch.full((20,), 0.05))
    assert_close(sampler.sample(torch.zeros(64, 1)).weight, torch.ones(64))


@pytest.mark.parametrize("floor", [0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(
    "loss",
    [
        lambda t: torch.where(t < 0.05, 1e14, 0.0),
        lambda t: torch.where((t * 20).long() % 2 == 0, 1e7, 1e-7),
        lambda t: torch.where(t > 0.95, NAN, t),
    ],
)
def test_density_stays_between_its_bounds(loss: Callable[[Tensor], Tensor], floor: float) -> None:
    relative = 20 * taught(loss, floor=floor).mass()
    assert float(relative.min()) >= floor * (1 - 1e-5)
    assert float(relative.max()) <= ((1 - floor) * 20 + floor) * (1 + 1e-5)


def test_weights_are_one_over_relative_density_and_average_to_one() -> None:
    sampler = taught(skewed)
    drawn = sampler.sample(torch.zeros(4096, 1, dtype=torch.float64))
    mass = sampler.mass().double()
    assert float(mass.max() / mass.min()) > 3
    assert_close(drawn.weight, 1 / (20 * mass[drawn.index(20)]), rtol=1e-5, atol=0)
    assert_close((mass * (1 / (20 * mass))).sum(), torch.tensor(1.0, dtype=torch.float64))
    assert_close(drawn.weight.mean(), torch.tensor(1.0, dtype=torch.float64), rtol=0, atol=1e-2)


@pytest.mark.parametrize("stratified", [True, False])
def test_weighted_means_of_any_function_of_t_are_those_of_uniform_draws(stratified: bool) -> None:
    sampler = taught(skewed, stratified=stratified, seed=1)
    with torch.no_grad():
        drawn = [sampler.sample(torch.zeros(128, 1, dtype=torch.float64)) for _ in range(300)]
    t, weight = torch.stack([d.t for d in drawn]), torch.stack([d.weight for d in drawn])
    for function, integral in ((torch.square, 1 / 3), (torch.exp, math.e - 1), (lambda t: (t < 0.03).double(), 0.03)):
        estimate = (weight * function(t)).mean(1)  # (300,)
        error = estimate.std() / len(estimate) ** 0.5
        assert abs(float(estimate.mean()) - integral) < 4 * float(error) + 1e-9


def test_saved_between_refreshes_it_goes_on_bitwise() -> None:
    sampler, resumed = taught(skewed, num_steps=57), ks.RootLoss(seed=5)
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(sampler.mass(), resumed.mass())
    for _ in range(25):
        first, second = (one.sample(torch.zeros(32, 1)) for one in (sampler, resumed))
        assert torch.equal(first.t, second.t)
        assert torch.equal(first.weight, second.weight)
        for one in (sampler, resumed):
            show(one, first.t, 2 - skewed(first.t))
    assert torch.equal(sampler.mass(), resumed.mass())
    assert not torch.equal(sampler.mass(), taught(skewed, num_steps=57).mass())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_bins": 0}, "num_bins"),
        ({"num_bins": 2.5}, "num_bins"),
        ({"decay": 1.0}, "decay"),
        ({"decay": -0.1}, "decay"),
        ({"floor": -0.1}, "floor"),
        ({"floor": 1.5}, "floor"),
        ({"floor": NAN}, "floor"),
        ({"warmup": -1}, "warmup"),
        ({"refresh": 0}, "refresh"),
        ({"gate": -0.1}, "gate"),
        ({"gate": 1.5}, "gate"),
        ({"loss_weight": 0.5}, "loss_weight"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_arguments_are_refused_with_rule_value_and_fix(options: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must .*got {options[name]}.*: \w+"):
        ks.RootLoss(**options)  # type: ignore[arg-type]
