"""Checks whether your own sampler keeps the contract, with one line in your test suite.

    from kairostep.testing import check_sampler

    def test_triangle() -> None:
        check_sampler(Triangle)

It needs only torch and takes a second or two. kairostep's own samplers pass it too.
"""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kairostep.arguments import bundle
from kairostep.diffusion import DiscreteProcess, Objective
from kairostep.timesteps import LossAt, SamplerContext, Timesteps, TimestepSampler

NUM_ROWS = 64
TRAINED_STEPS = range(60)
RESUMED_STEPS = range(23, 45), range(64, 80)
NUM_DRAWS = 20_000
USE_DRAWS = (
    "draw by kairostep.timesteps.draws.Draws(seed, stratified=True), a function of (seed, step, row of the whole batch)"
)

Make = type[TimestepSampler] | Callable[[SamplerContext], TimestepSampler]


@dataclass(frozen=True)
class Case:
    """A sampler and a small problem to train with it.

    Args:
        make: Returns a sampler.
        shape: Of one x0.
        states: Of the trained sampler and its network, once they are trained.
    """

    make: Callable[[SamplerContext], TimestepSampler]
    shape: tuple[int, ...]
    states: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 0) -> tuple[TimestepSampler, nn.Module]:
        """Return a new sampler and its network, which always has the same weights."""
        num = int(torch.Size(self.shape).numel())
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            model = nn.Linear(num, num)
        experiment = SamplerContext(Objective(DiscreteProcess.linear()), model, self.shape, seed=seed)
        sampler = self.make(experiment)
        sampler.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))  # as the trainer does
        return sampler, model

    def batch(self, step: int) -> Tensor:
        """Return the data of a step, (B, *shape)."""
        generator = torch.Generator().manual_seed(step)
        return torch.randn(NUM_ROWS, *self.shape, dtype=torch.float32, generator=generator)

    def build_trained(self) -> tuple[TimestepSampler, nn.Module]:
        """Return a sampler that has observed some training, and its network."""
        sampler, model = self.build()
        if not self.states:
            self.train(sampler, model, TRAINED_STEPS)
            self.states.update(sampler=deepcopy(sampler.state_dict()), model=deepcopy(model.state_dict()))
        sampler.load_state_dict(deepcopy(self.states["sampler"]))
        model.load_state_dict(self.states["model"])
        return sampler, model

    def train(self, sampler: TimestepSampler, model: nn.Module, steps: range) -> None:
        """Train the network by gradient descent with the sampler's draws."""
        for step in steps:
            x0 = self.batch(step)
            loss_at = losses_of(model, x0)
            drawn = sampler.sample(x0)
            losses = loss_at(torch.arange(NUM_ROWS), drawn.t)
            gradients = torch.autograd.grad((losses * drawn.weight).mean(), list(model.parameters()))
            with sampler.observe(x0, drawn, losses.detach(), loss_at), torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(0.02 * gradient)


def check_sampler(make: Make, *, unbiased: bool = False, shape: tuple[int, ...] = (4,), **options: Any) -> None:
    """Raise AssertionError, with one sentence, if a sampler breaks the contract of `TimestepSampler`.

    Args:
        make: The class, or a function that returns a sampler for a `SamplerContext`, with its seed. A class is made by
            `from_experiment`, as `kairostep train` does.
        unbiased: Whether its weights are 1/density, so that they keep the objective.
        shape: Of one sample x0.
        options: Of the class, as after `--sampler.`.
    """
    from_experiment = getattr(make, "from_experiment", None)
    case = Case(partial(from_experiment, **bundle(make, options)) if from_experiment else make, shape)
    for check in CHECKS:
        check(case)
    if unbiased:
        check_unbiased(case)


def require(holds: bool, message: str) -> None:
    """Raise AssertionError unless a condition holds."""
    if not holds:
        raise AssertionError(message)


def losses_of(model: nn.Module, x0: Tensor) -> LossAt:
    """Return a loss whose size and gradient fall with t."""

    def loss_at(rows: Tensor, t: Tensor) -> Tensor:
        output: Tensor = model(x0[rows].flatten(1))
        return output.square().mean(1) * (0.1 + (1 - t)) ** 2

    return loss_at


def check_draws(case: Case) -> None:
    """Check that each row gets a time in [0, 1] and a finite, positive weight, for all batch sizes and dtypes."""
    sampler, _ = case.build()
    for num_rows in (1, 7, 128):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            drawn = sampler.sample(torch.zeros(num_rows, *case.shape, dtype=dtype))
            require(isinstance(drawn, Timesteps), f"sample must return Timesteps(t, weight), got {drawn!r}")
            for name, value in (("t", drawn.t), ("weight", drawn.weight)):
                shape, exact = tuple(value.shape), value.dtype in (torch.float32, torch.float64)
                require(shape == (num_rows,), f"{name} must have shape ({num_rows},), one per row, got {shape}")
                require(exact, f"{name} must be float32 or float64, got {value.dtype} for a batch of {dtype}")
            inside = bool(((drawn.t >= 0) & (drawn.t <= 1)).all())
            require(inside, f"t must be in [0, 1], got {float(drawn.t.min())} to {float(drawn.t.max())}")
            positive = bool((drawn.weight.isfinite() & (drawn.weight > 0)).all())
            require(positive, f"weights must be finite and above 0, got {drawn.weight}")


def check_seeds(case: Case) -> None:
    """Check that draws depend only on seed and step, and leave torch's generator unchanged."""
    x0 = case.batch(0)
    before = torch.get_rng_state()
    sampler, model = case.build(0)
    first = sampler.sample(x0).t
    require(not torch.equal(first, sampler.sample(x0).t), f"two draws in a row must differ: {USE_DRAWS}")
    again, other = (case.build(seed)[0].sample(x0).t for seed in (0, 1))
    require(torch.equal(first, again), f"the same seed must give the same draws: {USE_DRAWS}")
    require(not torch.equal(first, other), f"another seed must give other draws: {USE_DRAWS}")
    case.train(sampler, model, range(3))
    untouched = torch.equal(before, torch.get_rng_state())
    require(untouched, f"sample and observe must leave torch's generator as it was: {USE_DRAWS}")


def check_density(case: Case) -> None:
    """Check that draws follow `density`, also after training."""
    sampler, _ = case.build_trained()
    latest = case.batch(TRAINED_STEPS[-1])  # a policy's density is that of the latest rows
    with torch.no_grad():  # these draws are not observed
        times = torch.cat([sampler.sample(latest).t for _ in range(NUM_DRAWS // NUM_ROWS)]).float()
    for num_bins in (10, 33):
        density = sampler.density(num_bins)
        require(density.shape == (num_bins,), f"density({num_bins}) must have that shape, got {tuple(density.shape)}")
        total = float(density.sum())
        require(abs(total - 1) < 1e-4, f"density must sum to 1, got {total} with {num_bins} bins")
        require(bool((density >= 0).all()), f"density must not be negative, got {density}")
        drawn = torch.histc(times, num_bins, 0, 1) / len(times)
        noise = (density * (1 - density) / len(times)).clamp(min=0).sqrt()
        fits = bool(((drawn - density).abs() <= 5 * noise + 1e-3).all())
        require(fits, f"density must be where the draws go, got {density.tolist()} for draws of {drawn.tolist()}")


def check_unbiased(case: Case) -> None:
    """Check that weighted means over draws are means over uniform t."""
    sampler, _ = case.build_trained()
    x0 = case.batch(TRAINED_STEPS[-1]).double()
    with torch.no_grad():
        drawn = [sampler.sample(x0) for _ in range(NUM_DRAWS // NUM_ROWS)]
    t, weight = torch.cat([own.t for own in drawn]), torch.cat([own.weight for own in drawn])
    for name, function, mean in (("1", torch.ones_like, 1.0), ("t**2", torch.square, 1 / 3)):
        estimate = weight * function(t)
        error = float(estimate.std()) / len(t) ** 0.5
        found = float(estimate.mean())
        message = f"weights must be 1/density, so that the mean of weight * {name} is {mean:.4f}, got {found:.4f}"
        require(abs(found - mean) < 5 * error + 1e-6, message)


def check_state(case: Case) -> None:
    """Check that a sampler of another seed that loads a `state_dict` continues with the same bits."""
    rule = "a sampler that loads a state_dict must go on bitwise"
    fix = f"keep whatever changes, and what comes of the seed, in buffers; {USE_DRAWS}"
    for steps in RESUMED_STEPS:
        (sampler, model), (resumed, other_model) = case.build(0), case.build(123)
        case.train(sampler, model, range(steps.start))
        file = io.BytesIO()
        torch.save(sampler.state_dict(), file)
        file.seek(0)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        other_model.load_state_dict(model.state_dict())
        case.train(sampler, model, steps)
        case.train(resumed, other_model, steps)
        one, other = sampler.sample(case.batch(0)), resumed.sample(case.batch(0))
        same = torch.equal(one.t, other.t) and torch.equal(one.weight, other.weight)
        require(same, f"{rule}, got other draws: {fix}")
        changed = changes(sampler.state_dict(), resumed.state_dict())
        require(not changed, f"{rule}, got another {', '.join(changed)}")


def changes(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the entries in which two states differ."""
    common = one.keys() & other.keys()
    differing = {key for key in common if not torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key]))}
    return [key for key in {**one, **other} if key not in common or key in differing]


def check_observe(case: Case) -> None:
    """Check that `observe` rejects losses of a wrong shape, and calls `loss_at` only if `uses_loss_at`."""
    (sampler, model), asked = case.build_trained(), []
    x0 = case.batch(0)
    drawn, known = sampler.sample(x0), losses_of(model, x0)
    for wrong in (torch.zeros(NUM_ROWS, 4), torch.tensor(0.5)):
        try:
            with sampler.observe(x0, drawn, wrong, known):
                pass
        except ValueError:
            continue
        shape = tuple(wrong.shape)
        message = f"observe must raise ValueError for losses of shape {shape}: decorate it with learns_from_step"
        raise AssertionError(message)

    def loss_at(rows: Tensor, t: Tensor) -> Tensor:
        asked.append(len(rows))
        return known(rows, t)

    before = {key: torch.as_tensor(value).clone() for key, value in sampler.state_dict().items()}
    with sampler.observe(x0, drawn, torch.rand(NUM_ROWS, generator=torch.Generator().manual_seed(0)), loss_at):
        pass
    if not sampler.learns:
        changed = changes(before, sampler.state_dict())
        require(not changed, f"a sampler that does not learn must not change, got another {', '.join(changed)}")
    says = sampler.uses_loss_at or not asked
    require(says, "a sampler that calls loss_at must say so: write uses_loss_at = True in the class")


def check_bad_losses(case: Case) -> None:
    """Check that NaN and infinite losses are skipped."""
    for bad in (float("nan"), float("inf")):
        sampler, model = case.build_trained()
        before = sampler.density()
        for step in range(4):
            x0 = case.batch(step)
            drawn, good = sampler.sample(x0), losses_of(model, x0)

            def loss_at(rows: Tensor, t: Tensor, good: LossAt = good, bad: float = bad) -> Tensor:
                return good(rows, t) * bad

            with sampler.observe(x0, drawn, torch.full((NUM_ROWS,), bad), loss_at):
                pass
        spoilt = [key for key, value in sampler.state_dict().items() if not torch.as_tensor(value).isfinite().all()]
        require(not spoilt, f"a loss of {bad} must be skipped, got {', '.join(spoilt)} with values that are not finite")
        moved = float((sampler.density() - before).abs().max())
        require(moved < 0.01, f"a loss of {bad} must be skipped, got a density that moved by {moved:.3f}")


def check_ranks(case: Case) -> None:
    """Check that two processes draw together what one draws for the whole batch, with torch's fake process group."""
    if not dist.is_available() or dist.is_initialized():
        return
    whole, halves = case.build()[0].sample(case.batch(0)), []
    for rank, x0 in enumerate(case.batch(0).chunk(2)):
        with fake_rank(rank):
            halves.append(case.build()[0].sample(x0))
    require(not torch.equal(*(half.t for half in halves)), f"two processes must draw different numbers: {USE_DRAWS}")
    for name in ("t", "weight"):
        joined = torch.cat([getattr(half, name) for half in halves])
        same = torch.allclose(joined, getattr(whole, name), rtol=1e-5, atol=1e-6)
        require(same, f"two processes must draw what one draws for the whole batch, got another {name}: {USE_DRAWS}")


@contextmanager
def fake_rank(rank: int) -> Iterator[None]:
    """Run a block as one of two processes, without the other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch replaces it by one that names the rank
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


CHECKS = (check_draws, check_seeds, check_state, check_density, check_observe, check_bad_losses, check_ranks)
