"""Negative controls: densities of learned samplers dealt to other bins, as uneven as ever, in the wrong places.

Their objective is the same, since weights are 1/density of what is drawn. If one trains as fast as the sampler it
permutes, where that sampler draws is not why it is faster.
"""

from typing import Any

import torch
from torch import Tensor

from kairostep.timesteps import LeastNoise, RootLoss
from kairostep.timesteps.draw_table import TableSampler

ORDER_SEED = 0  # of the permutation, the same in all runs


class Permuted(TableSampler):
    """Permutes the bins of the sampler that follows it among the base classes, always in the same way."""

    order: Tensor  # (K,)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        order = torch.randperm(self.num_bins, generator=torch.Generator().manual_seed(ORDER_SEED))
        self.register_buffer("order", order, persistent=False)

    def learned_mass(self) -> Tensor:
        """Return what was learned, in other bins, (K,), summing to 1."""
        mass: Tensor = super().learned_mass()[self.order]  # type: ignore[misc]
        return mass


class PermutedRootLoss(Permuted, RootLoss):
    """Draws as unevenly as `RootLoss`."""


class PermutedLeastNoise(Permuted, LeastNoise):
    """Draws as unevenly as `LeastNoise`."""
