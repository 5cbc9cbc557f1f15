"""Progress: draws go where the loss of a fixed set of probes falls, within bounds around the prior."""

import io
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kairostep as ks

NAN = float("nan")
K = 20


class Probe:
    """Losses that are a function of (number of the call, t), with a record of every call."""

    def __init__(self, loss: Callable[[int, Tensor], Tensor]) -> None:
        self.loss = loss
        self.rows: list[Tensor] = []
        self.t: list[Tensor] = []
        self.random: list[Tensor] = []

    def __call__(self, rows: Tensor, t: Tensor) -> Tensor:
        """Return the losses of the rows at t, all (num_probes,)."""
        self.rows.append(rows.clone())
        self.t.append(t.clone())
        self.random.append(torch.rand(4))
        return self.loss(len(self.t) - 1, t)


def falling_early(call: int, t: Tensor) -> Tensor:
    """Return a loss of 100 that falls by 1 per call, at t < 0.5 alone."""
    return 100 - call * (t < 0.5).float()


def graded(call: int, t: Tensor) -> Tensor:
    """Return a loss whose fall per call differs from bin to bin, also in sign."""
    return 100 - call * torch.sin(9 * (t * K).floor() / K)


def build(loss: Callable[[int, Tensor], Tensor] | Probe | None = None, **options: object) -> ks.Progress:
    """Return a sampler that probes this loss at every step, unless told otherwise."""
    probe = Probe(loss) if loss is not None and not isinstance(loss, Probe) else loss
    return ks.Progress(**({"probe": probe, "every": 1} | options))  # type: ignore[arg-type]


def observe(sampler: ks.TimestepSampler, num_steps: int = 1, num_rows: int = 64) -> None:
    """Take steps of a training loop whose own losses say nothing."""
    x0 = torch.zeros(num_rows, 1)
    for _ in range(num_steps):
        drawn = sampler.sample(x0)
        with sampler.observe(x0, drawn, torch.ones(num_rows), lambda rows, t: torch.ones_like(t)):
            pass


def after(loss: Callable[[int, Tensor], Tensor], num_steps: int = 10, **options: object) -> Tensor:
    """Return the density (K,) after as many windows."""
    sampler = build(loss, **options)
    observe(sampler, num_steps)
    return sampler.density(K)


PRIORS = {
    "none": (lambda: None, ks.Uniform()),
    "logit_normal": (ks.LogitNormal, ks.LogitNormal()),
    "steps": (lambda: ks.Tabulated(torch.arange(1.0, K + 1)), ks.Tabulated(torch.arange(1.0, K + 1))),
}
every_prior = pytest.mark.parametrize("name", PRIORS)


@every_prior
def test_starts_at_the_prior_exactly(name: str) -> None:
    build_prior, prior = PRIORS[name]
    sampler = ks.Progress(build_prior())
    for num_bins in (1, 10, K):
        assert_close(sampler.density(num_bins), prior.density(num_bins), rtol=1e-5, atol=1e-7)


def test_probes_once_every_so_many_steps_at_the_same_rows_times_and_random_numbers() -> None:
    probe = Probe(graded)
    sampler = build(probe, every=4, num_probes=50)
    observe(sampler, 5 * 4)
    assert len(probe.t) == 5
    for rows, t, random in zip(probe.rows, probe.t, probe.random, strict=True):
        assert torch.equal(rows, torch.arange(50))
        assert torch.equal(t, probe.t[0])
        assert torch.equal(random, probe.random[0])
    assert torch.equal((probe.t[0].double() * 50).floor().long().sort().values, torch.arange(50))
    assert int(sampler.diagnostics()["probe_evaluations"]) == 5 * 50


def test_a_window_is_one_call_of_all_probes_however_small_the_batch() -> None:
    probe = Probe(graded)
    observe(build(probe, num_probes=128), 2, num_rows=4)
    assert [len(rows) for rows in probe.rows] == [128, 128]


def test_the_random_numbers_of_probes_do_not_depend_on_the_size_of_the_batch() -> None:
    """A last batch of fewer rows must not look like progress."""
    sampler = build(lambda call, t: torch.rand_like(t))
    for num_rows in (64, 16, 7, 64, 3):
        observe(sampler, num_rows=num_rows)
    assert torch.equal(sampler.density(K), ks.Progress().density(K))


def test_training_keeps_its_random_stream() -> None:
    def noisy(call: int, t: Tensor) -> Tensor:
        return torch.rand_like(t) + graded(call, t)

    sampler = build(noisy)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    observe(sampler, 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_random_stream_comes_back_after_a_probe_that_fails() -> None:
    def failing(call: int, t: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    sampler, before = build(failing), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="out of memory"):
        observe(sampler, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_model_is_in_eval_mode_while_probed_and_put_back() -> None:
    model, seen = nn.Sequential(nn.Linear(1, 1), nn.Dropout()), []
    model[0].eval()

    def loss(call: int, t: Tensor) -> Tensor:
        seen.append(any(module.training for module in model.modules()))
        return graded(call, t)

    observe(build(loss, model=model), 3)
    assert seen == [False] * 3
    assert [module.training for module in model.modules()] == [True, False, True]


@every_prior
@pytest.mark.parametrize("measure", ["relative", "per_draw", "absolute"])
def test_draws_go_where_the_loss_falls(name: str, measure: str) -> None:
    build_prior, prior = PRIORS[name]
    if measure == "per_draw" and float(prior.density(K).std()) > 1e-6:
        return  # where the prior draws little, every draw counts for more: the next test
    sampler = build(falling_early, prior=build_prior(), measure=measure)
    observe(sampler, 30)
    relative = sampler.density(K) / prior.density(K)
    assert float(relative[:10].min()) > 1.02
    assert float(relative[10:].max()) < 0.98
    times = torch.cat([sampler.sample(torch.zeros(128, 1)).t for _ in range(100)])
    drawn, expected = torch.histc(times, K, 0, 1) / len(times), sampler.density(K)
    assert bool(((drawn - expected).abs() <= 5 * (expected / len(times)).sqrt() + 1e-4).all())


def test_draws_leave_where_the_loss_rises() -> None:
    density = after(lambda call, t: 100 + call * (t < 0.5).float(), 20)
    assert float(density[:10].max()) < 0.05 < float(density[10:].min())


def test_more_progress_never_means_fewer_draws() -> None:
    density = after(lambda call, t: 100 - call * (t * K).floor() / K, 20, measure="absolute")
    assert bool((density.diff() >= -1e-7).all())
    assert float(density[-1] / density[0]) > 1.2


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize("measure", ["relative", "per_draw", "absolute"])
def test_the_unit_of_the_loss_does_not_matter(measure: str, scale: float) -> None:
    def quarters(call: int, t: Tensor) -> Tensor:
        return 64 - call * (t * 4).floor() / 8

    scaled = after(lambda call, t: scale * quarters(call, t), measure=measure)
    expected = after(quarters, measure=measure)
    assert float((expected - 0.05).abs().max()) > 1e-3
    assert_close(scaled, expected, rtol=1e-2, atol=0)


def test_relative_progress_divides_by_the_loss_that_is_left() -> None:
    """A fall of 8 from 4096 at early times against one of 1 from 16: only relative to the loss the latter is more."""

    def loss(call: int, t: Tensor) -> Tensor:
        return torch.where(t < 0.5, 4096.0 - 8 * call, 16.0 - call)

    absolute, relative = after(loss, measure="absolute"), after(loss, measure="relative")
    assert float(absolute[:10].min()) > 0.05 > float(absolute[10:].max())
    assert float(relative[:10].max()) < 0.05 < float(relative[10:].min())


def test_progress_per_draw_divides_by_relative_density() -> None:
    """The same fall everywhere: per draw it is more where fewer are drawn, else it is no reason to move."""

    def loss(call: int, t: Tensor) -> Tensor:
        return torch.full_like(t, 128.0 - call)

    prior = ks.Tabulated(torch.tensor([3.0, 1.0]))
    per_draw = after(loss, prior=prior, measure="per_draw") / prior.density(K)
    assert float(per_draw[:10].max()) < 1 < float(per_draw[10:].min())
    for measure in ("absolute", "relative"):
        assert_close(after(loss, prior=prior, measure=measure), prior.density(K), rtol=1e-5, atol=0)


@every_prior
@pytest.mark.parametrize("measure", ["relative", "per_draw", "absolute"])
def test_a_probe_that_does_not_change_moves_nothing(name: str, measure: str) -> None:
    build_prior, prior = PRIORS[name]
    density = after(lambda call, t: 1 + (7 * t).sin().abs(), prior=build_prior(), measure=measure)
    assert torch.equal(density, ks.Progress(build_prior()).density(K))
    assert_close(density, prior.density(K), rtol=1e-5, atol=0)


def test_losses_permuted_within_their_bins_move_nothing() -> None:
    generator = torch.Generator().manual_seed(0)

    def permuted(call: int, t: Tensor) -> Tensor:
        losses, index = torch.arange(float(len(t))), (t * 8).long()
        for k in range(8):
            (inside,) = torch.where(index == k)
            losses[inside] = losses[inside[torch.randperm(len(inside), generator=generator)]]
        return losses  # whole numbers: their sums are exact

    sampler = build(permuted, num_bins=8)
    observe(sampler, 10)
    assert_close(sampler.density(8), torch.full((8,), 1 / 8), rtol=1e-6, atol=0)


def test_the_first_window_alone_moves_nothing() -> None:
    assert_close(after(graded, 1), torch.full((K,), 0.05), rtol=1e-6, atol=0)
    assert float((after(graded, 2) - 0.05).abs().max()) > 1e-4


def test_between_windows_the_density_is_constant() -> None:
    sampler = build(graded, every=5)
    densities = [sampler.density(K)]
    for _ in range(30):
        observe(sampler)
        densities.append(sampler.density(K))
    changed = [step for step in range(1, 31) if not torch.equal(densities[step], densities[step - 1])]
    assert len(changed) == 5
    assert {later - earlier for earlier, later in pairwise(changed)} == {5}


def test_a_higher_temperature_stays_nearer_to_the_prior() -> None:
    distances = [
        float((after(graded, 60, temperature=temperature, cap=20.0, floor=0.01) - 0.05).abs().sum())
        for temperature in (0.5, 1.0, 3.0, 1e6)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 2 * distances[2]
    assert distances[3] < 1e-4


def test_smoothing_forgets_one_odd_window() -> None:
    def odd_once(call: int, t: Tensor) -> Tensor:
        return 100 - call * (t < 0.5).float() - 3 * (call >= 20) * (t >= 0.5).float()

    changes = []
    for smoothing in (0.0, 0.9):
        before, following = (after(odd_once, num, smoothing=smoothing, max_move=1.0) for num in (20, 21))
        changes.append(float((before - following).abs().sum()))
    assert changes[1] < changes[0] / 2


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
def test_a_window_moves_the_log_density_by_at_most_max_move(
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
