"""Previews a training: density, weight and their product, over t and over log-SNR."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from kairostep.checks import count
from kairostep.diffusion import Objective
from kairostep.diffusion.weighting import LOG_SNR_LIMIT
from kairostep.timesteps import Curriculum, TimestepSampler
from kairostep.timesteps.histogram import bin_index, rebin

NUM_TIMES = 1000  # at which a continuous process is evaluated
NUM_DRAWS = 2**16  # from which the sampler's own weight is estimated


@dataclass(frozen=True, slots=True)
class Part:
    """An equal part of the range of t or of log-SNR. Shares are of the whole range."""

    start: float
    end: float
    log_snr: float  # in its middle
    draws: float  # share
    weight: float | None  # mean over its times, on the squared error of the prediction; None if it has no times
    product: float  # share of draws times weight: the share of the loss if the error were the same everywhere
    epsilon: float  # the same share, with weights on the squared error of the noise
    x0: float  # the same share, with weights on the squared error of x0


@dataclass(frozen=True, slots=True)
class Preview:
    """Density and weight at evenly spaced times, each (M,) in float64."""

    t: Tensor  # in the middle of each of M equal parts of [0, 1]
    log_snr: Tensor
    density: Tensor  # of draws, relative to uniform
    weight: Tensor  # on the squared error of the prediction, including the sampler's own weight
    epsilon_weight: Tensor  # the same on the squared error of the noise
    x0_weight: Tensor  # the same on the squared error of x0
    learns: bool  # whether the density changes during training; this is the one at its start

    @property
    def product(self) -> Tensor:
        """Density times weight with a mean of 1, (M,): how much each time counts in the expected loss."""
        product = self.density * self.weight
        return product / product.mean()

    def over_t(self, num_parts: int = 20) -> list[Part]:
        """Return the equal parts of [0, 1]."""
        edges = torch.linspace(0, 1, count("num_parts", num_parts, at_most=10**5, example=20) + 1, dtype=torch.float64)
        middle = self.log_snr[bin_index((edges[1:] + edges[:-1]) / 2, len(self.t))]

        def total(values: Tensor) -> Tensor:
            return rebin(values, num_parts) * values.sum()  # splits a time on the edge of two parts

        return self._parts(edges, middle, total)

    def over_log_snr(self, num_parts: int = 20) -> list[Part]:
        """Return the equal parts of the range of log-SNR, from noise to data."""
        low, high = self.log_snr.min(), self.log_snr.max()
        index = bin_index((self.log_snr - low) / (high - low), count("num_parts", num_parts, at_most=10**5, example=20))
        edges = torch.linspace(float(low), float(high), num_parts + 1, dtype=torch.float64)

        def total(values: Tensor) -> Tensor:
            return torch.zeros(num_parts, dtype=torch.float64).index_add_(0, index, values)

        return self._parts(edges, (edges[1:] + edges[:-1]) / 2, total)

    def per_log_snr(self, values: Tensor) -> Tensor:
        """Convert a density over t (M,) to one over log-SNR (M,)."""
        (slope,) = torch.gradient(self.log_snr, spacing=(self.t,))
        return values / slope.abs().clamp(min=1e-12)

    def _parts(self, edges: Tensor, middle: Tensor, total: Callable[[Tensor], Tensor]) -> list[Part]:
        """Return the parts with these edges (K + 1,) and log-SNR (K,). `total` sums values by part, (M,) -> (K,)."""
        num_times, weights = total(torch.ones_like(self.t)).tolist(), total(self.weight).tolist()
        shares = []
        for weight in (torch.ones_like(self.t), self.weight, self.epsilon_weight, self.x0_weight):
            summed = total(self.density * weight)
            shares.append((summed / summed.sum()).tolist())
        draws, product, epsilon, x0 = shares
        means = [weight / num if num else None for weight, num in zip(weights, num_times, strict=True)]
        ends = edges.tolist()
        rows = zip(ends[:-1], ends[1:], middle.tolist(), draws, means, product, epsilon, x0, strict=True)
        return [Part(*row) for row in rows]


@torch.no_grad()
def preview_of(objective: Objective, sampler: TimestepSampler, *, x0: Tensor | None = None) -> Preview:
    """Return the density of a sampler and its weight times the objective's. The sampler is not changed.

    Args:
        objective: Process, prediction and weighting.
        sampler: In its present state.
        x0: Rows (N, ...) to draw for. Default: many rows of one number each, which suits all samplers except those
            with a policy on x0.
    """
    num_times: int = getattr(objective.process, "num_steps", NUM_TIMES)
    t = (torch.arange(num_times, dtype=torch.float64) + 0.5) / num_times
    log_snr = objective.process.log_snr(t)
    within = log_snr.clamp(-LOG_SNR_LIMIT, LOG_SNR_LIMIT)
    device = next((buffer.device for buffer in sampler.buffers()), None)
    own = sampler_weight(sampler, torch.zeros(NUM_DRAWS, 1, device=device) if x0 is None else x0, num_times)
    weight = objective.weighting(log_snr, objective.prediction) * own
    x0_weight = weight * (-objective.prediction.log_x0_error(within)).exp()
    return Preview(
        t,
        within,
        sampler.density(num_times).double().cpu() * num_times,
        weight,
        x0_weight * (-within).exp(),
        x0_weight,
        learns=sampler.learns or isinstance(sampler, Curriculum),
    )


def sampler_weight(sampler: TimestepSampler, x0: Tensor, num_times: int) -> Tensor:
    """Return the mean weight of draws in each of `num_times` equal parts of [0, 1].

    A part without draws gets the weight of the nearest part with draws.
    """
    drawn = deepcopy(sampler).sample(x0)
    index = drawn.index(num_times).cpu()
    total, number = torch.zeros(2, num_times, dtype=torch.float64).unbind()
    total.index_add_(0, index, drawn.weight.double().cpu())
    number.index_add_(0, index, torch.ones(len(index), dtype=torch.float64))
    there = number.nonzero()[:, 0]  # (n,) parts with draws
    place = torch.searchsorted(there, torch.arange(num_times)).clamp(1, max(1, len(there) - 1))
    left, right = there[(place - 1).clamp(max=len(there) - 1)], there[place.clamp(max=len(there) - 1)]
    parts = torch.arange(num_times)
    nearest = torch.where((parts - left).abs() < (right - parts).abs(), left, right)
    mean: Tensor = total[nearest] / number[nearest]
    return mean
