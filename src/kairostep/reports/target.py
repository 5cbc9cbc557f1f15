"""The cost to reach the baseline's final loss, in seconds or network evaluations, over the baseline's cost."""

import math
from collections.abc import Sequence
from typing import Literal

from kairostep.reports.arms import Arm, same_task
from kairostep.runs.history import HeldOutPoint, RunHistory
from kairostep.seed_statistics import Ratio, cost_to_reach

Cost = Literal["seconds", "evaluations"]


def first_reaching(points: Sequence[HeldOutPoint], target: float, cost: Cost) -> float | None:
    """Return the cost at which the held-out loss first reaches the target."""
    known = [(getattr(point, cost), point.loss) for point in points]
    curve = [(spent, loss) for spent, loss in known if spent is not None and loss is not None]
    return cost_to_reach([spent for spent, _ in curve], [loss for _, loss in curve], target)


def ratio_to(run: RunHistory, baseline: Arm, cost: Cost) -> Ratio | None:
    """Return a run's cost to reach the baseline's last held-out loss, over the baseline's own cost.

    The baseline is its run of the same seed, or the mean of its runs if none has this seed. Return None if the task
    differs or there are no held-out losses.
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
    """Whether the baseline has the seed of each run of an arm."""
    return {run.history.seed for run in arm.runs} <= {run.history.seed for run in baseline.runs}


def _spent(run: RunHistory, cost: Cost) -> float | None:
    return next((getattr(p, cost) for p in reversed(run.held_out) if getattr(p, cost) is not None), None)
