"""Draws by the root of the loss: the free way to less gradient noise."""

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from kairostep.checks import count, function_of_t, positive_share, share
from kairostep.ranks import world_size
from kairostep.registry import samplers
from kairostep.timesteps.bin_means import BinMeans
from kairostep.timesteps.context import SamplerContext
from kairostep.timesteps.draw_table import TableSampler
from kairostep.timesteps.histogram import with_floor
from kairostep.timesteps.noise import noise_savings
from kairostep.timesteps.sampler import LossAt, Timesteps, learns_from_step

FORGETTING = 3.0  # losses of step j count (j / n)**3 as much as those of step n


@samplers.register("root_loss")
class RootLoss(TableSampler):
    """Draws by the root of the loss: same objective, less gradient noise.

    The noise of the gradient is least if times are drawn in proportion to the size of a single sample's gradient. That
    size follows the residual, which is the root of the squared error. Draws are weighted by 1/density, which keeps the
    objective. There are no extra network evaluations. density / uniform stays between `floor` and
    (1 - floor) num_bins + floor, so no weight exceeds 1/floor.

    Args:
        num_bins: Equal bins of [0, 1] in which losses are averaged.
        decay: Of the running mean square of the losses, per loss in a bin. In addition, losses of step j count
            (j / n)**3 as much as those of step n: the large losses of the first steps fade at any batch size.
        floor: Share of draws that stay uniform.
        loss_weight: The function of t that the losses were multiplied by (`objective.weight`). Draws then follow the
            weight times the root of the bare loss. None if the losses are unweighted.
        warmup: Steps with uniform draws at the start.
        refresh: Steps between changes of the density.
        gate: Draw uniformly while the density's effective share of bins, 1 / (K sum q**2), exceeds it.
        stratified: Draw one time in each of N equal parts of the distribution, N being the batch over all ranks.
        seed: Of the draws.
    """

    def __init__(
        self,
        num_bins: int = 20,
        decay: float = 0.99,
        floor: float = 0.1,
        *,
        loss_weight: Callable[[Tensor], Tensor] | None = None,
        warmup: int = 40,
        refresh: int = 10,
        gate: float = 0.95,
        stratified: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(num_bins, beta=1.0, stratified=stratified, seed=seed)
        self.floor = positive_share("floor", floor)
        self.loss_weight = (
            None if loss_weight is None else function_of_t("loss_weight", loss_weight, "objective.weight")
        )
        self.warmup = count("warmup", warmup, at_least=0, example=100)
        self.refresh = count("refresh", refresh)
        self.gate = share("gate", gate)
        self.squares = BinMeans(num_bins, decay, power=2)
        self.num_shown = 0  # rows of the last step, over all ranks

    @classmethod
    def from_experiment(cls, experiment: SamplerContext, **options: Any) -> Self:
        """Return the sampler for the loss that is trained."""
        return cls(loss_weight=experiment.loss_weight(), seed=experiment.seed, **options)

    @learns_from_step
    def observe(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None) -> Iterator[None]:
        """Record the losses of all ranks."""
        yield
        self.record(drawn.t, losses)

    @torch.no_grad()
    def record(self, t: Tensor, losses: Tensor) -> None:
        """Take in the losses (B,) at t (B,), and change the density if it is time."""
        num_steps = self.steps.advance()
        self.num_shown = len(t) * world_size()
        keep = (1 - 1 / num_steps) ** FORGETTING
        self.squares.add(t, losses if self.loss_weight is None else losses * self.loss_weight(t), keep)
        if num_steps >= self.warmup and num_steps % self.refresh == 0:
            self.table.set(with_floor(self.learned_mass(), self.floor))

    def learned_mass(self) -> Tensor:
        """Return what the losses ask for, (K,), summing to 1."""
        root = self.squares.read().clamp(min=1e-36).pow(0.25)  # with no loss at all, uniform
        return gated(root / root.sum(), self.gate)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return what the draws save, as the losses predict it (`noise_savings`), and how many losses were skipped."""
        warming_up = not self.steps.refreshed_since(self.warmup, self.refresh)
        savings = noise_savings(self.mass(), loss_moments(self.squares), self.num_shown, warming_up=warming_up)
        return {**savings, "skipped_losses": self.squares.num_skipped}


def loss_moments(squares: BinMeans) -> Tensor:
    """Return what losses tell of the second moment of gradients, (K,): their root mean square in each bin.

    The gradient of a squared error goes with the residual, so that its square goes with the loss.
    """
    return squares.read().clamp(min=1e-36).sqrt()  # with no loss at all, the same in all bins


def gated(mass: Tensor, gate: float) -> Tensor:
    """Return the mass (K,), which sums to 1, or uniform where its effective share of bins is above the gate."""
    is_flat = 1 / (len(mass) * mass.square().sum()) > gate
    return torch.where(is_flat, 1 / len(mass), mass)
