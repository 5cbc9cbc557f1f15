"""The recurrence of root-loss sampling in plain numbers (FORMULAS, section 13)."""

import math

from torch import Tensor


class Reference:
    """The same recurrence, one bin and one number at a time."""

    def __init__(self, num_bins=20, decay=0.99, floor=0.1, *, warmup=40, refresh=10, gate=0.95) -> None:
        self.num_bins, self.decay, self.floor = num_bins, decay, floor
        self.warmup, self.refresh, self.gate = warmup, refresh, gate
        self.total, self.weight = [0.0] * num_bins, [0.0] * num_bins
        self.num_drawn, self.num_observed = [0] * num_bins, 0
        self.mass = [1 / num_bins] * num_bins

    def observe(self, t: Tensor, weighted_losses: Tensor) -> None:
        """Take in one batch and refresh the mass if it is time."""
        squares: list[list[float]] = [[] for _ in range(self.num_bins)]
        for time, loss in zip(t.tolist(), weighted_losses.tolist(), strict=True):
            if math.isfinite(loss):
                squares[math.floor(time * self.num_bins)].append(loss**2)
        self.num_observed += 1
        by_time = ((self.num_observed - 1) / self.num_observed) ** 3  # step j counts (j / n)**3 at step n
        for k, square in enumerate(squares):
            by_number = self.decay ** len(square)
            self.total[k] *= by_time * by_number
            self.weight[k] *= by_time * by_number
            if square:
                self.total[k] += (1 - by_number) * sum(square) / len(square)
                self.weight[k] += 1 - by_number
                self.num_drawn[k] += len(square)
        if self.num_observed >= self.warmup and self.num_observed % self.refresh == 0:
            self.mass = self.refreshed()

    def refreshed(self) -> list[float]:
        """Return the mass that the moments ask for."""
        known = {k: self.total[k] / self.weight[k] for k, num in enumerate(self.num_drawn) if num}
        root = [known.get(k, max(known.values())) ** 0.25 for k in range(self.num_bins)]
        q = [r / sum(root) for r in root]
        if 1 / (self.num_bins * sum(p**2 for p in q)) > self.gate:
            q = [1 / self.num_bins] * self.num_bins
        return [(1 - self.floor) * p + self.floor / self.num_bins for p in q]
