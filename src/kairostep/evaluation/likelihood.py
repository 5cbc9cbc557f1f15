"""Losses on held-out data that pair across runs: fixed noise, times spread evenly over [0, 1]."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kairostep.diffusion import Objective, constant, vlb


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Mean losses over held-out rows, with the standard errors of the means."""

    loss: float  # squared error of what is predicted, unweighted, at uniform t
    loss_error: float
    vlb: float  # the same error under the weights of the variational bound, in nats per dimension
    vlb_error: float
    num_evaluations: int


@torch.no_grad()
def held_out_loss(
    model: Callable[..., Any],
    objective: Objective,
    x0: Tensor,  # (N, ...)
    *,
    labels: Tensor | None = None,  # (N,)
    seed: int = 0,
    batch_size: int = 256,
) -> HeldOut:
    """Return the losses of a model on x0, whatever its sampler and weighting; equal arguments share noise and times.

    Row i is seen at a time from the i-th of N equal parts of [0, 1], the parts being dealt out at random.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(x0.shape, generator=generator).to(x0)
    parts = torch.randperm(len(x0), generator=generator)
    t = ((parts + torch.rand(len(x0), generator=generator)) / len(x0)).clamp(1e-6, 1 - 1e-6).to(x0.device)
    plain = Objective(objective.process, objective.prediction, constant())
    losses = []
    for rows in torch.split(torch.arange(len(x0), device=x0.device), batch_size):
        cond = {} if labels is None else {"class_labels": labels[rows]}
        losses.append(plain(model, x0[rows], t[rows], noise=noise[rows], **cond).double())
    loss = torch.cat(losses)
    bound = loss * plain.reweighting(vlb(objective.process))(t)
    return HeldOut(*mean_and_error(loss), *mean_and_error(bound), num_evaluations=len(x0))


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Return the mean of values (N,) and its standard error, as if the values were independent."""
    return float(values.mean()), float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan
