"""Densities on [0, 1] as the mass of K equal bins: what every sampler here but the policy draws from."""

import torch
from torch import Tensor

BELOW_ONE = 1 - 2**-24  # the largest float32 under 1: a foreign loop's (t * T).long() stays under T
ABOVE_ZERO = 2**-25  # the least t that is drawn: at 0 there may be no noise at all, and an infinite weight


def bin_index(t: Tensor, num_bins: int) -> Tensor:
    """Return the equal bin each t in [0, 1] falls into: int64 in 0..num_bins-1."""
    return (t * num_bins).floor().long().clamp(0, num_bins - 1)  # bfloat16 has no 999: 1000 bins need whole numbers


def quantile(mass: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return t (B,) with a share u (B,) of the mass (K,) below it, and its bin (B,), density being flat in a bin.

    For densities that never change. Those that are learned draw by `DrawTable`, which holds the division and the sums.
    """
    share = mass.to(u.dtype) / mass.sum()
    below_end = share.cumsum(0)  # (K,)
    below_end = below_end / below_end[-1]  # exactly 1 at last, so that no u falls beyond
    index = torch.searchsorted(below_end, u, right=True).clamp(max=len(share) - 1)  # never a bin without mass
    from_end = ((below_end[index] - u) / share[index]).clamp(0, 1)
    return ((index + 1 - from_end) / len(share)).clamp(ABOVE_ZERO, BELOW_ONE), index


def rebin(mass: Tensor, num_bins: int) -> Tensor:
    """Return the same density as the mass of another number of bins, summing to 1: (K,) -> (num_bins,)."""
    edges = torch.nn.functional.pad(mass.cumsum(0) / mass.sum(), (1, 0))  # (K+1,)
    position = torch.linspace(0, mass.shape[0], num_bins + 1, dtype=mass.dtype, device=mass.device)
    index = position.floor().clamp(max=mass.shape[0] - 1).long()
    return torch.lerp(edges[index], edges[index + 1], position - index).diff()


def with_floor(mass: Tensor, floor: float) -> Tensor:
    """Return the normalised mass with a share `floor` of it spread evenly: no density under `floor` times uniform."""
    return (1 - floor) * mass / mass.sum() + floor / mass.shape[0]
