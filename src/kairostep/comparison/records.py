"""Reads what a run of a comparison measured from its directory."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kairostep.comparison.plan import DIVERGED, UNWEIGHTED, WEIGHTED, PlannedRun
from kairostep.runs.history import HeldOutPoint, RunHistory

COSTS = ("steps", "images", "evaluations", "seconds")
LABELS = {
    UNWEIGHTED: "held-out loss",
    WEIGHTED: "weighted held-out loss",
    "bound": "held-out bound",
    "fid": "FID",
    "kid": "KID",
    "precision": "precision",
    "recall": "recall",
}


@dataclass(frozen=True)
class Record:
    """One run: its measurements, and the cost up to each."""

    arm: str
    seed: int
    state: str  # finished, unfinished or diverged
    spent: Mapping[int, Mapping[str, float]]  # by step and cost
    values: Mapping[str, Mapping[int, float]]  # by metric and step
    ranges: Sequence[float] = ()  # the last held-out loss in equal ranges of t, low noise first
    place: str = ""  # device and commit; seconds are only compared within one place
    stopped: int | None = None  # the step at which it diverged
    batch_size: int = 0
    probes: bool = False  # whether its sampler evaluates the network
    weighting: str | None = None  # of its loss; "" if none, or if too old to have a weighted loss; None before a loss
    facts: Mapping[str, Any] = field(default_factory=dict)

    def final(self, metric: str) -> float | None:
        """Return the last value of a metric if the run has finished."""
        values = self.values.get(metric)
        return list(values.values())[-1] if values and self.state == "finished" else None

    def curve(self, metric: str, cost: str) -> tuple[list[float], list[float]]:
        """Return the costs and values of a metric, at the steps where the cost is known."""
        steps = [step for step in self.values.get(metric, {}) if cost in self.spent.get(step, {})]
        return [self.spent[step][cost] for step in steps], [self.values[metric][step] for step in steps]


def read_record(run: PlannedRun) -> Record | None:
    """Return what a run has measured so far, None if it never started.

    Measurements by `kairostep evaluate` do not count, nor those of steps that were added to the run apart.
    """
    if not (run.directory / "config.yaml").is_file():
        return None
    history = RunHistory.read(run.directory)
    values: dict[str, dict[int, float]] = {}
    for point in history.held_out:
        for metric, value in ((UNWEIGHTED, point.loss), (WEIGHTED, point.weighted_loss), ("bound", point.vlb)):
            if value is not None:
                values.setdefault(metric, {})[int(point.step)] = value
    for line in history.generated:
        values.setdefault(line["what"], {})[int(line["checkpoint"])] = float(line["value"])
    values = {
        metric: kept
        for metric, found in values.items()
        if (kept := {step: value for step, value in found.items() if step <= run.config.steps})
    }
    stopped = _stopped_at(run)
    state = "diverged" if stopped is not None else "finished" if run.finished else "unfinished"
    probes = (history.spent("probe_evaluations") or 0) > 0
    return Record(
        run.arm,
        run.seed,
        state,
        {step: history.costs_at(step) for step in sorted({step for found in values.values() for step in found})},
        values,
        ranges=_ranges([point for point in history.held_out if point.step <= run.config.steps]),
        place=history.place,
        stopped=stopped,
        batch_size=run.config.batch_size,
        probes=probes,
        weighting=_weighting(run, history.held_out),
        facts={"rate": run.rate, "directory": str(run.directory)},
    )


def _stopped_at(run: PlannedRun) -> int | None:
    try:
        return int(json.loads((run.directory / DIVERGED).read_text())["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _weighting(run: PlannedRun, held_out: Sequence[HeldOutPoint]) -> str | None:
    if not held_out:
        return None
    return str(run.config.weighting) if any(point.is_weighted for point in held_out) else ""


def _ranges(held_out: Sequence[HeldOutPoint]) -> tuple[float, ...]:
    last = held_out[-1].loss_ranges if held_out else ()
    known = [value for value in last if value is not None]
    return tuple(known) if len(known) == len(last) else ()
