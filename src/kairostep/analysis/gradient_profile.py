"""The variance of a stochastic gradient at each time: Figures 2 and 6 of Kim et al. (CVPR 2025)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kairostep.analysis.rows import Rows
from kairostep.checks import count
from kairostep.diffusion import Objective, constant, vlb
from kairostep.evaluation.estimate import Estimate, mean_and_error
from kairostep.timesteps.gradient_size import gradients_of
from kairostep.timesteps.probes import eval_mode

EARLY, LATE = 0.2, 0.8  # the paper's early range is [0, 200] of 1000 (its Figure 4); the late range is as wide
TIMES = tuple((k + 0.5) / 20 for k in range(20))
NUM_RESAMPLES = 4000

T = TypeVar("T")
Track = Callable[[Sequence[T]], Iterable[T]]
"""Iterates over a sequence and may show its progress, as `tqdm` does."""


@dataclass(frozen=True, slots=True)
class VarianceRatio:
    """A ratio with its 95 % interval, from resampled pairs of gradients."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class VarianceAt:
    """The variance of a single row's gradient, at one time."""

    t: float
    log_snr: float
    vlb_weight: float  # c_t in L_VLB = c_t L_simple
    loss: Estimate  # L_simple: squared error of the prediction, per element
    variance: Estimate  # trace of the covariance of its gradient over x0 and noise
    signal: Estimate  # squared norm of the mean gradient
    vlb_loss: Estimate  # c_t L_simple
    vlb_variance: Estimate  # c_t**2 times the variance


@dataclass(frozen=True, slots=True)
class VarianceProfile:
    """The variance at several times, from the same rows and noise at each."""

    at: list[VarianceAt]  # sorted by t
    per_pair: Tensor  # (num_pairs, K) independent estimates of the variance of L_simple's gradient
    num_evaluations: int  # of the network, each with its backward pass

    def early_to_late(self, *, bound: bool = False) -> VarianceRatio:
        """Return the mean variance at t < 0.2 over that at t >= 0.8, for L_simple, or for L_VLB if `bound`."""
        t, weight = (torch.tensor([getattr(at, key) for at in self.at]).double() for key in ("t", "vlb_weight"))
        values = self.per_pair * weight.square() if bound else self.per_pair
        early, late = values[:, t < EARLY].mean(1), values[:, t >= LATE].mean(1)  # (num_pairs,)
        return bootstrapped_ratio(early, late)


def variance_profile(
    model: nn.Module,
    objective: Objective,
    rows: Rows,
    *,
    times: Sequence[float] = TIMES,
    num_pairs: int = 32,
    rows_per_gradient: int = 16,
    seed: int = 0,
    track: Track[float] = iter,
) -> VarianceProfile:
    """Return the variance of the gradient at these times, in eval mode and without the objective's weighting.

    Let g and h be two independent gradients, each the mean over m rows with fresh noise. The expectation of
    m |g - h|^2 / 2 is the trace of the covariance of a single row's gradient, that of g . h is the squared norm of the
    mean. Pairs are independent, so their mean has the usual standard error.

    Args:
        model: Some of its parameters must require gradients.
        objective: Process and prediction.
        rows: Drawn from with replacement.
        times: Where to measure.
        num_pairs: Pairs of gradients at each time.
        rows_per_gradient: Rows of one gradient, m.
        seed: Of rows and noise, which are the same at all times.
        track: Shows progress over the times, as `tqdm` does.
    """
    count("num_pairs", num_pairs, at_least=2)
    count("rows_per_gradient", rows_per_gradient)
    plain = Objective(objective.process, objective.prediction, constant())
    bound = plain.reweighting(vlb(objective.process))
    parameters = _trainable(model)
    draws = [Draw.of(rows, rows_per_gradient, 2 * num_pairs * seed + number) for number in range(2 * num_pairs)]
    with eval_mode(model), torch.enable_grad():
        measured = [_measure(model, plain, parameters, draws, t) for t in track(times)]
    weights = [float(bound(torch.tensor([t], dtype=torch.float64))) for t in times]
    at = [_at(plain, *each) for each in zip(times, weights, measured, strict=True)]
    per_pair = torch.stack([one.variances for one in measured], 1)  # (num_pairs, K)
    return VarianceProfile(at, per_pair, len(times) * 2 * num_pairs * rows_per_gradient)


@dataclass(frozen=True, slots=True)
class Draw:
    """The rows and noise of one gradient."""

    x0: Tensor  # (m, ...)
    noise: Tensor  # (m, ...)
    cond: dict[str, Tensor]

    @classmethod
    def of(cls, rows: Rows, num: int, seed: int) -> "Draw":
        """Return rows drawn with replacement, and their noise. The seed determines both."""
        generator = torch.Generator().manual_seed(seed)
        index = torch.randint(len(rows.x0), (num,), generator=generator).to(rows.x0.device)
        x0 = rows.x0[index]
        return cls(x0, torch.randn(x0.shape, generator=generator).to(x0), rows.cond(index))


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements at one time."""

    variances: Tensor  # (num_pairs,)
    signals: Tensor  # (num_pairs,)
    losses: Tensor  # (num_pairs * 2 * rows_per_gradient,)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("the model must have parameters that require a gradient: call model.requires_grad_()")
    return parameters


def _measure(
    model: Callable[..., Any], objective: Objective, parameters: Sequence[Tensor], draws: Sequence[Draw], t: float
) -> Measured:
    variances, signals, all_losses = [], [], []
    for one, other in zip(draws[::2], draws[1::2], strict=True):
        gradients = []
        for draw in (one, other):
            times = torch.full((len(draw.x0),), t, device=draw.x0.device)
            losses = objective(model, draw.x0, times, noise=draw.noise, **draw.cond)
            all_losses.append(losses.detach().double())
            gradients.append(gradients_of(losses.mean(), parameters))
        pairs = list(zip(*gradients, strict=True))
        variances.append(len(one.x0) / 2 * sum((g - h).square().sum(dtype=torch.float64) for g, h in pairs))
        signals.append(sum((g * h).sum(dtype=torch.float64) for g, h in pairs))
    return Measured(
        torch.stack([torch.as_tensor(v) for v in variances]).cpu(),
        torch.stack([torch.as_tensor(s) for s in signals]).cpu(),
        torch.cat(all_losses).cpu(),
    )


def _at(objective: Objective, t: float, weight: float, measured: Measured) -> VarianceAt:
    loss, variance, signal = (
        Estimate(*mean_and_error(values)) for values in (measured.losses, measured.variances, measured.signals)
    )
    return VarianceAt(
        t,
        float(objective.process.log_snr(torch.tensor([t], dtype=torch.float64))),
        weight,
        loss,
        variance,
        signal,
        Estimate(weight * loss.value, weight * loss.error),
        Estimate(weight**2 * variance.value, weight**2 * variance.error),
    )


def bootstrapped_ratio(above: Tensor, below: Tensor, *, seed: int = 0) -> VarianceRatio:
    """Return the ratio of two means over the same units (N,) with an interval of resampled units."""
    index = torch.randint(len(above), (NUM_RESAMPLES, len(above)), generator=torch.Generator().manual_seed(seed))
    resampled = above[index].mean(1) / below[index].mean(1)
    low, high = torch.quantile(resampled, torch.tensor([0.025, 0.975], dtype=resampled.dtype)).tolist()
    return VarianceRatio(float(above.mean() / below.mean()), low, high)
