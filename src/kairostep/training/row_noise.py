"""The noise of a training step: a function of (seed, step, row), whichever process has the row."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kairostep.counters import GOLDEN_RATIO, RowRandom, key_tensor
from kairostep.data import Batch
from kairostep.diffusion import Objective
from kairostep.diffusion.variance_reduction import StableTarget, pair_rows
from kairostep.ranks import gather_over_ranks
from kairostep.timesteps import Timesteps
from kairostep.timesteps.probes import current_probe

_STEP, _PROBE = 0, 1  # what a key is for


@dataclass(frozen=True, slots=True)
class RowNoise:
    """Makes the noise of this process's rows. A key, an int64 scalar, stands for a micro-batch or a probe.

    Args:
        seed: Of all noise.
        rank: Of this process. Each has as many rows as the others, in the order of ranks.
        device: Of the keys.
    """

    seed: int
    rank: int
    device: torch.device

    def step_key(self, step: int, number: int) -> Tensor:
        """Return the key of a micro-batch by its step and its number in it."""
        return key_tensor(self.seed, _STEP, step, number, device=self.device)

    def probe_key(self, step: int) -> Tensor:
        """Return the key of the probe under way, or of this step if a loss is asked for outside of probes."""
        probe = current_probe()
        return key_tensor(self.seed, _PROBE, step if probe is None else probe, device=self.device)

    def rows_of(self, x0: Tensor) -> Tensor:
        """Return the numbers of these rows (B, ...) in the batch over all processes, (B,)."""
        return torch.arange(len(x0), device=x0.device) + self.rank * len(x0)

    def of_batch(self, key: Tensor, x0: Tensor) -> Tensor:
        """Return the noise (B, ...) of a micro-batch."""
        return RowRandom(key, self.rows_of(x0)).normal(x0.shape[1:]).to(x0.dtype)

    def of_probe(self, key: Tensor, x0: Tensor, rows: Tensor, t: Tensor) -> Tensor:
        """Return the noise (N, ...) of rows (N,) of a batch at the times t (N,): another one at each time."""
        place = self.rows_of(x0)[rows] * GOLDEN_RATIO + t.to(torch.float32).view(torch.int32)
        return RowRandom(key, place).normal(x0.shape[1:]).to(x0.dtype)

    def of_pairs(self, key: Tensor, batch: Batch, drawn: Timesteps, objective: Objective) -> tuple[Batch, Tensor]:
        """Return a batch and its noise as antithetic pairs. They are made over all processes, which gather x0."""
        x0, own = batch.x0, self.rows_of(batch.x0)
        rows, sign = pair_rows(objective.process, gather_over_ranks(drawn.t).flatten())
        rows, sign = rows[own], sign[own].to(x0.dtype).view(-1, *[1] * (x0.ndim - 1))
        noise = RowRandom(key, rows).normal(x0.shape[1:]).to(x0.dtype) * sign
        labels = None if batch.labels is None else gather_over_ranks(batch.labels).flatten()[rows]
        return Batch(gather_over_ranks(x0).flatten(0, 1)[rows], labels), noise


@contextmanager
def targets_by(key: Tensor, objective: Objective) -> Iterator[None]:
    """Let an objective's `StableTarget`, if it has one, draw its reference by the key in this block."""
    target = getattr(objective, "target", None)
    if not isinstance(target, StableTarget):
        yield
        return
    target.key = ~key  # other numbers than the noise
    try:
        yield
    finally:
        target.key = None
