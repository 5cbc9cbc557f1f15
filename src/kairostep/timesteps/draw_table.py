"""A density that changes now and then and is drawn from at every step."""

from typing import Any

import torch
from torch import Tensor, nn

from kairostep.checks import count
from kairostep.timesteps.draws import Draws
from kairostep.timesteps.histogram import ABOVE_ZERO, BELOW_ONE, rebin
from kairostep.timesteps.sampler import Timesteps, TimestepSampler
from kairostep.timesteps.step_count import StepCount

LEAST_DENSITY = 2**-24  # over uniform's: a bin with less gets no draws, as float32 can hardly tell its two ends apart


class DrawTable(nn.Module):
    """Draws from K equal bins by a handful of kernels; starts uniform. The inverse CDF of every learned histogram.

    Args:
        num_bins: K.
        beta: Weights are 1/density to this power, scaled to a mean of 1 over the draws: 1 keeps the objective, 0
            weights all draws alike.
    """

    rows: Tensor  # (4, K): mass up to the end of the bin, t there, 1/density in the bin or 0, weight of its draws

    def __init__(self, num_bins: int, beta: float) -> None:
        super().__init__()
        count("num_bins", num_bins, at_most=10**6, example=20)
        self.beta = beta
        self.register_buffer("rows", torch.zeros(4, num_bins, dtype=torch.float32))
        self.set(self.rows.new_ones(num_bins))

    @torch.no_grad()
    def set(self, mass: Tensor) -> None:
        """Draw from this mass (K,) from now on, unless it is not finite."""
        num_bins = len(mass)
        flat = (mass == mass[0]).all()
        relative = torch.where(flat, 1.0, num_bins * mass / mass.sum())  # density over uniform's: exactly 1 where flat
        end = relative.cumsum(0)
        end = end / end[-1]  # exactly 1 at last, so that no u falls beyond
        end_t = torch.arange(1, num_bins + 1, dtype=mass.dtype, device=mass.device) / num_bins
        slope = torch.where(relative >= LEAST_DENSITY, 1 / relative, 0.0)
        weight = slope**self.beta
        rows = torch.stack([end, end_t, slope, weight / (relative * weight).mean()])
        self.rows.copy_(torch.where(rows.isfinite().all(), rows, self.rows))

    def mass(self) -> Tensor:
        """Return the mass of each bin (K,)."""
        slope = self.rows[2]
        return torch.where(slope > 0, 1 / (len(slope) * slope), 0.0)

    def draw(self, u: Tensor) -> Timesteps:
        """Return the times at the quantiles u (B,), and their weights."""
        rows = self.rows.to(u.dtype)
        index = torch.searchsorted(rows[0], u, right=True)
        end, end_t, slope, weight = rows.index_select(1, index).unbind()
        return Timesteps(torch.addcmul(end_t, slope, u - end).clamp(ABOVE_ZERO, BELOW_ONE), weight)


class TableSampler(TimestepSampler):
    """A sampler that draws from a table and changes it, in `observe`, as it learns."""

    def __init__(self, num_bins: int, *, beta: float, stratified: bool, seed: int) -> None:
        super().__init__()
        self.draws = Draws(seed, stratified=stratified)
        self.table, self.num_bins = DrawTable(num_bins, beta), num_bins
        self.steps, self.unbiased = StepCount(seed), beta == 1

    def mass(self) -> Tensor:
        """Return the mass of each bin (K,)."""
        return self.table.mass()

    def sample(self, x0: Tensor) -> Timesteps:
        """Return one time and one weight for each row of x0 (B, ...)."""
        drawn = self.table.draw(self.draws(x0))
        self._count_draw(x0)
        return drawn

    def density(self, num_bins: int = 100) -> Tensor:
        """Return where the draws go now: (num_bins,), summing to 1."""
        return rebin(self.mass(), num_bins)


def add_table(state: dict[str, Any], prefix: str, sampler: TableSampler, mass: Tensor) -> None:
    """Complete the state of a sampler that drew without a table in version 0.1: it holds the mass (K,) that it learned.

    Not all of them counted steps; those that need the count have it in their state.
    """
    sampler.table.set(mass)
    state[f"{prefix}table.rows"] = sampler.table.rows.clone()
    state.setdefault(f"{prefix}steps._extra_state", torch.tensor([0, sampler.steps.seed]))
