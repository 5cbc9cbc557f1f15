"""Progress within its bounds: floor, cap, weights, relaxing, losses that are not finite, resume, wrong arguments."""

import io
import math
from collections.abc import Callable

import pytest
import torch
from progress_cases import NAN, PRIORS, K, after, build, every_prior, falling_early, graded, observe
from torch import Tensor
from torch.testing import assert_close

import kairostep as ks
from kairostep.timesteps import progress


@every_prior
@pytest.mark.parametrize(("floor", "cap"), [(0.2, 4.0), (0.01, 2.0), (0.9, 1.05), (0.5, 1.5)])
def test_density_stays_between_floor_and_cap_times_the_prior(name: str, floor: float, cap: float) -> None:
    build_prior, prior = PRIORS[name]
    generator, reached = torch.Generator().manual_seed(0), torch.ones(0)

    def jumping(call: int, t: Tensor) -> Tensor:
        return 100 * (torch.randn(K, generator=generator) * 3).exp()[(t * K).long()]

    for loss in (jumping, falling_early, lambda call, t: 1000 - call * (t < 0.05).float()):
        sampler = build(loss, prior=build_prior(), floor=floor, cap=cap, max_move=2.0, temperature=0.1)
        for _ in range(15):
            observe(sampler)
            density = sampler.density(K)
            assert_close(density.sum(), torch.tensor(1.0))
            relative = density / prior.density(K)
            assert float(relative.min()) >= floor - 1e-4
            assert float(relative.max()) <= cap + 1e-4
            reached = torch.cat([reached, relative])
    assert float(reached.max()) > 1 + 0.5 * (cap - 1)


@pytest.mark.parametrize("max_move", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("loss", [graded, falling_early])
def test_a_window_moves_log_densities_apart_by_at_most_twice_max_move(
    loss: Callable[[int, Tensor], Tensor], max_move: float
) -> None:
    sampler = build(loss, max_move=max_move)
    before, moves = sampler.density(K).log(), []
    for _ in range(12):
        observe(sampler)
        log_density = sampler.density(K).log()
        move = log_density - before
        moves.append(float(move.max() - move.min()))  # a common factor is the renormalisation
        before = log_density
    assert max(moves) <= 2 * max_move + 1e-5
    assert max(moves) > 0.5 * max_move


@every_prior
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_weights_are_relative_density_to_minus_beta_and_average_to_one(name: str, beta: float) -> None:
    build_prior, _ = PRIORS[name]
    if name == "logit_normal" and beta > 0:
        build_prior = lambda: ks.FixedBeta(1.0, 2.0)  # noqa: E731
    sampler = build(graded, prior=build_prior(), beta=beta)
    observe(sampler, 20)
    with torch.no_grad():
        drawn = [sampler.sample(torch.zeros(256, 1, dtype=torch.float64)) for _ in range(100)]
    t, weight = torch.stack([d.t for d in drawn]), torch.stack([d.weight for d in drawn])
    assert bool((weight.isfinite() & (weight > 0)).all())
    if name != "logit_normal":  # flat within the bins
        density = sampler.density(K).double()
        expected = (K * density) ** -beta
        expected = expected / (density * expected).sum()
        assert_close(weight, expected[(t * K).long()], rtol=1e-4, atol=0)
    error = weight.mean(1).std() / len(drawn) ** 0.5
    assert abs(float(weight.mean()) - 1) < 4 * float(error) + 1e-6


@every_prior
def test_with_beta_one_weighted_means_are_those_of_uniform_draws(name: str) -> None:
    build_prior, _ = PRIORS[name]
    if name == "logit_normal":  # 1 / density has no variance there
        build_prior = lambda: ks.LogitNormal(unbiased=True)  # noqa: E731
    sampler = build(graded, prior=build_prior(), beta=1.0)
    observe(sampler, 20)
    with torch.no_grad():
        drawn = [sampler.sample(torch.zeros(256, 1, dtype=torch.float64)) for _ in range(300)]
    t, weight = torch.stack([d.t for d in drawn]), torch.stack([d.weight for d in drawn])
    assert float(weight.std()) > 0.05
    for function, integral in ((torch.ones_like, 1.0), (torch.square, 1 / 3), (torch.exp, math.e - 1)):
        estimate = (weight * function(t)).mean(1)
        error = estimate.std() / len(estimate) ** 0.5
        assert abs(float(estimate.mean()) - integral) < 4 * float(error) + 1e-6


def test_with_beta_zero_weights_are_one() -> None:
    sampler = build(graded, beta=0.0)
    observe(sampler, 10)
    assert_close(sampler.sample(torch.zeros(64, 1)).weight, torch.ones(64))


@pytest.mark.parametrize("name", ["none", "steps"])
def test_relaxing_returns_to_the_prior_linearly_in_the_second_half(name: str) -> None:
    build_prior, prior = PRIORS[name]
    options = {"prior": build_prior(), "measure": "absolute", "max_move": 5.0}
    sampler = build(falling_early, relax_steps=200, **options)
    observe(sampler, 100)
    away, home = sampler.density(K), prior.density(K)
    free = build(falling_early, **options)
    observe(free, 98)
    assert_close(away, free.density(K), rtol=0, atol=1e-3)  # up to the step that the count begins with
    size = float((away - home).abs().sum())
    assert size > 0.1
    for step in range(105, 200, 10):
        observe(sampler, step - 100 if step == 105 else 10)
        expected = home + (200 - step) / 100 * (away - home)
        assert float((sampler.density(K) - expected).abs().sum()) <= 0.03 * size
    observe(sampler, 5)
    for _ in range(3):
        assert torch.equal(sampler.density(K), build(prior=build_prior()).density(K))
        assert_close(sampler.density(100), prior.density(100), rtol=1e-5, atol=1e-7)
        observe(sampler, 7)


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("num_good", [6, 40], ids=["while it moves", "when it has arrived"])
def test_windows_without_finite_losses_change_nothing_and_are_counted(bad: float, num_good: int) -> None:
    def broken_later(call: int, t: Tensor) -> Tensor:
        return torch.full_like(t, bad) if num_good <= call < num_good + 3 else other(call, t)

    def other(call: int, t: Tensor) -> Tensor:
        return graded(call, t if call < num_good else 1 - t)

    sampler = build(broken_later)
    observe(sampler, num_good)
    before = sampler.density(K)
    assert float((before - 0.05).abs().max()) > 1e-4
    for num_bad in (1, 2, 3):
        observe(sampler)
        assert_close(sampler.density(K), before, rtol=1e-6, atol=0)
        assert int(sampler.diagnostics()["skipped_probes"]) == num_bad * 64
        assert int(sampler.diagnostics()["probe_evaluations"]) == (num_good + num_bad) * 64
    observe(sampler, 5)
    assert bool(sampler.density(K).isfinite().all())
    assert float((sampler.density(K) - before).abs().max()) > 1e-4  # it goes on


def test_from_the_start_without_finite_losses_it_is_the_prior() -> None:
    assert_close(after(lambda call, t: torch.full_like(t, NAN)), torch.full((K,), 0.05))


def test_single_bad_probes_are_left_out_of_their_bins() -> None:
    """Of bins in which all probes fall alike, those that are left say the same."""
    clean, partly = build(graded, num_probes=200), build(lambda call, t: spoiled(call, t), num_probes=200)

    def spoiled(call: int, t: Tensor) -> Tensor:
        losses = graded(call, t)
        losses[[3, 77, 120]] = NAN
        return losses

    observe(clean, 8)
    observe(partly, 8)
    assert int(partly.diagnostics()["skipped_probes"]) == 8 * 3
    assert_close(partly.density(K), clean.density(K), rtol=1e-4, atol=0)


def falling_by_training(state: Tensor) -> ks.LossAt:
    """Return the loss of a batch, lower at early times by what the state says."""
    return lambda rows, t: 10 - state * (t < 0.5).float()


def test_without_a_probe_it_compares_the_loop_before_and_after_a_step() -> None:
    sampler, state, x0 = ks.Progress(every=3, num_probes=40), torch.zeros(()), torch.zeros(16, 1)
    asked: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def loss_at(rows: Tensor, t: Tensor) -> Tensor:
        assert int(rows.min()) >= 0
        assert int(rows.max()) < 16
        asked.append((int(state), rows.clone(), t.clone(), torch.rand(2)))
        return falling_by_training(state)(rows, t)

    before = torch.get_rng_state()
    for _ in range(30):
        drawn = sampler.sample(x0)
        with sampler.observe(x0, drawn, torch.ones(16), loss_at):
            state += 1
    assert torch.equal(torch.get_rng_state(), before)
    assert int(sampler.diagnostics()["probe_evaluations"]) == sum(len(rows) for _, rows, _, _ in asked) == 10 * 2 * 40
    steps = sorted({step for step, _, _, _ in asked})
    pairs = list(zip(steps[::2], steps[1::2], strict=True))
    assert len(pairs) == 10
    assert all(late == early + 1 for early, late in pairs)
    for early, late in pairs:  # the same rows, times and random numbers on both sides of the step
        one, other = ([call for call in asked if call[0] == step] for step in (early, late))
        for first, second in zip(one, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(first[1:], second[1:], strict=True))
    density = sampler.density(K)
    assert float(density[:10].min()) > 0.05 > float(density[10:].max())


def test_without_a_probe_a_step_that_changes_nothing_moves_nothing() -> None:
    sampler = ks.Progress(every=1)
    observe(sampler, 10)
    assert_close(sampler.density(K), torch.full((K,), 0.05), rtol=1e-6, atol=0)


@pytest.mark.parametrize("probed", [True, False])
def test_saved_and_loaded_goes_on_bitwise(probed: bool) -> None:
    def run(sampler: ks.Progress, steps: range, state: dict[str, int]) -> None:
        x0 = torch.zeros(16, 1)
        for step in steps:
            drawn = sampler.sample(x0)
            state["step"] = step
            with sampler.observe(x0, drawn, torch.ones(16), lambda rows, t: loss(rows, t)):
                state["step"] += 1

    def loss(rows: Tensor, t: Tensor) -> Tensor:
        return 100 - state["step"] * torch.sin(9 * t) + torch.rand_like(t)

    def build_one(seed: int) -> ks.Progress:
        return ks.Progress(ks.FixedBeta(2.0, 2.0, seed=seed), probe=loss if probed else None, every=3, seed=seed)

    state = {"step": 0}
    sampler, resumed = build_one(0), build_one(11)
    run(sampler, range(13), state)
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(sampler.density(), resumed.density())
    run(sampler, range(13, 30), state)
    run(resumed, range(13, 30), state)
    saved, expected = resumed.state_dict(), sampler.state_dict()
    assert saved.keys() == expected.keys()
    for key in saved:
        assert torch.equal(saved[key], expected[key]), key
    first, second = sampler.sample(torch.zeros(64, 1)), resumed.sample(torch.zeros(64, 1))
    assert torch.equal(first.t, second.t)
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(sampler.density(), resumed.density())
    assert float((sampler.density(K) - ks.FixedBeta(2.0, 2.0).density(K)).abs().max()) > 1e-4


def test_on_another_number_of_ranks_losses_are_compared_from_the_next_window_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank's noise is its own, so that what one measured says nothing about what two will."""
    saved = build(falling_early)
    observe(saved, 5)
    noise = {1: 0.0, 2: 50.0}
    resumed = build(lambda call, t: falling_early(call, t) + noise[progress.world_size()])
    resumed.load_state_dict(saved.state_dict())
    monkeypatch.setattr(progress, "world_size", lambda: 2)
    monkeypatch.setattr(progress, "sum_over_ranks", lambda mine: mine + mine.flip(0))  # the other half, as low
    before = resumed.density(K)
    observe(resumed, 1)
    assert torch.equal(resumed.density(K), before)
    observe(resumed, 3)
    assert not torch.equal(resumed.density(K), before)


def test_losses_of_a_probe_of_the_wrong_shape_are_refused() -> None:
    sampler = build(lambda call, t: torch.zeros(len(t), 2))
    with pytest.raises(ValueError, match=r"\(64,\).*got \(64, 2\)"):
        observe(sampler, 2)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_bins": 0}, "num_bins"),
        ({"num_probes": 0}, "num_probes"),
        ({"every": 0}, "every"),
        ({"measure": "speed"}, "measure"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"smoothing": 1.0}, "smoothing"),
        ({"smoothing": -0.1}, "smoothing"),
        ({"floor": -0.1}, "floor"),
        ({"floor": 1.5}, "floor"),
        ({"cap": 0.5}, "cap"),
        ({"max_move": -0.1}, "max_move"),
        ({"max_move": NAN}, "max_move"),
        ({"beta": -0.5}, "beta"),
        ({"relax_steps": 0}, "relax_steps"),
        ({"prior": "uniform"}, "prior"),
        ({"probe": 3}, "probe"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_arguments_are_refused_with_rule_and_value(options: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must .*got '?{options[name]}"):
        ks.Progress(**options)  # type: ignore[arg-type]
