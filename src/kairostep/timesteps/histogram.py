"""Densities on [0, 1] as the mass of K equal bins: what every sampler here but the policy draws from."""

import torch
from torch import Tensor

BELOW_ONE = 1 - 2**-24  # the largest float32 under 1: a foreign loop's (t * T).long() stays under T


def bin_index(t: Tensor, num_bins: int) -> Tensor:
    """Return the equal bin each t in [0, 1] falls into: int64 in 0..num_bins-1."""
    return (t * num_bins).floor().clamp(0, num_bins - 1).long()


def cumulative(mass: Tensor) -> Tensor:
    """Return the share of mass left of each bin edge: (K,) -> (K+1,), from 0 to exactly 1."""
    right = mass.cumsum(0)
    return torch.cat([right.new_zeros(1), right / right[-1]])


def quantile(mass: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return t (B,) with cumulative(t) = u and the bin it lies in (B,), the density being flat inside a bin."""
    num_bins = mass.shape[0]
    edges = cumulative(mass.to(u.dtype))
    index = torch.searchsorted(edges[1:], u, right=True).clamp(max=num_bins - 1)  # never a bin without mass
    left, right = edges[index], edges[index + 1]
    t = (index + (u - left) / (right - left)) / num_bins
    return t.clamp(max=BELOW_ONE), index


def rebin(mass: Tensor, num_bins: int) -> Tensor:
    """Return the same density as the mass of another number of bins, summing to 1: (K,) -> (num_bins,)."""
    edges = cumulative(mass)
    position = torch.linspace(0, mass.shape[0], num_bins + 1, dtype=mass.dtype, device=mass.device)
    index = position.floor().clamp(max=mass.shape[0] - 1).long()
    return torch.lerp(edges[index], edges[index + 1], position - index).diff()


def with_floor(mass: Tensor, floor: float) -> Tensor:
    """Return the normalised mass with a share `floor` of it spread evenly: no density under `floor` times uniform."""
    return (1 - floor) * mass / mass.sum() + floor / mass.shape[0]
