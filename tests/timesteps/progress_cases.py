"""Losses for `Progress` to look at, priors to start from, and steps without a network."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kairostep as ks

NAN = float("nan")
K = 20


class Probe:
    """Losses that are a function of (number of the call, t), with a record of every call."""

    def __init__(self, loss: Callable[[int, Tensor], Tensor]) -> None:
        self.loss = loss
        self.rows: list[Tensor] = []
        self.t: list[Tensor] = []
        self.random: list[Tensor] = []

    def __call__(self, rows: Tensor, t: Tensor) -> Tensor:
        """Return the losses of the rows at t, all (num_probes,)."""
        self.rows.append(rows.clone())
        self.t.append(t.clone())
        self.random.append(torch.rand(4))
        return self.loss(len(self.t) - 1, t)


def falling_early(call: int, t: Tensor) -> Tensor:
    """Return a loss of 100 that falls by 1 per call, at t < 0.5 alone."""
    return 100 - call * (t < 0.5).float()


def graded(call: int, t: Tensor) -> Tensor:
    """Return a loss whose fall per call differs from bin to bin, also in sign."""
    return 100 - call * torch.sin(9 * (t * K).floor() / K)


def build(loss: Callable[[int, Tensor], Tensor] | Probe | None = None, **options: object) -> ks.Progress:
    """Return a sampler that probes this loss at every step, unless told otherwise."""
    probe = Probe(loss) if loss is not None and not isinstance(loss, Probe) else loss
    return ks.Progress(**({"probe": probe, "every": 1} | options))  # type: ignore[arg-type]


def observe(sampler: ks.TimestepSampler, num_steps: int = 1, num_rows: int = 64) -> None:
    """Take steps of a training loop whose own losses say nothing."""
    x0 = torch.zeros(num_rows, 1)
    for _ in range(num_steps):
        drawn = sampler.sample(x0)
        with sampler.observe(x0, drawn, torch.ones(num_rows), lambda rows, t: torch.ones_like(t)):
            pass


def after(loss: Callable[[int, Tensor], Tensor], num_steps: int = 10, **options: object) -> Tensor:
    """Return the density (K,) after as many windows."""
    sampler = build(loss, **options)
    observe(sampler, num_steps)
    return sampler.density(K)


PRIORS = {
    "none": (lambda: None, ks.Uniform()),
    "logit_normal": (ks.LogitNormal, ks.LogitNormal()),
    "steps": (lambda: ks.Tabulated(torch.arange(1.0, K + 1)), ks.Tabulated(torch.arange(1.0, K + 1))),
}
every_prior = pytest.mark.parametrize("name", PRIORS)
