"""A negative control: the density of `LeastNoise` dealt to other bins, as uneven as ever, in the wrong places.

Its objective is the same, since weights are 1/density of what is drawn. If it trains as fast as `LeastNoise`, where
`LeastNoise` draws is not why that is faster.
"""

from typing import Any

import torch
from torch import Tensor

from kairostep.timesteps import LeastNoise

ORDER_SEED = 0  # of the permutation, the same in all runs


class PermutedLeastNoise(LeastNoise):
    """Draws as unevenly as `LeastNoise`, by a permutation of its bins that never changes."""

    order: Tensor  # (K,)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        order = torch.randperm(self.num_bins, generator=torch.Generator().manual_seed(ORDER_SEED))
        self.register_buffer("order", order, persistent=False)

    def learned_mass(self) -> Tensor:
        """Return what the gradients ask for in other bins, (K,), summing to 1."""
        return super().learned_mass()[self.order]
