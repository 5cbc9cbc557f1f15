"""The results of a comparison as data: each arm against the baseline, seed by seed, and a verdict in one sentence."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kairostep.comparison.plan import FALLING, UNWEIGHTED, WEIGHTED
from kairostep.comparison.records import COSTS, LABELS, Record
from kairostep.registry import unknown
from kairostep.seed_statistics import PairedRatio, Ratio, cost_ratio, cost_to_reach, paired_ratio, ratio_text

NO_DIFFERENCE = "no difference that these seeds can show"
COST_NAMES = {"steps": "steps", "images": "images", "evaluations": "network evaluations", "seconds": "seconds"}
Records = Mapping[int, Record]  # by seed


@dataclass(frozen=True)
class Target:
    """A value of a metric to reach."""

    metric: str
    value: float

    def __str__(self) -> str:
        return f"{LABELS[self.metric]} {self.value:g}"


@dataclass(frozen=True)
class Reaching:
    """What it costs an arm to reach a value of a metric."""

    metric: str
    target: Target | None  # None: the baseline's final value
    ratios: Mapping[str, PairedRatio]  # by cost, to the baseline's
    spent: Mapping[str, Mapping[int, float | None]]  # by cost and seed, None if the value was not reached

    @property
    def goal(self) -> str:
        """The value to reach, in words."""
        return str(self.target) if self.target else f"the baseline's {LABELS[self.metric]}"


@dataclass(frozen=True)
class ArmAnswer:
    """One arm compared with the baseline."""

    arm: str
    rate: float | None
    seeds: tuple[int, ...]  # finished
    finals: Mapping[str, Mapping[int, float]]  # by metric and seed
    ratios: Mapping[str, PairedRatio]  # by metric: final values over the baseline's
    ranges: tuple[PairedRatio, ...]  # final held-out loss over the baseline's in each range of t, low noise first
    reaching: tuple[Reaching, ...]
    diverged: Mapping[int, int]  # seed -> step
    unfinished: tuple[int, ...]  # seeds
    decided: int  # -1 better, 1 worse, 0 undecided
    verdict: str


def parse_target(text: str) -> Target:
    """Return the target of `fid=40`."""
    metric, equals, value = text.partition("=")
    if not equals or not metric:
        raise ValueError(f"a target must be METRIC=VALUE, got {text!r}: pass for instance --target fid=40")
    if metric not in FALLING:
        raise ValueError(f"a target must be of a metric that falls: {unknown('metric', metric, FALLING)}")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"a target must be a number above 0, got {value!r}: pass for instance --target {metric}=40")
    return Target(metric, number)


def answer(
    arms: Mapping[str, Records], baseline: str, targets: Sequence[Target] = (), rates: Mapping[str, float] | None = None
) -> list[ArmAnswer]:
    """Return the answer of each arm, that of the baseline first."""
    base, metric = arms[baseline], verdict_metric(arms)
    ordered = [baseline, *(arm for arm in arms if arm != baseline)]
    return [_answer(arm, arms[arm], baseline, base, targets, (rates or {}).get(arm), metric) for arm in ordered]


def verdict_metric(arms: Mapping[str, Records]) -> str:
    """Return the metric of verdicts: what is trained where all arms share a weighting, else the unweighted loss."""
    return WEIGHTED if _weighting_shared_by(*arms.values()) else UNWEIGHTED


def _weighting_shared_by(*arms: Records) -> str:
    """Return the weighting of the loss of all arms, empty if they train without, or with several."""
    found = {record.weighting for records in arms for record in records.values()} - {None}
    return found.pop() or "" if len(found) == 1 else ""


def _answer(
    arm: str,
    records: Records,
    baseline: str,
    base: Records,
    targets: Sequence[Target],
    rate: float | None,
    judge_by: str,
) -> ArmAnswer:
    is_weighted, shares = any(each.weighting for each in records.values()), _weighting_shared_by(records, base)
    finals = {metric: _finals(records, metric) for metric in LABELS if metric != WEIGHTED or is_weighted}
    finals = {metric: values for metric, values in finals.items() if values}
    own = arm == baseline
    paired = [metric for metric in finals if metric != WEIGHTED or shares]
    ratios = {metric: paired_ratio(finals[metric], _finals(base, metric)) for metric in paired}
    reaching = [_reaching(records, base, metric, None) for metric in FALLING if metric in paired]
    reaching += [_reaching(records, base, each.metric, each) for each in targets if each.metric != WEIGHTED or shares]
    found = ArmAnswer(
        arm,
        rate,
        tuple(seed for seed, record in records.items() if record.state == "finished"),
        finals,
        {} if own else {metric: ratio for metric, ratio in ratios.items() if ratio is not None},
        () if own else _by_range(records, base),
        tuple(each for each in reaching if each is not None),
        {seed: record.stopped or 0 for seed, record in records.items() if record.state == "diverged"},
        tuple(seed for seed, record in records.items() if record.state == "unfinished"),
        0,
        "",
    )
    decided, sentence = (0, "") if own else judge(found, baseline, _cost_of(records, base), judge_by)
    return ArmAnswer(**{**vars(found), "decided": decided, "verdict": sentence})


def _finals(records: Records, metric: str) -> dict[int, float]:
    values = {seed: record.final(metric) for seed, record in records.items()}
    return {seed: value for seed, value in values.items() if value is not None}


def _by_range(records: Records, base: Records) -> tuple[PairedRatio, ...]:
    found = []
    num = max((len(record.ranges) for record in records.values()), default=0)
    for i in range(num):
        own, other = (
            {s: r.ranges[i] for s, r in of.items() if len(r.ranges) > i and r.state == "finished"}
            for of in (records, base)
        )
        ratio = paired_ratio(own, other)
        found += [ratio] if ratio else []
    return tuple(found)


def _reaching(records: Records, base: Records, metric: str, target: Target | None) -> Reaching | None:
    ratios: dict[str, PairedRatio] = {}
    spent: dict[str, dict[int, float | None]] = {}
    for cost in COSTS:
        found: dict[int, Ratio] = {}
        for seed, record in records.items():
            other = base.get(seed)
            goal = target.value if target else other.final(metric) if other else None
            if goal is None or record.state == "diverged" or metric not in record.values:
                continue
            spent.setdefault(cost, {})[seed] = cost_to_reach(*record.curve(metric, cost), goal)
            if other is None or record.state != "finished" or (cost == "seconds" and record.place != other.place):
                continue
            ratio = cost_ratio(record.curve(metric, cost), other.curve(metric, cost), goal)
            found |= {seed: ratio} if ratio else {}
        if found:
            ratios[cost] = PairedRatio(found)
    return Reaching(metric, target, ratios, spent) if spent else None


def _cost_of(records: Records, base: Records) -> str:
    """Return the unit of an arm's cost: steps if each costs the same, otherwise evaluations, including probes."""
    both = [*records.values(), *base.values()]
    alike = len({record.batch_size for record in both}) == 1 and not any(record.probes for record in both)
    return "steps" if alike else "evaluations"


def judge(found: ArmAnswer, baseline: str, cost: str, metric: str) -> tuple[int, str]:
    """Return whether an arm is better (-1) or worse (1) beyond the spread of seeds, and one sentence on it."""
    if found.diverged and not found.seeds:
        steps = ", ".join(str(step) for step in found.diverged.values())
        return 0, f"{found.arm} diverged on every seed, at step {steps}: nothing to compare"
    ratio = found.ratios.get(metric)
    if ratio is None:
        return 0, f"{found.arm} has no finished seed that {baseline} has too: no verdict"
    reached = next((each for each in found.reaching if each.metric == metric and each.target is None), None)
    needed = reached.ratios.get(cost) if reached else None
    if needed is not None and needed.reached and len(needed.by_seed) == len(ratio.by_seed):
        told = f"{found.arm} needs {ratio_text(needed)} of {baseline}'s {COST_NAMES[cost]} to the same {LABELS[metric]}"
        ratio = needed
    else:
        told = f"{found.arm} ends at {ratio_text(ratio)} of {baseline}'s {LABELS[metric]}"
    num = len(ratio.by_seed)
    also = f"; it diverged on seed {', '.join(map(str, found.diverged))}" if found.diverged else ""
    if num == 1:
        return 0, f"{told}, one seed: no verdict{also}"
    word = {-1: "better", 0: NO_DIFFERENCE, 1: "worse"}[ratio.decided]
    return ratio.decided, f"{told}, {num} seeds: {word}{also}"


def best_rates(
    records: Callable[[str, float], Record | None],
    arms: Sequence[str],
    rates: Sequence[float],
    metric: str = UNWEIGHTED,
) -> dict[str, float]:
    """Return the rate with the lowest final value for each arm. Arms that finished at no rate are left out."""
    chosen = {}
    for arm in arms:
        found = {rate: records(arm, rate) for rate in rates}
        ends = {rate: record.final(metric) for rate, record in found.items() if record is not None}
        known = {rate: value for rate, value in ends.items() if value is not None}
        if known:
            chosen[arm] = min(known, key=lambda rate: known[rate])
    return chosen
