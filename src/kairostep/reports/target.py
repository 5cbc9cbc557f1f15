"""The cost to reach the baseline's final loss, as ratios of seconds and of network evaluations with probes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kairostep.reports.arms import Arm, same_task
from kairostep.runs.history import HeldOutPoint, RunHistory

Cost = Literal["seconds", "evaluations"]
# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom; the normal one beyond
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
NORMAL = 1.960


@dataclass(frozen=True)
class Ratio:
    """A run's cost to reach the target over the baseline's; a lower bound if the run never reached it."""

    value: float
    reached: bool

    def __str__(self) -> str:
        return f"{'' if self.reached else '> '}{self.value:.3f}"


@dataclass(frozen=True)
class Spread:
    """A mean over seeds with half the width of its interval of 95 %, and the standard deviation; None for one seed."""

    mean: float
    half_width: float | None
    deviation: float | None


def spread_of(values: Sequence[float]) -> Spread:
    """Return the mean of at least one value, with its interval."""
    n, mean = len(values), math.fsum(values) / len(values)
    if n == 1:
        return Spread(mean, None, None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    quantile = STUDENT[n - 2] if n - 2 < len(STUDENT) else NORMAL
    return Spread(mean, quantile * deviation / math.sqrt(n), deviation)


def first_reaching(points: Sequence[HeldOutPoint], target: float, cost: Cost) -> float | None:
    """Return the cost at which the held-out loss first reaches the target, linear in log(loss) between points."""
    before: tuple[float, float] | None = None
    for point in points:
        spent, loss = getattr(point, cost), point.loss
        if spent is None or loss is None:
            continue
        if loss <= target:
            if before is None or min(target, loss, before[1]) <= 0:
                return float(spent)
            high, low = math.log(before[1]), math.log(loss)
            share = (high - math.log(target)) / (high - low)
            return float(before[0] + share * (spent - before[0]))
        before = (spent, loss)
    return None


def ratio_to(run: RunHistory, baseline: Arm, cost: Cost) -> Ratio | None:
    """Return how a run's cost to the target compares, with the baseline of its seed, or the mean of all if none has it.

    The target is the baseline's last held-out loss. None if nothing compares: another task, or no held-out losses.
    """
    others = [other.history for other in baseline.runs]
    others = [other for other in others if other.seed == run.seed] or others
    ends = [other.last for other in others]
    losses = [end.loss for end in ends if end is not None and end.loss is not None]
    if not losses or not run.held_out or not same_task(run, baseline.first):
        return None
    target = math.fsum(losses) / len(losses)
    costs = [first_reaching(other.held_out, target, cost) or _spent(other, cost) for other in others]
    known = [value for value in costs if value]
    spent = _spent(run, cost)
    if not known or spent is None:
        return None
    basis = math.fsum(known) / len(known)
    reached = first_reaching(run.held_out, target, cost)
    return Ratio((spent if reached is None else reached) / basis, reached is not None)


def is_paired(arm: Arm, baseline: Arm) -> bool:
    """Whether every run of an arm has a baseline of its seed."""
    return {run.history.seed for run in arm.runs} <= {run.history.seed for run in baseline.runs}


def _spent(run: RunHistory, cost: Cost) -> float | None:
    return next((getattr(p, cost) for p in reversed(run.held_out) if getattr(p, cost) is not None), None)
