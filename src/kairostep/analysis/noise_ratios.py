"""Noise ratios with standard errors, from the squared sizes of single-row gradients.

All bins share rows, so rows are left out of all bins together: in parts, to bound the time that many rows take.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kairostep.timesteps.noise import least_noise_density, noise_ratio

MAX_PARTS = 16  # that rows are split into
FEWEST_ROWS = 4  # of a bin, for an error of the least ratio


@dataclass(frozen=True, slots=True)
class NoiseRatio:
    """The gradient noise of a density over that of uniform draws, with its standard error over rows."""

    value: float
    error: float  # of the least ratio: NaN with fewer than `FEWEST_ROWS` rows

    @property
    def equivalent_batch(self) -> float:
        """The factor by which a batch of uniform draws must grow to have as little noise."""
        return 1 / self.value


@dataclass(frozen=True, slots=True)
class LeastRatio:
    """The noise ratio of the least noisy density, which is learned from the rows that measure it."""

    ratio: NoiseRatio  # between the two below, nearly unbiased
    same_rows: float  # measured on the rows that the density is learned from: on average too low
    other_rows: float  # each part of the rows measures the density learned from the others: on average too high


def ratio_of(density: Tensor, squared: Tensor) -> NoiseRatio:
    """Return the noise ratio of a density that does not depend on these gradients.

    Args:
        density: Mass of equal bins of t.
        squared: Squared size of each row's gradient in each bin, (K, R).
    """

    def estimate(parts: Tensor) -> float:
        return float(noise_ratio(density, parts.sum(0)))

    parts = _sums_of_parts(squared)
    return NoiseRatio(estimate(parts), _jackknife_error(estimate, parts))


def least_ratio(squared: Tensor, learned_from: Tensor) -> LeastRatio:
    """Return the noise ratio of the least noisy density, without the optimism of measuring what was fitted.

    The density of R rows is about c/R too good on the rows themselves and c/R too bad on others, as an expansion in the
    error of the moments shows. In the mean of the two, weighted by the rows they learn from, this error cancels if both
    metrics are the same.

    Args:
        squared: Squared size of each row's gradient in each bin, (K, R), in the metric of the ratio.
        learned_from: The same in the metric in which the density is the least noisy one, (K, R).
    """

    def estimate(parts: Tensor) -> float:
        weight = len(parts) / (2 * len(parts) - 1)
        return weight * _ratio_on_same_rows(parts) + (1 - weight) * _ratio_on_other_rows(parts)

    parts = torch.stack([_sums_of_parts(squared), _sums_of_parts(learned_from)], dim=1)  # (G, 2, K)
    error = _jackknife_error(estimate, parts) if squared.shape[1] >= FEWEST_ROWS else math.nan
    ratio = NoiseRatio(estimate(parts), error)
    return LeastRatio(ratio, _ratio_on_same_rows(parts), _ratio_on_other_rows(parts))


def _ratio_on_same_rows(parts: Tensor) -> float:
    squared, learned_from = parts.sum(0)
    return float(noise_ratio(least_noise_density(learned_from), squared))


def _ratio_on_other_rows(parts: Tensor) -> float:
    squared, learned_from = parts.unbind(1)  # (G, K) each
    others = (1 - torch.eye(len(parts)).to(parts)) @ learned_from  # (G, K)
    others = others.where(others > 0, learned_from.sum(0))  # bins with gradients in one part only: finite noise
    density = others.sqrt() / others.sqrt().sum(1, keepdim=True)
    noise = (squared / density).where(squared > 0, 0.0)
    return float(noise.sum() / (squared.shape[1] * squared.sum()))


def _sums_of_parts(squared: Tensor) -> Tensor:
    """Return the sums over each of up to `MAX_PARTS` parts of the rows, (G, K)."""
    parts = squared.tensor_split(min(MAX_PARTS, squared.shape[1]), dim=1)
    return torch.stack([part.sum(1) for part in parts])


def _jackknife_error(estimate: Callable[[Tensor], float], parts: Tensor) -> float:
    """Return the standard error of an estimate from parts (G, ...), by leaving each out in turn."""
    num = len(parts)
    without = [estimate(parts[torch.arange(num) != part]) for part in range(num)]
    return float(((num - 1) * torch.tensor(without, dtype=torch.float64).var(correction=0)).sqrt())
