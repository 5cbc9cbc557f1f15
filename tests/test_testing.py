"""What `check_sampler` finds in samplers that break the contract, one rule each."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kairostep as ks
from kairostep.testing import check_sampler
from kairostep.timesteps import SamplerContext
from kairostep.timesteps.draws import Draws
from kairostep.timesteps.sampler import learns_from_step


class Plain(ks.TimestepSampler):
    """Uniform, with nothing wrong."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.draws = Draws(seed, stratified=True)

    def sample(self, x0: Tensor) -> ks.Timesteps:
        """Return uniform times."""
        t = self.draws(x0)
        return ks.Timesteps(t, torch.ones_like(t))

    def density(self, num_bins: int = 100) -> Tensor:
        """Return a flat density."""
        return torch.full((num_bins,), 1 / num_bins)


class _OneTime(Plain):
    def sample(self, x0: Tensor) -> ks.Timesteps:
        drawn = super().sample(x0)
        return ks.Timesteps(drawn.t[:1], drawn.weight)


class _OutOfRange(Plain):
    def sample(self, x0: Tensor) -> ks.Timesteps:
        drawn = super().sample(x0)
        return ks.Timesteps(2 * drawn.t, drawn.weight)


class _NoWeight(Plain):
    def sample(self, x0: Tensor) -> ks.Timesteps:
        drawn = super().sample(x0)
        return ks.Timesteps(drawn.t, 0 * drawn.weight)


class _GlobalGenerator(Plain):
    def sample(self, x0: Tensor) -> ks.Timesteps:
        t = torch.rand(len(x0))
        return ks.Timesteps(t, torch.ones_like(t))


class _OwnGenerator(Plain):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def sample(self, x0: Tensor) -> ks.Timesteps:
        t = torch.rand(len(x0), generator=self.generator)
        return ks.Timesteps(t, torch.ones_like(t))


class _MirrorsWithinARank(Plain):
    def sample(self, x0: Tensor) -> ks.Timesteps:
        half = self.draws(x0[: (len(x0) + 1) // 2])
        t = torch.cat([half, 1 - half])[: len(x0)]
        return ks.Timesteps(t, torch.ones_like(t))


class _SameOnAllRanks(Plain):
    num_drawn: Tensor
    key: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.register_buffer("num_drawn", torch.tensor(0))
        self.register_buffer("key", torch.tensor(seed))

    def sample(self, x0: Tensor) -> ks.Timesteps:
        self.num_drawn += 1
        seed = 1000 * int(self.key) + int(self.num_drawn)
        t = torch.rand(len(x0), generator=torch.Generator().manual_seed(seed))
        return ks.Timesteps(t, torch.ones_like(t))


class _WrongDensity(Plain):
    def density(self, num_bins: int = 100) -> Tensor:
        mass = torch.arange(num_bins) + 1.0
        return mass / mass.sum()


class _NotSummingToOne(Plain):
    def density(self, num_bins: int = 100) -> Tensor:
        return torch.ones(num_bins)


class Learner(Plain):
    """Counts losses, with nothing wrong."""

    total: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.register_buffer("total", torch.tensor(0.0))

    @learns_from_step
    def observe(
        self, x0: Tensor, drawn: ks.Timesteps, losses: Tensor, loss_at: ks.LossAt | None = None
    ) -> Iterator[None]:
        """Add up what is finite."""
        yield
        self.total += torch.where(losses.isfinite(), losses, 0.0).sum()


class _TakesNaN(Learner):
    @learns_from_step
    def observe(
        self, x0: Tensor, drawn: ks.Timesteps, losses: Tensor, loss_at: ks.LossAt | None = None
    ) -> Iterator[None]:
        yield
        self.total += losses.sum()


class _AsksInSilence(Learner):
    @learns_from_step
    def observe(
        self, x0: Tensor, drawn: ks.Timesteps, losses: Tensor, loss_at: ks.LossAt | None = None
    ) -> Iterator[None]:
        assert loss_at is not None
        loss_at(torch.arange(2), torch.rand(2, generator=torch.Generator().manual_seed(0)))
        yield


class _ForgetsProbes(ks.LeastNoise):
    """Saves all but the probes of the sweep during which it is saved."""

    @classmethod
    def from_experiment(cls, experiment: SamplerContext, **options: Any) -> "_ForgetsProbes":
        made = cls(warmup=15, refresh=2, gate=1.0, seed=experiment.seed)
        made.log_ratios._non_persistent_buffers_set.update(made.log_ratios._buffers)
        return made


class _TakesAnyShape(Learner):
    def observe(self, *args: Any) -> Any:
        return torch.no_grad()


def test_a_sampler_that_keeps_the_contract_passes() -> None:
    check_sampler(Plain, unbiased=True)
    check_sampler(Learner)
    check_sampler(lambda experiment: Plain(experiment.seed), shape=(3, 8, 8))
    check_sampler(ks.FixedBeta, a=2.0, b=3.0)
    check_sampler(ks.Adaptive, every=10, policy="pair")  # options as they are written after --sampler.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_OneTime, r"t must have shape \(7,\), one per row, got \(1,\)"),
        (_OutOfRange, r"t must be in \[0, 1\], got .* to 1\."),
        (_NoWeight, "weights must be finite and above 0"),
        (_GlobalGenerator, "the same seed must give the same draws: draw by kairostep"),
        (_OwnGenerator, "loads a state_dict must go on bitwise, got other draws: keep whatever changes"),
        (_ForgetsProbes, "loads a state_dict must go on bitwise"),
        (_SameOnAllRanks, "two processes must draw different numbers: draw by"),
        (_MirrorsWithinARank, "two processes must draw what one draws for the whole batch, got another t: draw by"),
        (_WrongDensity, "density must be where the draws go"),
        (_NotSummingToOne, "density must sum to 1, got 10.0 with 10 bins"),
        (_TakesNaN, "a loss of nan must be skipped, got total with values that are not finite"),
        (_AsksInSilence, "a sampler that calls loss_at must say so: write uses_loss_at = True"),
        (_TakesAnyShape, r"observe must raise ValueError for losses of shape \(64, 4\)"),
        (lambda experiment: Plain(7), "another seed must give other draws"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(
    make: Callable[[SamplerContext], ks.TimestepSampler], message: str
) -> None:
    with pytest.raises(AssertionError, match=message) as raised:
        check_sampler(make)
    assert "\n" not in str(raised.value)


def test_weights_that_change_the_objective_are_found() -> None:
    with pytest.raises(AssertionError, match=r"weights must be 1/density, .* of weight \* t\*\*2 is 0.33"):
        check_sampler(ks.LogitNormal, unbiased=True)
    check_sampler(lambda e: ks.LogitNormal(unbiased=True, seed=e.seed), unbiased=True)
