"""Writes `metrics.jsonl` of a run, one line per event, and feeds its trackers."""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kairostep.bounded_files import Unreadable, open_regular
from kairostep.files import whole_file
from kairostep.ranks import gather_over_ranks, rank
from kairostep.timesteps import Timesteps

log = logging.getLogger("kairostep")

NUM_QUARTILES = 4
NUM_BINS = 100  # of t, as in a sampler's density


class Recorder:
    """Collects the losses of steps on the device and writes lines of metrics. Only the first process writes.

    Args:
        directory: The run directory.
        track: Called with the numbers of each line and its step. Default: no trackers.
    """

    def __init__(self, directory: Path, track: Callable[[dict[str, float], int], None] | None = None) -> None:
        self.path = directory / "metrics.jsonl"
        self.track = track
        self.pending: list[Tensor] = []  # (3, B) each: t, loss, weight of this rank
        self.before: Tensor | None = None  # (3, N) of all ranks, from before the run was resumed
        self.weights = torch.ones(NUM_BINS, dtype=torch.float64)  # mean weight of the draws in each bin of t

    def add(self, drawn: Timesteps, losses: Tensor) -> None:
        """Keep the draws and losses (B,) of a step, without waiting for the device."""
        self.pending.append(torch.stack([drawn.t, losses, drawn.weight]))

    def latest_loss(self) -> float:
        """Return the mean loss of the latest step on this rank. This waits for the device."""
        _, losses, weight = self.pending[-1]
        return float((losses * weight).mean())

    def summary(self) -> dict[str, Any]:
        """Return mean losses over all ranks since the last summary, and start the next one.

        `loss` is the weighted loss, which was minimised. `loss_quartiles` are unweighted losses by quartile of t, NaN
        for a quartile without draws.
        """
        t, losses, weight = self._gather().cpu().double()  # (3, N)
        self.pending, self.before = [], None
        self.weights = mean_by_bin(t, weight, self.weights)
        quartile = (t * NUM_QUARTILES).long().clamp(max=NUM_QUARTILES - 1)
        means = [losses[quartile == q].mean() for q in range(NUM_QUARTILES)]  # the mean of nothing is NaN
        return {"loss": float((losses * weight).mean()), "loss_quartiles": [float(mean) for mean in means]}

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line. Numbers that are not finite become null."""
        if rank() != 0:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
        if self.track is not None:
            self.track(_flat(line), line["step"])

    def resume(self, step: int) -> None:
        """Remove lines after this step, which the run will write again, and damaged lines."""
        if rank() != 0 or not self.path.exists():
            return
        try:
            with open_regular(self.path) as file:
                lines = [(_step_of(line), line) for line in file.read().splitlines() if line.strip()]
        except Unreadable as error:
            raise ValueError(f"metrics must be in a file, got {self.path}: {error}; move it away to go on") from error
        num_damaged = sum(found is None for found, _ in lines[:-1])
        if num_damaged:
            log.warning("%d lines of %s cannot be read and are dropped", num_damaged, self.path)
        kept = b"".join(line + b"\n" for found, line in lines if found is not None and found <= step)
        with whole_file(self.path) as temporary:
            temporary.write_bytes(kept)

    def sync(self) -> None:
        """Flush the lines to disk, before a checkpoint relies on them."""
        if rank() == 0 and self.path.exists():
            with self.path.open("rb+") as file:
                os.fsync(file.fileno())

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of all ranks that no summary has reported yet."""
        return {"pending": self._gather() if self.pending else self.before, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Load a state that `state_dict` returned, on any number of ranks."""
        pending = state["pending"]
        if pending is not None and pending.ndim == 3:  # of version 0.1: (W, 3, N)
            pending = pending.transpose(0, 1).flatten(1)
        self.pending, self.before = [], None if pending is None else pending.to(device)
        self.weights = state.get("weights", self.weights).cpu()  # older checkpoints have none

    def _gather(self) -> Tensor:
        """Return the losses of all ranks since the last summary, (3, N), by step and then by rank."""
        of_ranks = gather_over_ranks(torch.cat(self.pending, dim=1))  # (W, 3, rows of all steps)
        of_steps = torch.split(of_ranks, [step.shape[1] for step in self.pending], dim=2)
        steps = [step.transpose(0, 1).flatten(1) for step in of_steps]  # (3, rows of a step) each
        return torch.cat(steps if self.before is None else [self.before, *steps], dim=1)


def mean_by_bin(t: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """Return the mean weight of the draws (N,) in each equal bin of t. A bin without draws keeps its value `before`."""
    index = (t * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    total, num = torch.zeros(2, NUM_BINS, dtype=weight.dtype).index_add(1, index, torch.stack([weight, weight**0]))
    return torch.where(num > 0, total / num.clamp(min=1), before)  # (NUM_BINS,)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the single numbers of a line, nested names joined by a slash."""
    flat: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            flat[prefix + key] = value
    return flat


def _step_of(line: bytes) -> float | None:
    """Return the step of a line, None if the line is damaged."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
