"""What holds for every sampler; `samplers.py` beside this lists them."""

import io
from typing import Any

import pytest
import torch
from samplers import (
    LEARNING,
    REQUIRED,
    TAUGHT_STEPS,
    UNBIASED,
    VARIANTS,
    batch,
    build,
    build_model,
    build_taught,
    every_sampler,
    losses_of,
    teach,
)
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import kairostep as ks
from kairostep.registry import samplers
from kairostep.testing import check_sampler

# Samplers that skip something else than the 64 losses of each of four steps. Adaptive samplers probe at two of these
# steps: 64 rewards, a sweep and an update each.
SKIPPED = {
    "least_noise": {"skipped_losses": 4 * 64, "skipped_probes": 4},  # its first sweep begins at step 60
    "adaptive": {"skipped_rewards": 2 * (64 + 2)},
    "adaptive_pair_unbiased": {"skipped_rewards": 2 * (64 + 2)},
    "adaptive_as_published": {"skipped_rewards": 2 * (64 + 2)},
    "gradient_variance": {"skipped_probes": 2},  # measures at every second step
    "gradient_variance_unbiased": {"skipped_probes": 4},
}


@pytest.mark.parametrize("name", samplers.registered)
def test_every_registered_sampler_passes_the_installed_suite(name: str) -> None:
    check_sampler(samplers.find(name), unbiased=name in UNBIASED, **REQUIRED.get(name, {}))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_passes_the_installed_suite(name: str) -> None:
    check_sampler(lambda e: VARIANTS[name](e.model, e.seed, e.shape), unbiased=name in UNBIASED)


@every_sampler
@pytest.mark.parametrize("shape", [(1, 4), (7, 4), (128, 4), (5, 3, 16), (6, 3, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_draws_one_time_in_range_and_one_weight_per_row(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    drawn = build(name, build_model(), shape=shape[1:]).sample(torch.zeros(shape, dtype=dtype))
    assert drawn.t.shape == drawn.weight.shape == shape[:1]
    assert drawn.t.dtype == drawn.weight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bool(((drawn.t >= 0) & (drawn.t < 1)).all())
    assert bool((drawn.weight.isfinite() & (drawn.weight > 0)).all())
    for num_steps in (1, 10, 1000):
        index = drawn.index(num_steps)
        assert torch.equal(index, (drawn.t * num_steps).long())
        assert index.dtype == torch.int64
        assert 0 <= int(index.min()) <= int(index.max()) < num_steps


@every_sampler
@pytest.mark.parametrize("num_rows", [1, 3, 128])
def test_density_is_where_the_draws_go(name: str, num_rows: int) -> None:
    sampler = build_taught(name)
    num_batches = min(3000, 20_000 // num_rows)
    latest = batch(TAUGHT_STEPS[-1])  # a policy's density is that over the rows it was shown last
    rows = torch.arange(num_rows * num_batches).view(num_batches, num_rows) % len(latest)
    with torch.no_grad():  # nothing is shown
        times = torch.cat([sampler.sample(latest[row]).t for row in rows])
    for num_bins in (10, 33):
        density = sampler.density(num_bins)
        assert density.shape == (num_bins,)
        assert_close(density.sum(), torch.tensor(1.0))
        drawn = torch.histc(times, num_bins, 0, 1) / len(times)
        noise = (density * (1 - density) / len(times)).sqrt()
        assert bool(((drawn - density).abs() <= 5 * noise + 1e-4).all()), (drawn, density)


@pytest.mark.parametrize("name", LEARNING)
def test_learning_samplers_move_away_from_where_they_start(name: str) -> None:
    sampler = build(name, build_model())
    before, after = sampler.density(10), build_taught(name).density(10)
    if not sampler.inner:
        assert_close(before, torch.full((10,), 0.1), rtol=0, atol=0.01)
    assert float((after - before).abs().sum()) > 0.01


@every_sampler
@pytest.mark.parametrize("steps", [range(23, 40), range(64, 80)], ids=str)  # "least_noise" sweeps from step 60 to 69
def test_saved_and_loaded_goes_on_bitwise(name: str, steps: range) -> None:
    model, other_model = build_model(), build_model()
    sampler, resumed = build(name, model, 0), build(name, other_model, 123)
    teach(sampler, model, range(steps.start))
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    other_model.load_state_dict(model.state_dict())
    teach(sampler, model, steps)
    teach(resumed, other_model, steps)
    assert_same_state(sampler, resumed)
    first, second = sampler.sample(batch(0)), resumed.sample(batch(0))
    assert torch.equal(first.t, second.t)
    assert torch.equal(first.weight, second.weight)


def assert_same_state(one: torch.nn.Module, other: torch.nn.Module) -> None:
    state, other_state = one.state_dict(), other.state_dict()
    assert state.keys() == other_state.keys()
    for key in state:
        assert torch.equal(state[key], other_state[key]), key


@every_sampler
def test_seeds_and_steps_give_different_draws(name: str) -> None:
    x0 = torch.zeros(64, 4)
    sampler, other = build(name, build_model(), 0), build(name, build_model(), 1)
    first = sampler.sample(x0).t
    assert not torch.equal(first, sampler.sample(x0).t)
    assert not torch.equal(first, other.sample(x0).t)
    assert torch.equal(first, build(name, build_model(), 0).sample(x0).t)


@every_sampler
def test_it_says_whether_its_weights_undo_its_density(name: str) -> None:
    assert build(name, build_model()).unbiased == (name in UNBIASED and name != "uniform")  # whose density is flat


@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased_weights_keep_the_objective(name: str) -> None:
    sampler = build_taught(name)
    with torch.no_grad():
        drawn = [sampler.sample(torch.zeros(128, 4, dtype=torch.float64)) for _ in range(400)]
    t, weight = torch.cat([d.t for d in drawn]), torch.cat([d.weight for d in drawn])
    assert name == "uniform" or float(weight.std()) > 0.05
    for function, integral in ((torch.ones_like, 1.0), (torch.square, 1 / 3), (torch.exp, torch.e - 1)):
        estimate = weight * function(t)
        error = estimate.std() / len(t) ** 0.5
        assert abs(float(estimate.mean()) - integral) < 4 * float(error) + 1e-9


@every_sampler
def test_sample_compiles_without_a_graph_break_and_draws_the_same(name: str) -> None:
    torch.compiler.reset()
    sampler, compiled = build_taught(name), build_taught(name)
    sample = torch.compile(compiled.sample, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        expected, drawn = sampler.sample(batch(0)), sample(batch(0))
        assert_close(drawn.t, expected.t)
        assert_close(drawn.weight, expected.weight)


class NoHostSync(TorchDispatchMode):
    """Refuses whatever would make a GPU's host wait: reading a value, shapes that depend on values."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.FORBIDDEN), f"{name} synchronises"
        return func(*args, **(kwargs or {}))


@every_sampler
def test_neither_sample_nor_observe_waits_for_the_device(name: str) -> None:
    model = build_model()
    sampler = build(name, model, 0)
    with NoHostSync():
        teach(sampler, model, range(3))


@every_sampler
def test_the_training_stream_is_left_alone(name: str) -> None:
    model = build_model()
    sampler = build(name, model, 0)
    before = torch.get_rng_state()
    teach(sampler, model, range(3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38, 1.5e19])
def test_losses_that_are_not_finite_are_skipped_and_counted(name: str, bad: float) -> None:
    model = build_model()
    sampler = build(name, model)
    teach(sampler, model, TAUGHT_STEPS)
    density = sampler.density()
    for step in range(4):
        x0 = batch(step)
        drawn = sampler.sample(x0)
        sign = torch.ones(())

        def loss_at(rows: torch.Tensor, t: torch.Tensor, sign: torch.Tensor = sign) -> torch.Tensor:
            return losses_of(model, batch(0))(rows, t) * bad * sign

        with sampler.observe(x0, drawn, torch.full((len(x0),), bad), loss_at):
            sign.neg_()
    assert all(bool(value.isfinite().all()) for value in sampler.state_dict().values())
    assert_close(sampler.density(), density, rtol=0, atol=0.01)  # of a policy: over the rows it was shown last
    skipped = {key: int(value) for key, value in sampler.diagnostics().items() if key.startswith("skipped")}
    assert skipped == SKIPPED.get(name, {"skipped_losses": 4 * 64})


@every_sampler
def test_a_state_of_an_earlier_version_without_kinds_is_loaded(name: str) -> None:
    sampler, resumed = build_taught(name), build(name, build_model(), 123)
    state = sampler.state_dict()
    resumed.load_state_dict({key: state[key] for key in state if not key.endswith("kind")})
    assert_same_state(sampler, resumed)


@every_sampler
def test_a_cast_to_half_precision_leaves_the_sampler_exact(name: str) -> None:
    sampler, cast = build_taught(name), build_taught(name)
    cast.half()
    assert_same_state(sampler, cast)
    assert torch.equal(sampler.sample(batch(0)).t, cast.sample(batch(0)).t)


@every_sampler
def test_says_whether_it_looks_at_x0_and_asks_for_losses(name: str) -> None:
    model, asked = build_model(), []
    sampler = build_taught(name, model=model)
    state = {key: value.clone() for key, value in sampler.state_dict().items()}
    drawn = [sampler.sample(batch(7)).t]
    sampler.load_state_dict(state)
    drawn.append(sampler.sample(10 * batch(8)).t)
    if not sampler.uses_x0:
        assert torch.equal(*drawn)
    for step in range(4):
        x0 = batch(step)

        def loss_at(rows: torch.Tensor, t: torch.Tensor, x0: torch.Tensor = x0) -> torch.Tensor:
            asked.append(len(rows))
            return losses_of(model, x0)(rows, t)

        with sampler.observe(x0, sampler.sample(x0), torch.rand(64), loss_at):
            pass
    assert bool(asked) == sampler.uses_loss_at


@every_sampler
def test_micro_batches_of_a_step_teach_what_one_batch_does(name: str) -> None:
    models = build_model(), build_model()
    whole, parts = (build_taught(name, model=model) for model in models)
    for step in range(60, 64):
        x0 = batch(step)
        drawn, loss_at = whole.sample(x0), losses_of(models[0], x0)
        parts.sample(x0)
        losses = loss_at(torch.arange(64), drawn.t).detach()
        for part in (slice(0, 16), slice(16, 48)):
            parts.show(x0[part], ks.Timesteps(drawn.t[part], drawn.weight[part]), losses[part])
        end = slice(48, 64)
        last = x0[end], ks.Timesteps(drawn.t[end], drawn.weight[end]), losses[end]
        measures_the_last = whole.uses_loss_at and not whole.learns_from_all  # its loss_at knows no other rows
        seen = (*last, losses_of(models[0], x0[end])) if measures_the_last else (x0, drawn, losses, loss_at)
        with whole.observe(*seen), parts.observe(*last, losses_of(models[1], x0[end])):
            pass
    if isinstance(parts, ks.LeastNoise) and isinstance(whole, ks.LeastNoise):  # their probes are of other rows
        parts, whole = parts.squares, whole.squares
    assert_same_state(parts, whole)
