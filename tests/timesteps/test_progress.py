"""Progress: draws go where the loss of a fixed set of probes falls."""

from itertools import pairwise

import pytest
import torch
from progress_cases import PRIORS, K, Probe, after, build, every_prior, falling_early, graded, observe
from torch import Tensor, nn
from torch.testing import assert_close

import kairostep as ks


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
    with torch.no_grad():
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


@pytest.mark.parametrize("spike", [1e-3, 1e12])
def test_a_loss_that_rises_from_nothing_once_is_forgotten(spike: float) -> None:
    def loss(call: int, t: Tensor) -> Tensor:
        falling = 100 - call * (t < 0.5).float() / 4
        return torch.where(t < 1 / K, 0.0 if call == 0 else spike, falling)

    forgotten = after(loss, 120)[1:]
    assert float(forgotten[:9].min()) > 1.1 * float(forgotten[9:].max())
