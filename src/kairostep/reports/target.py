"""The cost to reach the baseline's final held-out loss, over the baseline's own: what `kairostep compare` tells too."""

from collections.abc import Sequence
from typing import Literal

from kairostep.reports.arms import Arm, same_task
from kairostep.runs.history import RunHistory
from kairostep.seed_statistics import PairedRatio, Ratio, cost_ratio

Cost = Literal["seconds", "evaluations"]


def ratio_to(run: RunHistory, baseline: Arm, cost: Cost) -> Ratio | None:
    """Return a run's cost to the final held-out loss of the baseline of its seed, over what the baseline spent on it.

    None if nothing compares: another task, a run that has not finished, no baseline of this seed, no held-out losses,
    and for seconds another device or commit.
    """
    other = partner(run, baseline)
    if other is None or other.last is None or other.last.loss is None:
        return None
    if cost == "seconds" and run.place != other.place:
        return None
    return cost_ratio(loss_curve(run, cost), loss_curve(other, cost), other.last.loss)


def paired_ratio_to(runs: Sequence[RunHistory], baseline: Arm, cost: Cost) -> PairedRatio | None:
    """Return the ratios of an arm, one for each seed: repeating a seed says nothing about other seeds."""
    found = {run.seed: ratio for run in reversed(runs) if (ratio := ratio_to(run, baseline, cost)) is not None}
    return PairedRatio(found) if found else None


def partner(run: RunHistory, baseline: Arm) -> RunHistory | None:
    """Return the baseline's run that a run is compared with: of its seed and task, both of them finished."""
    if run.state != "finished" or not same_task(run, baseline.first):
        return None
    others = [other.history for other in baseline.runs]
    return next((other for other in others if _pairs(other, run) and other.state == "finished"), None)


def is_paired(arm: Arm, baseline: Arm) -> bool:
    """Whether every run of an arm has a baseline of its seed."""
    return all(any(_pairs(other.history, run.history) for other in baseline.runs) for run in arm.runs)


def _pairs(one: RunHistory, other: RunHistory) -> bool:
    return one.seed is not None and one.seed == other.seed


def loss_curve(run: RunHistory, cost: Cost) -> tuple[list[float], list[float]]:
    """Return costs and held-out losses at the measurements whose cost is known."""
    measured = [(run.costs_at(point.step).get(cost), point.loss) for point in run.held_out]
    known = [(spent, loss) for spent, loss in measured if spent is not None and loss is not None]
    return [spent for spent, _ in known], [loss for _, loss in known]
