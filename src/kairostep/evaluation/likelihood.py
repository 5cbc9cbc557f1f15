"""Losses on held-out data that pair across runs: fixed noise, times spread evenly over [0, 1]."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kairostep.checks import count
from kairostep.diffusion import Objective, constant, vlb
from kairostep.diffusion.conditions import class_condition
from kairostep.diffusion.weighting import LOG_SNR_LIMIT
from kairostep.evaluation.estimate import Estimate, mean_and_error
from kairostep.evaluation.matched import matched_draws
from kairostep.shares import WHOLE, Share

NUM_BINS = 20  # of t, in a profile
NUM_RANGES = 4  # of t, beside the held-out loss


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Mean losses over held-out rows, with the standard errors of the means."""

    loss: float  # squared error of what is predicted, unweighted, at uniform t
    loss_error: float
    weighted_loss: float  # the same error under the weights of the objective: what a run with unbiased draws minimises
    weighted_loss_error: float
    vlb: float  # the same error under the weights of the bound, averaged over t: a step's mean share, in nats/dim
    vlb_error: float
    num_evaluations: int
    loss_ranges: list[float]  # the loss in equal ranges of t, low noise first; NaN where no row was seen


@torch.no_grad()
def held_out_loss(
    model: Callable[..., Any],
    objective: Objective,
    x0: Tensor,  # (N, ...)
    *,
    labels: Tensor | None = None,  # (N,)
    seed: int = 0,
    batch_size: int = 256,
    share: Share = WHOLE,  # of the batches, where several processes call this with equal arguments
) -> HeldOut:
    """Return the losses of a model over uniform t. Calls with equal arguments share noise and times.

    Each row is seen once, at a time in one of N equal parts of [0, 1], which are assigned at random. That is cheap
    enough to do regularly during training. `loss_profile` and `variational_bound` are more precise.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(x0.shape, generator=generator).to(x0)
    parts = torch.randperm(len(x0), generator=generator)
    t = ((parts + torch.rand(len(x0), generator=generator)) / len(x0)).clamp(1e-6, 1 - 1e-6).to(x0.device)
    plain = Objective(objective.process, objective.prediction, constant())
    loss = torch.zeros(len(x0), dtype=torch.float64, device=x0.device)
    for batch in share.batches(len(x0), batch_size):
        rows = torch.arange(batch.start, batch.stop, device=x0.device)
        loss[rows] = plain(model, x0[rows], t[rows], noise=noise[rows], **class_condition(labels, rows)).double()
    loss = share.sum(loss)
    weighted = loss * objective.weight(t)
    bound = loss * plain.reweighting(vlb(objective.process))(t)
    ranges = (t * NUM_RANGES).long()  # (N,)
    by_range = [float(loss[ranges == number].mean()) for number in range(NUM_RANGES)]
    means = (*mean_and_error(loss), *mean_and_error(weighted), *mean_and_error(bound))
    return HeldOut(*means, num_evaluations=len(x0), loss_ranges=by_range)


@dataclass(frozen=True, slots=True)
class Bin:
    """Mean losses over the rows, each seen once at a time in [start, end)."""

    start: float
    end: float
    log_snr: float  # in the middle of the bin
    loss: Estimate  # squared error of what is predicted
    epsilon_mse: Estimate  # the same as an error of the noise


@dataclass(frozen=True, slots=True)
class LossProfile:
    """Losses by time and their means over uniform t, with standard errors of the means over rows."""

    bins: list[Bin]  # in the order of t
    loss: Estimate
    weighted_loss: Estimate  # under the weights of the objective
    epsilon_mse: Estimate
    per_image: Tensor  # (N, num_bins), the loss: subtract those of two models to compare them
    num_evaluations: int


@torch.no_grad()
def loss_profile(
    model: Callable[..., Any],
    objective: Objective,
    x0: Tensor,  # (N, ...)
    *,
    labels: Tensor | None = None,  # (N,)
    num_bins: int = NUM_BINS,
    seed: int = 0,
    batch_size: int = 256,
    share: Share = WHOLE,  # of the batches, where several processes call this with equal arguments
) -> LossProfile:
    """Return the unweighted loss of a model in equal bins of t. Calls with equal arguments share noise and times."""
    count("num_bins", num_bins, at_most=10**6, example=20)
    plain = Objective(objective.process, objective.prediction, constant())
    losses = torch.zeros(len(x0), num_bins, dtype=torch.float64, device=x0.device)
    factors = torch.empty_like(losses)  # from the loss to the error of the noise
    weights = torch.empty_like(losses)
    for number, draw in enumerate(matched_draws(x0, num_bins, seed)):
        t = draw.u.to(torch.float32).clamp(1e-6, 1 - 1e-6)
        log_snr = objective.process.log_snr(draw.u).clamp(-LOG_SNR_LIMIT, LOG_SNR_LIMIT)
        weights[:, number] = objective.weight(t)
        factors[:, number] = (log_snr + objective.prediction.log_x0_error(log_snr)).exp()
        for batch in share.batches(len(x0), batch_size):
            rows = torch.arange(batch.start, batch.stop, device=x0.device)
            noise, cond = draw.noise[rows], class_condition(labels, rows)
            losses[rows, number] = plain(model, x0[rows], t[rows], noise=noise, **cond).double()
    losses = share.sum(losses)
    errors = losses * factors
    return LossProfile(
        [_bin(objective, losses[:, number], errors[:, number], number, num_bins) for number in range(num_bins)],
        Estimate(*mean_and_error(losses.mean(1))),
        Estimate(*mean_and_error((losses * weights).mean(1))),
        Estimate(*mean_and_error(errors.mean(1))),
        per_image=losses,
        num_evaluations=losses.numel(),
    )


def _bin(objective: Objective, losses: Tensor, errors: Tensor, number: int, num_bins: int) -> Bin:
    middle = torch.tensor([(number + 0.5) / num_bins], dtype=torch.float64)
    return Bin(
        number / num_bins,
        (number + 1) / num_bins,
        float(objective.process.log_snr(middle)),
        Estimate(*mean_and_error(losses)),
        Estimate(*mean_and_error(errors)),
    )
