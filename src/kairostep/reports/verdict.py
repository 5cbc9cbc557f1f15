"""Sums up the runs of a page in one sentence. It claims only what was measured, and nothing from a single seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kairostep.reports.arms import Arm, same_task
from kairostep.reports.rounding import with_error
from kairostep.runs.history import RunHistory
from kairostep.seed_statistics import PairedRatio, paired_ratio, spread_of

SAME_COST = 0.005  # network evaluations that differ by less are called the same


@dataclass(frozen=True)
class Verdict:
    """A sentence for the top of a page, and one for each arm below it."""

    line: str
    details: list[str]


@dataclass(frozen=True)
class Comparison:
    """An arm beside the baseline, over the seeds that both have finished."""

    arm: str
    ratio: PairedRatio | None  # of final held-out losses
    cost: float | None  # network evaluations, probes included, over the baseline's

    @property
    def num_seeds(self) -> int:
        """How many seeds both have."""
        return len(self.ratio.by_seed) if self.ratio else 0

    @property
    def decided(self) -> int:
        """-1 if the arm ends lower than the baseline beyond the spread of seeds, 1 if higher, else 0."""
        return self.ratio.decided if self.ratio else 0


def verdict(arms: Sequence[Arm]) -> Verdict | None:
    """Return the verdict on final held-out losses, or None if there are none."""
    baseline = next((arm for arm in arms if arm.baseline), None)
    if baseline is None or not any(run.history.last for arm in arms for run in arm.runs):
        return None
    others = [arm for arm in arms if not arm.baseline and same_task(arm.first, baseline.first)]
    if not others:
        return Verdict(f"{_loss_sentence(baseline)} There is nothing to compare it with.", [])
    found = [compare(arm, baseline) for arm in others]
    most_seeds = max(comparison.num_seeds for comparison in found)
    unfinished = sum(run.history.state != "finished" for arm in (baseline, *others) for run in arm.runs)
    if most_seeds > 1:
        return _of_seeds(found, baseline.name)
    losses = ", ".join(_loss_of(arm) for arm in (baseline, *others))
    if unfinished:
        runs = f"{unfinished} run{'s have' if unfinished > 1 else ' has'} not finished"
        return Verdict(f"No verdict yet: {runs}.", [f"Held-out loss so far: {losses}."])
    if most_seeds == 0:
        line = f"No verdict: no arm has a seed that {baseline.name} has too."
    else:
        line = "One seed for each arm shows no difference beyond the spread of seeds: train three or more to compare."
    return Verdict(line, [f"Held-out loss at the end, measured once each: {losses}."])


def compare(arm: Arm, baseline: Arm) -> Comparison:
    """Return the comparison of an arm with the baseline over the seeds that both have finished."""
    ends, others = _by_seed(arm), _by_seed(baseline)
    losses, costs = (
        paired_ratio(*({seed: of(run) for seed, run in runs.items()} for runs in (ends, others)))
        for of in (_end, _evaluations)
    )
    return Comparison(arm.name, losses, costs.mean if costs else None)


def _of_seeds(found: Sequence[Comparison], baseline: str) -> Verdict:
    """Return the verdict if at least one arm has several seeds."""
    told = [_sentence(comparison, baseline) for comparison in found]
    if len(found) == 1:
        return Verdict(told[0], [])
    lower, higher = ([each.arm for each in found if each.decided == sign] for sign in (-1, 1))
    parts = [
        f"{_join_names(names)} end{'s' * (len(names) == 1)} {word}"
        for names, word in ((lower, "lower"), (higher, "higher"))
        if names
    ]
    if not parts:
        return Verdict(f"No arm differs from {baseline} in held-out loss by more than seeds do.", told)
    rest = "; the others do not differ beyond the spread of seeds" if len(lower) + len(higher) < len(found) else ""
    return Verdict(f"In held-out loss, {' and '.join(parts)} than {baseline}{rest}.", told)


def _sentence(comparison: Comparison, baseline: str) -> str:
    """Return a sentence about one arm."""
    if comparison.ratio is None:
        return f"{comparison.arm}: no finished seed that {baseline} has too, so no verdict."
    spread = comparison.ratio.spread
    if spread.half_width is None:
        return f"{comparison.arm}: one seed in common with {baseline} shows no difference beyond the spread of seeds."
    low, high = (_change(spread.mean + sign * spread.half_width) for sign in (-1, 1))
    interval = f"95 % interval {low} to {high}, {comparison.num_seeds} seeds"
    cost = ""
    if comparison.cost is not None:
        differs = abs(comparison.cost - 1) > SAME_COST
        cost = f", with {comparison.cost:.2f} times" if differs else ", with as many"
        cost += " the network evaluations" if differs else " network evaluations"
    if comparison.decided:
        return f"{comparison.arm}: held-out loss {_change(spread.mean)} than {baseline} ({interval}){cost}."
    return f"{comparison.arm}: no difference from {baseline} beyond the spread of seeds ({interval}){cost}."


def _change(log_ratio: float) -> str:
    percent = 100 * math.expm1(log_ratio)
    size = abs(percent)
    digits = 0 if size >= 10 else 1 if size >= 1 else 2
    return f"{size:.{digits}f} % {'lower' if percent < 0 else 'higher'}"


def _loss_sentence(arm: Arm) -> str:
    """Return one sentence with the last held-out loss of an arm."""
    losses = [_end(run.history) for run in arm.runs if run.history.last]
    if not losses:
        return f"{arm.name} has no held-out loss yet."
    if len(losses) > 1:
        spread = spread_of(losses)
        of = f"mean ± standard deviation of {len(losses)} seeds"
        return f"Held-out loss {with_error(spread.mean, spread.deviation)} ({of})."
    (last,) = [run.history.last for run in arm.runs if run.history.last]
    return f"Held-out loss {with_error(last.loss, last.loss_error)} after {last.step:,.0f} steps."


def _loss_of(arm: Arm) -> str:
    losses = [_end(run.history) for run in arm.runs if run.history.last]
    return f"{arm.name} {math.fsum(losses) / len(losses):#.3g}" if losses else f"{arm.name} none"


def _by_seed(arm: Arm) -> dict[Any, RunHistory]:
    """Return one finished run per seed: a repeated seed adds nothing."""
    runs = [run.history for run in reversed(arm.runs)]
    return {run.seed: run for run in runs if run.seed is not None and run.state == "finished" and _end(run) > 0}


def _end(run: RunHistory) -> float:
    return run.last.loss if run.last and run.last.loss is not None else math.nan


def _evaluations(run: RunHistory) -> float:
    return run.last.evaluations or 0.0 if run.last else 0.0


def _join_names(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
