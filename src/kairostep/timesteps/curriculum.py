"""From one sampler to another over training."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Self

import torch
from torch import Tensor

from kairostep.checks import choice, count
from kairostep.counters import mix
from kairostep.registry import samplers
from kairostep.timesteps.adaptive import Adaptive
from kairostep.timesteps.context import SamplerContext
from kairostep.timesteps.draws import Draws
from kairostep.timesteps.noise import SAVINGS
from kairostep.timesteps.sampler import LossAt, Timesteps, TimestepSampler, learns_from_step


@samplers.register("curriculum")
class Curriculum(TimestepSampler):
    """Draws by one sampler first and by another later.

    arXiv 2603.12517 reports that a density which favours some times wins early and loses late, and goes from
    logit-normal to uniform. Each row has the time and the weight of one of the two samplers. Both see all losses.

    `start` and `end` count calls of `sample`: a step that accumulates several batches makes several.

    Args:
        first: Draws alone until `start`.
        then: Draws a growing share from `start` on, and alone from `end` on.
        start: Calls of `sample` with `first` alone.
        end: Calls of `sample` after which `then` draws alone.
        seed: Of the choice between the two.
    """

    num_drawn: Tensor  # () batches

    def __init__(self, first: TimestepSampler, then: TimestepSampler, *, start: int, end: int, seed: int = 0) -> None:
        super().__init__()
        count("start", start, at_least=0)
        count("end", end, at_least=start, example=10_000)
        for sampler in (first, then):
            if not isinstance(sampler, TimestepSampler):
                raise ValueError(
                    f"a curriculum must be of two samplers, got {sampler!r}: pass for instance ks.Uniform()"
                )
            if isinstance(sampler, Adaptive):
                raise ValueError(
                    "a curriculum must be of samplers that learn from any draw or none, got Adaptive, whose policy "
                    "learns from its own: pass for instance ks.RootLoss()"
                )
        self.uses_x0 = first.uses_x0 or then.uses_x0
        self.uses_loss_at = first.uses_loss_at or then.uses_loss_at
        self.num_bins = max(first.num_bins, then.num_bins)
        self.first, self.then, self.start, self.end = first, then, start, end
        self.draws = Draws(seed, stratified=True)
        self.draws.key.bitwise_not_()  # numbers of its own: which rows `then` draws must not depend on their times
        for _ in range(self.depth):  # nor on what curricula inside chose
            self.draws.key.copy_(mix(self.draws.key))
        self.register_buffer("num_drawn", torch.tensor(0))

    @classmethod
    def from_experiment(  # type: ignore[override]  # these options and no others
        cls, experiment: SamplerContext, *, start: int, end: int, first: str = "logit_normal", then: str = "uniform"
    ) -> Self:
        """Return a curriculum, over optimizer steps, of two samplers by name, with their default options."""
        made = [make_standalone(f"sampler.{key}", name, experiment) for key, name in (("first", first), ("then", then))]
        count("sampler.start", start, at_least=0)
        count("sampler.end", end, at_least=start, example=10_000)
        num = experiment.accumulate  # draws per step
        return cls(*made, start=start * num, end=end * num, seed=experiment.seed)

    @property
    def inner(self) -> tuple[TimestepSampler, ...]:
        """Both samplers, in their order."""
        return self.first, self.then

    @property
    def depth(self) -> int:
        """The length of the longest chain of curricula inside this one."""
        return max((1 + each.depth for each in self.inner if isinstance(each, Curriculum)), default=0)

    def share(self) -> Tensor:
        """Return the share of rows that `then` draws at the next step, ()."""
        rising = ((self.num_drawn - self.start).float() / max(1, self.end - self.start)).clamp(0, 1)
        return torch.where(self.num_drawn >= self.end, 1.0, rising)

    def sample(self, x0: Tensor) -> Timesteps:
        """Return one time and one weight for each row of x0 (B, ...)."""
        by_then = self.draws(x0) < self.share()
        first, then = self.first.sample(x0), self.then.sample(x0)
        self.num_drawn += 1
        return Timesteps(torch.where(by_then, then.t, first.t), torch.where(by_then, then.weight, first.weight))

    @learns_from_step
    def observe(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None) -> Iterator[None]:
        """Show the step to both."""
        with ExitStack() as stack:
            for sampler in self.inner:
                stack.enter_context(sampler.observe(x0, drawn, losses, loss_at))
            yield

    def show(self, x0: Tensor, drawn: Timesteps, losses: Tensor) -> None:
        """Show the micro-batch to both."""
        self.num_unshown = 0
        for sampler in self.inner:
            sampler.show(x0, drawn, losses)

    def density(self, num_bins: int = 100) -> Tensor:
        """Return where the draws of the next step go: (num_bins,), summing to 1."""
        return torch.lerp(self.first.density(num_bins), self.then.density(num_bins), self.share())

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the diagnostics of both. Probe evaluations are added up; skipped losses are the same for both.

        What draws save (`noise_savings`) is that of the sampler that draws alone: NaN while both do, or while it is one
        that does not learn.
        """
        first, then, share = self.first.diagnostics(), self.then.diagnostics(), self.share()
        probes = [own["probe_evaluations"] for own in (first, then) if "probe_evaluations" in own]
        spent = {"probe_evaluations": torch.stack(probes).sum()} if probes else {}
        unknown = torch.full_like(share, torch.nan)
        for key in {*SAVINGS} & {*first, *then}:
            by_then = torch.where(share == 1, then.get(key, unknown), unknown)
            spent[key] = torch.where(share == 0, first.get(key, unknown), by_then)
        return {**first, **then, **spent, "share_of_then": share}


def make_standalone(key: str, name: str, experiment: SamplerContext) -> TimestepSampler:
    """Return the sampler of a name with its default options, if it needs none and asks for no other losses."""
    if name not in samplers or not is_standalone(name):
        choice(key, name, filter(is_standalone, samplers.registered))
    sampler: TimestepSampler = samplers.find(name).from_experiment(experiment)
    return sampler


def is_standalone(name: str) -> bool:
    """Whether a sampler can be made of its name alone and does without the network."""
    required = [option for option in samplers.options_of(name).values() if option.required]
    return not required and not samplers.find(name).uses_loss_at
