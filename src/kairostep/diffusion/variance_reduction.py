"""Less noise in the gradient at no network evaluation: through the noise, and through the target.

The gradient of a step is noisy because of t, of the noise and of x0. A sampler reduces the first; these two
reduce the others, and all of them can be combined.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kairostep.checks import count, positive
from kairostep.counters import RowRandom
from kairostep.diffusion.process import Process
from kairostep.timesteps.sampler import Timesteps, TimestepSampler
from kairostep.timesteps.shown import check_drawn


@dataclass(frozen=True, slots=True)
class AntitheticPairs:
    """The row that replaces each row of the batch, and its noise."""

    rows: Tensor  # (B,) int64: take x0[rows], and every condition [rows]
    noise: Tensor  # (B, ...)


@torch.no_grad()
def antithetic_pairs(process: Process, x0: Tensor, drawn: Timesteps, *, threshold: float = 1.0) -> AntitheticPairs:
    """Return rows and noise so that, at low noise, neighbours in t train on one x0 with opposite noises.

        drawn = sampler.sample(x)
        pairs = ks.antithetic_pairs(process, x, drawn)
        losses = objective(model, x[pairs.rows], drawn.t, noise=pairs.noise)

    At low noise the prediction is nearly linear in the noise, so that the random parts of a pair's gradients mostly
    cancel. Times are sorted and paired while sigma / alpha < `threshold` at the lower one. Each row keeps its own t and
    weight. The expected gradient is that of independent rows if t does not depend on x0. A policy that looks at x0
    (`Adaptive`) breaks this, because neighbours in t exchange rows.
    """
    positive("threshold", threshold, example=0.1)
    call = "antithetic_pairs(process, x0, drawn)"
    if not hasattr(process, "at"):
        raise ValueError(
            f"process must be one such as ks.DiscreteProcess.linear(), got {type(process).__name__}: write {call}"
        )
    check_drawn(x0, drawn, call)
    if x0.shape[:1] != drawn.t.shape:
        raise ValueError(f"drawn must be of this batch of {len(x0)} rows, got {len(drawn.t)}: sampler.sample(x0)")
    rows, sign = pair_rows(process, drawn.t, threshold)
    return AntitheticPairs(rows, torch.randn_like(x0)[rows] * sign.to(x0.dtype).view(-1, *[1] * (x0.ndim - 1)))


@torch.no_grad()
def pair_rows(process: Process, t: Tensor, threshold: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return for times t (B,) the row whose x0 and noise each row takes, (B,), and the noise's sign, (B,)."""
    num_pairs = len(t) // 2
    first, second = t.argsort()[: 2 * num_pairs].view(num_pairs, 2).unbind(1)  # (B // 2,) each
    at = process.at(t[first])
    paired = at.sigma < threshold * at.alpha
    rows, sign = torch.arange(len(t), device=t.device), torch.ones_like(t)
    rows[second] = torch.where(paired, first, second)
    sign[second] = torch.where(paired, -1.0, 1.0).to(t.dtype)
    return rows, sign


def check_pairs(sampler: TimestepSampler) -> None:
    """Raise ValueError for a sampler that looks at x0, whose draws no longer fit rows that have traded images."""
    if sampler.uses_x0:
        raise ValueError(
            "pairs trade images between neighbours in t, so that a sampler must not draw t by the image, got "
            f"{type(sampler).__name__}, which does: pass pairs=False (--pairs=false), or "
            "ks.Adaptive(ks.ConstantBeta()) (--sampler.policy=pair)"
        )


class StableTarget:
    """Targets averaged over all likely x0, for `Objective(process, prediction, target=StableTarget(reference))`.

    Several x0 may have led to x_t. Instead of the one that did, the network learns their mean, each weighted by its
    posterior probability given x_t among a reference set and x0 itself (Xu et al., ICLR 2023). The target is slightly
    biased toward the reference. It knows no labels: for a model with classes the reference would have to be of the
    sample's class. It costs distances between batch and reference, and no network evaluation.

    Args:
        reference: (M, ...) clean samples, on the device of the batch.
        num: Rows of it drawn at each call from torch's global generator. None takes all.
        chunk_size: Rows in one matrix product.

    The built-in trainer sets `key`, an int64 scalar: the rows are then a function of it, the same on all processes.
    """

    key: Tensor | None = None

    def __init__(self, reference: Tensor, num: int | None = 256, *, chunk_size: int = 4096) -> None:
        if reference.ndim < 2 or len(reference) == 0 or not reference.is_floating_point():
            raise ValueError(
                f"reference must be clean samples (M, ...) in floating point, got {reference.dtype} of shape "
                f"{tuple(reference.shape)}: pass some of the training set, scaled as x0 is"
            )
        if not bool(reference.isfinite().all()):
            raise ValueError("reference must be finite, since each row is part of every target: leave out NaN and inf")
        self.reference = reference
        self.num = None if num is None else count("num", num, at_most=10**7, example=64)
        self.chunk_size = count("chunk_size", chunk_size)

    @torch.no_grad()
    def __call__(self, x0: Tensor, xt: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return the posterior mean (B, ...) of x0 given x_t, with alpha and sigma (B, 1, ...)."""
        if x0.shape[1:] != self.reference.shape[1:] or x0.device != self.reference.device:
            raise ValueError(
                f"reference must hold samples like x0, {tuple(x0.shape[1:])} on {x0.device}, got "
                f"{tuple(self.reference.shape[1:])} on {self.reference.device}: pass training samples, moved there once"
            )
        reference, wide = self.drawn_reference(), _wide(x0)
        own, alpha, sigma = wide.flatten(1), _wide(alpha).flatten(1), _wide(sigma).flatten(1)  # (B, D), (B, 1)
        noisy = _wide(xt).flatten(1) - alpha * own  # sigma * noise
        # log p(x_j) - log p(x0) = -(|alpha (x0 - x_j)|^2 + 2 alpha (x0 - x_j) . sigma noise) / (2 sigma^2)
        chunks = torch.split(reference.flatten(1), self.chunk_size)
        farther = [_farther(own, noisy, alpha, _wide(chunk)) for chunk in chunks]
        logits = -torch.cat([torch.zeros_like(sigma), *farther], dim=1) / (2 * sigma.square()).clamp(min=1e-30)
        share_own, *shares = torch.split(logits.softmax(1), [1, *map(len, chunks)], dim=1)
        mean = share_own * own
        for some, chunk in zip(shares, chunks, strict=True):
            mean = torch.addmm(mean, some, _wide(chunk))
        return mean.to(x0.dtype).view_as(x0)

    def drawn_reference(self) -> Tensor:
        """Return the rows of this call."""
        if self.num is None or self.num >= len(self.reference):
            return self.reference
        if self.key is None:
            return self.reference[torch.randint(len(self.reference), (self.num,), device=self.reference.device)]
        share = RowRandom(self.key, torch.arange(self.num, device=self.key.device)).uniform()
        return self.reference[(share.double() * len(self.reference)).long()]


def _wide(value: Tensor) -> Tensor:
    """Return the value in the precision that distances need: their differences count, divided by a small sigma**2."""
    return value if value.device.type == "mps" else value.double()


def _farther(own: Tensor, noisy: Tensor, alpha: Tensor, others: Tensor) -> Tensor:
    """Return |x_t - alpha x_j|^2 - |x_t - alpha x0|^2 for all x_j (m, D): (B, m)."""
    apart = own.square().sum(1, keepdim=True) + others.square().sum(1) - 2 * own @ others.T
    along = (own * noisy).sum(1, keepdim=True) - noisy @ others.T
    return alpha.square() * apart.clamp(min=0) + 2 * alpha * along
