"""The variational bound on the log-likelihood of held-out data, in bits per dimension."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kairostep.checks import count
from kairostep.diffusion import DiscreteProcess, Objective
from kairostep.diffusion.conditions import class_condition
from kairostep.diffusion.process import Process
from kairostep.evaluation.estimate import Estimate, mean_and_error
from kairostep.evaluation.matched import matched_draws
from kairostep.shares import WHOLE, Share

PIXEL_LOG_SNR = math.log(1e4)  # where decoding to pixels begins in continuous time: as noisy as linear's step 0
GAUSSIAN_SHARE = 0.75  # of times that are drawn by what they would add for Gaussian data
NUM_TIMES = 10  # at which a row is seen
MAX_LOG_STEP = 10.0  # in log-SNR, that a single step counts for: the last one may be infinite


@dataclass(frozen=True, slots=True)
class Bound:
    """Upper bound on the negative log-likelihood in bits per dimension, with standard errors over images."""

    total: Estimate
    prior: Estimate
    diffusion: Estimate
    reconstruction: Estimate
    per_image: Tensor  # (N,), the total: subtract those of two models to compare them
    num_evaluations: int


@torch.no_grad()
def variational_bound(
    model: Callable[..., Any],
    objective: Objective,  # its process and prediction
    x0: Tensor,  # (N, ...)
    *,
    labels: Tensor | None = None,  # (N,)
    levels: int | None = 256,  # of pixels in [-1, 1]; None: x0 is continuous and the bound one on its density
    num_times: int = NUM_TIMES,  # network evaluations per row, and one more
    seed: int = 0,
    batch_size: int = 256,
    share: Share = WHOLE,  # of the batches, where several processes call this with equal arguments
) -> Bound:
    """Return the bound of Ho et al. 2020 with the posterior's variances, as Kingma et al. 2021 write it.

    The bound is the sum of three parts:

    - prior: KL of x_t at the last step from N(0, alpha**2 + sigma**2).
    - diffusion: the sum of (SNR(s) - SNR(t)) / 2 |x0 - x0hat|**2 over neighbouring steps s < t. In continuous time it
      is the limit of this sum, and FlowProcess keeps 1e-4 away from both ends. Times are drawn mostly by what each
      would add for Gaussian data, so that the error is right even if a few steps hold most of the bound.
    - reconstruction: -log of a Gaussian around x0hat at the first step, of variance 1 / SNR, over the bin of each
      pixel. In continuous time a pixel is decoded from SNR = 1e4.

    With levels, x0hat is clipped to [-1, 1]. Calls with equal arguments share noise and times.
    """
    count("num_times", num_times)
    _check(x0, levels)
    first, last = _ends(objective, levels)
    denoiser = _Denoiser(model, objective, x0, labels, levels is not None, batch_size, share)
    prior = _prior(objective.process, x0, last)
    diffusion = _diffusion(denoiser, first, last, num_times, seed)
    reconstruction = _reconstruction(denoiser, first, levels, seed)
    total = prior + diffusion + reconstruction
    return Bound(
        total=Estimate(*mean_and_error(total)),
        prior=Estimate(*mean_and_error(prior)),
        diffusion=Estimate(*mean_and_error(diffusion)),
        reconstruction=Estimate(*mean_and_error(reconstruction)),
        per_image=total,
        num_evaluations=len(x0) * (num_times + 1),
    )


@dataclass(frozen=True, slots=True)
class _Denoiser:
    model: Callable[..., Any]
    objective: Objective
    x0: Tensor  # (N, ...)
    labels: Tensor | None  # (N,)
    clip: bool
    batch_size: int
    share: Share

    def estimates(self, t: Tensor, noise: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows (B,) and the estimates of their x0 (B, ...) from x_t, at t (N,) with noise (N, ...)."""
        for batch in self.share.batches(len(self.x0), self.batch_size):
            rows = torch.arange(batch.start, batch.stop, device=self.x0.device)
            at = self.objective.process.at(t[rows].to(self.x0.dtype))
            alpha, sigma = (self._broadcast(factor) for factor in (at.alpha, at.sigma))
            xt = alpha * self.x0[rows] + sigma * noise[rows]
            seen = xt if at.input_scale is None else self._broadcast(at.input_scale) * xt
            returned = self.model(seen, at.time, **class_condition(self.labels, rows))
            output: Tensor = returned[0] if isinstance(returned, tuple) else getattr(returned, "sample", returned)
            x0hat = self.objective.prediction.to_x0(output.to(xt.dtype), xt, alpha, sigma)
            yield rows, x0hat.clamp(-1, 1) if self.clip else x0hat

    def _broadcast(self, factor: Tensor) -> Tensor:
        return factor.to(self.x0.dtype).view(-1, *[1] * (self.x0.ndim - 1))


def _prior(process: Process, x0: Tensor, last: Tensor) -> Tensor:
    """Return KL(q(x_last | x0) || N(0, alpha**2 + sigma**2)) in bits per dimension, (N,)."""
    alpha, sigma = float(process.alpha(last)), float(process.sigma(last))
    variance = alpha**2 + sigma**2
    squares = _mean(x0.square())
    nats = (sigma**2 + alpha**2 * squares) / (2 * variance) - 0.5 - math.log(sigma / math.sqrt(variance))
    return nats / math.log(2)


def _diffusion(denoiser: _Denoiser, first: Tensor, last: Tensor, num_times: int, seed: int) -> Tensor:
    """Return the sum over the steps in bits per dimension, (N,)."""
    x0 = denoiser.x0
    bits = torch.zeros(len(x0), dtype=torch.float64, device=x0.device)
    for draw in matched_draws(x0, num_times, seed):
        times = _times(denoiser.objective.process, draw.u, first, last)
        for rows, x0hat in denoiser.estimates(times.t, draw.noise):
            bits[rows] += _mean((x0[rows] - x0hat).square()) * times.weight[rows] / (num_times * math.log(2))
    return denoiser.share.sum(bits)


def _reconstruction(denoiser: _Denoiser, first: Tensor, levels: int | None, seed: int) -> Tensor:
    """Return the bits per dimension that decoding x0 from the first step takes, (N,)."""
    x0 = denoiser.x0
    bits = torch.zeros(len(x0), dtype=torch.float64, device=x0.device)
    std = math.exp(-float(denoiser.objective.process.log_snr(first)) / 2)
    (draw,) = matched_draws(x0, 1, seed, stream=1)
    for rows, x0hat in denoiser.estimates(first.to(x0.device).expand(len(x0)), draw.noise):
        bits[rows] = -_mean(log_decoder(x0[rows].double(), x0hat.double(), std, levels)) / math.log(2)
    return denoiser.share.sum(bits)


def log_decoder(x: Tensor, mean: Tensor, std: float, levels: int | None) -> Tensor:
    """Return the log-probability of pixels x in [-1, 1] under a Gaussian, each level having the bin around it.

    The outermost bins are open. Without levels it is the log-density. All in the dtype of x, best float64.
    """
    if levels is None:
        return -((x - mean) / std).square() / 2 - math.log(std * math.sqrt(2 * math.pi))
    half = 1 / (levels - 1)
    above = torch.where(x > 1 - half, math.inf, (x + half - mean) / std)
    below = torch.where(x < half - 1, -math.inf, (x - half - mean) / std)
    mirrored = below > 0  # far out on the right: take the left tail instead, which does not round to 1
    high, low = torch.where(mirrored, -below, above), torch.where(mirrored, -above, below)
    log_high, log_low = torch.special.log_ndtr(high), torch.special.log_ndtr(low)
    logs: Tensor = log_high + torch.log1p(-(log_low - log_high).exp())
    return logs


@dataclass(frozen=True, slots=True)
class _Times:
    t: Tensor  # (N,)
    weight: Tensor  # (N,): the mean of weight * |x0 - x0hat|**2 is the diffusion term


def _times(process: Process, u: Tensor, first: Tensor, last: Tensor) -> _Times:
    """Return times for u (N,) in [0, 1], drawn from a mixture of two densities.

    Most times follow what a step adds for Gaussian data, (SNR(s) - SNR(t)) / (1 + SNR(t)). The others are even in
    log-SNR, and find errors at high noise that Gaussian data would not have.
    """
    if isinstance(process, DiscreteProcess):
        return _steps(process, u)
    high, low = (float(process.log_snr(end)) for end in (first, last))
    top, bottom = (F.softplus(torch.tensor(end, dtype=torch.float64)).item() for end in (high, low))
    y = top - u / GAUSSIAN_SHARE * (top - bottom)
    even = high - (u - GAUSSIAN_SHARE) / (1 - GAUSSIAN_SHARE) * (high - low)
    log_snr = torch.where(u < GAUSSIAN_SHARE, y + torch.log(-torch.expm1(-y)), even)  # the inverse of softplus
    density = GAUSSIAN_SHARE * log_snr.sigmoid() / (top - bottom) + (1 - GAUSSIAN_SHARE) / (high - low)
    return _Times(process.t_at(log_snr), log_snr.exp() / 2 / density)


def _steps(process: DiscreteProcess, u: Tensor) -> _Times:
    """Return the same for steps 1 to T - 1."""
    middle = (torch.arange(process.num_steps, dtype=torch.float64, device=u.device) + 0.5) / process.num_steps
    log_snr = process.log_snr(middle)  # (T,)
    gap = (log_snr.exp()[:-1] - log_snr.exp()[1:]) / 2  # (T - 1,)
    gaussian, even = gap / (1 + log_snr.exp()[1:]), (log_snr[:-1] - log_snr[1:]).clamp(max=MAX_LOG_STEP)
    density = GAUSSIAN_SHARE * gaussian / gaussian.sum() + (1 - GAUSSIAN_SHARE) * even / even.sum()
    drawn = torch.searchsorted(density.cumsum(0), u, right=True).clamp(max=len(density) - 1)
    return _Times(middle[1 + drawn], (gap / density)[drawn])


def _ends(objective: Objective, levels: int | None) -> tuple[Tensor, Tensor]:
    """Return the first and the last t (1,), float64, of the bound."""
    process = objective.process
    steps = process.num_steps if isinstance(process, DiscreteProcess) else None
    margin = 0.5 / steps if steps else float(getattr(process, "END", 0.0))  # nearer, a flow's bound diverges
    first, last = torch.tensor([[margin], [1 - margin]], dtype=torch.float64)
    if levels is not None and not steps:
        first = process.t_at(process.log_snr(first).clamp(max=PIXEL_LOG_SNR))
    if not bool(objective.prediction.log_x0_error(process.log_snr(last)).isfinite()):
        raise ValueError(
            f"x0 must follow from the prediction at every step, but {type(objective.prediction).__name__} says nothing "
            "of it at zero SNR: use a process whose last beta is below 1, or predict v or x0"
        )
    return first, last


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1).double()


def _check(x0: Tensor, levels: int | None) -> None:
    if levels is not None and count("levels", levels, at_least=2) and float(x0.abs().max()) > 1 + 1e-6:
        raise ValueError(
            f"x0 must be pixels in [-1, 1] where they have {levels} levels, got up to {float(x0.abs().max()):.3g}: "
            "scale them, or pass levels=None for a bound on the density"
        )
