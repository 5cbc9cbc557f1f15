"""Running means of recent values by bin of t."""

from typing import Any

import torch
from torch import Tensor, nn

from kairostep.checks import below_one, count
from kairostep.ranks import sum_over_ranks
from kairostep.timesteps.histogram import bin_index
from kairostep.timesteps.sampler import LARGEST


class BinMeans(nn.Module):
    """The running mean of values**power in each of K equal bins of t, over all ranks.

    The n values that a batch has in a bin move its mean by 1 - decay**n: a bin forgets by the number of its values, not
    by steps. Where few values fall into each bin, that is slow; `keep` of `add` forgets by steps as well. Values that
    are not finite are skipped and counted.
    """

    total: Tensor  # (K,) weighted sum of what was seen, its weights being those of `weight`
    weight: Tensor  # (K,) of what was seen, in [0, 1]: 0 where nothing was
    num_seen: Tensor  # (K+1,) values of each bin, at last those skipped

    def __init__(self, num_bins: int, decay: float, power: int = 1) -> None:
        super().__init__()
        self.decay, self.power = below_one("decay", decay, example=0.99), power
        count("num_bins", num_bins, at_most=10**6, example=20)
        self.register_buffer("total", torch.zeros(num_bins, dtype=torch.float32))
        self.register_buffer("weight", torch.zeros(num_bins, dtype=torch.float32))
        self.register_buffer("num_seen", torch.zeros(num_bins + 1, dtype=torch.int64))

    @property
    def num_skipped(self) -> Tensor:
        """How many values were not finite."""
        return self.num_seen[-1]

    @torch.no_grad()
    def add(self, t: Tensor, values: Tensor, keep: float = 1.0) -> None:
        """Add one value (B,) for each t (B,), as if the batches of all ranks were one.

        Args:
            t: Times of the values.
            values: The values at these times.
            keep: Factor on the weight of all earlier values, in addition to `decay`.
        """
        self.merge(sum_over_ranks(self.sums(t, values)), keep)

    @torch.no_grad()
    def sums(self, t: Tensor, values: Tensor) -> Tensor:
        """Return sum and number of this rank's values (B,) in each bin, (2, K+1), at last those skipped."""
        num_bins, values = len(self.total), values.float()
        finite = values.abs() < LARGEST
        index = torch.where(finite, bin_index(t, num_bins), num_bins)
        new = values.new_zeros(2, num_bins + 1)
        new[0].index_add_(0, index, torch.where(finite, values, 0.0) ** self.power)
        new[1].index_add_(0, index, torch.ones_like(values))
        return new

    @torch.no_grad()
    def merge(self, sums: Tensor, keep: float = 1.0) -> None:
        """Add what the `sums` of all ranks add up to, (2, K+1); `keep` as in `add`."""
        total, num_new = sums.unbind()
        mean, decay = total[:-1] / num_new[:-1].clamp(min=1), self.decay ** num_new[:-1]  # (K,)
        self.total.copy_(torch.lerp(mean, keep * self.total, decay))
        self.weight.copy_(torch.lerp(torch.ones_like(decay), keep * self.weight, decay))
        self.num_seen += num_new.long()

    def read(self) -> Tensor:
        """Return the means (K,); a bin never seen has the largest of all."""
        seen = self.num_seen[:-1] > 0
        mean = torch.where(seen, self.total / self.weight.clamp(min=1e-30), 0.0)
        return torch.where(seen, mean, mean.max())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Read states of version 0.1 too, which had no weights: they followed from the number of values."""
        if f"{prefix}mean" in state_dict:
            state_dict[f"{prefix}total"] = state_dict.pop(f"{prefix}mean")
            state_dict[f"{prefix}weight"] = 1 - self.decay ** state_dict[f"{prefix}num_seen"][:-1].float()
        super()._load_from_state_dict(state_dict, prefix, *args)
