"""What was seen lately, by bin of t."""

import torch
from torch import Tensor, nn

from kairostep.timesteps.arguments import below_one, count
from kairostep.timesteps.distributed import sum_over_ranks
from kairostep.timesteps.histogram import bin_index
from kairostep.timesteps.sampler import LARGEST


class BinMeans(nn.Module):
    """The running mean of values**power in each of K equal bins of t, over all ranks.

    m <- d**n m + (1 - d**n) mean, n being how many of a batch's values fall into the bin: what is seen often fades by
    the number of values, not of steps. Values that are not finite are skipped and counted.
    """

    mean: Tensor  # (K,) starting at 0: read it by `read`
    num_seen: Tensor  # (K+1,) values of each bin, at last those skipped

    def __init__(self, num_bins: int, decay: float, power: int = 1) -> None:
        super().__init__()
        self.decay, self.power = below_one("decay", decay), power
        self.register_buffer("mean", torch.zeros(count("num_bins", num_bins), dtype=torch.float32))
        self.register_buffer("num_seen", torch.zeros(num_bins + 1, dtype=torch.int64))

    @property
    def num_skipped(self) -> Tensor:
        """How many values were not finite."""
        return self.num_seen[-1]

    @torch.no_grad()
    def add(self, t: Tensor, values: Tensor) -> None:
        """Take in one value (B,) for each t (B,), as if the batches of all ranks were one."""
        num_bins, values = len(self.mean), values.float()
        finite = values.abs() < LARGEST
        index = torch.where(finite, bin_index(t, num_bins), num_bins)
        new = values.new_zeros(2, num_bins + 1)
        new[0].index_add_(0, index, torch.where(finite, values, 0.0) ** self.power)
        new[1].index_add_(0, index, torch.ones_like(values))
        total, num_new = sum_over_ranks(new).unbind()
        mean, keep = total[:-1] / num_new[:-1].clamp(min=1), self.decay ** num_new[:-1]
        self.mean.copy_(torch.lerp(mean, self.mean, keep))
        self.num_seen += num_new.long()

    def read(self) -> Tensor:
        """Return the means (K,) without the pull of their start at 0; a bin never seen has the largest of all."""
        share_seen = 1 - self.decay ** self.num_seen[:-1].float()  # 0 where nothing was
        seen = share_seen > 0
        mean = torch.where(seen, self.mean / share_seen.clamp(min=1e-30), 0.0)
        return torch.where(seen, mean, mean.max())
