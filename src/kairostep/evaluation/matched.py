"""Noise and times of held-out rows: a function of the seed alone, so that runs can be compared in pairs."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MatchedDraw:
    """One time and one noise for each row."""

    u: Tensor  # (N,) float64 in (0, 1): one in each of N equal shares of this draw's part, dealt at random
    noise: Tensor  # (N, ...) standard normal


def matched_draws(x0: Tensor, num_parts: int, seed: int, stream: int = 0) -> Iterator[MatchedDraw]:
    """Yield a draw for each of the equal parts of [0, 1], all rows (N, ...) in each; streams 0 and 1 are independent.

    Each row is seen once in every part, and the rows of a part are stratified within it. So the mean over the parts of
    one row is an estimate by itself. Rows are independent but for the strata, which only make the mean better.
    """
    generator = torch.Generator().manual_seed(2 * seed + stream)
    for part in range(num_parts):
        noise = torch.randn(x0.shape, generator=generator).to(x0)
        shares = torch.randperm(len(x0), generator=generator)
        within = (shares + torch.rand(len(x0), generator=generator, dtype=torch.float64)) / len(x0)
        yield MatchedDraw(((part + within) / num_parts).to(x0.device), noise)
