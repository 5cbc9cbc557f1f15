"""What the outcomes of exact_mixture.py amount to: ratios to uniform with intervals, paired by seed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from mixture_training import NUM_CHECKPOINTS, Outcome
from mixtures import METRICS
from scipy import stats
from torch import Tensor

NUM_DENSE = 400  # points of a smoothed curve
NUM_LAST = 4  # checkpoints that an extrapolation goes by
NOT_ROUNDING = 1.001  # a ratio that rounding errors alone do not reach
COST_CAP = 4.0  # times the budget: no extrapolation goes further

Outcomes = dict[str, dict[str, Outcome]]
"""By setting, then by arm."""


@dataclass(frozen=True)
class Ratio:
    """A ratio to uniform, below 1 where the arm is better, with its 95 % interval."""

    value: float
    low: float
    high: float
    extrapolated: bool = False  # in some setting the arm did not reach uniform's value while it trained
    capped: bool = False  # and in some not within the cap

    @classmethod
    def of(cls, logs: Tensor, **marks: bool) -> "Ratio":
        """Return the ratio whose log is the first of logs (S + 1,), the others being without one seed each."""
        value, without = logs[0], logs[1:]
        num = len(without)
        error = ((num - 1) / num * (without - without.mean()).square().sum()).sqrt()  # the jackknife's
        half = float(error) * float(stats.t.ppf(0.975, num - 1))
        return cls(math.exp(value), math.exp(value - half), math.exp(value + half), **marks)

    def __str__(self) -> str:
        """Return value and half interval, marked where it is worse than uniform or beyond what was trained."""
        over, beyond = ">" if self.capped else "", "~" if self.extrapolated and not self.capped else ""
        worse = " worse" if self.low > NOT_ROUNDING else ""
        return f"{over}{beyond}{self.value:.2f} ±{(self.high - self.low) / 2:.2f}{worse}"


@dataclass(frozen=True)
class Curves:
    """The log excess by log evaluations, of all seeds' mean and of the means without one seed each."""

    log_evaluations: Tensor  # (C,)
    log_excess: Tensor  # (S + 1, C)

    @classmethod
    def of(cls, outcome: Outcome, metric: int) -> "Curves":
        """Return the curves of one metric as they were measured."""
        by_seed = torch.tensor(outcome.excess, dtype=torch.float64)[:, :, metric].log().T  # (S, C)
        return cls(torch.tensor(outcome.evaluations, dtype=torch.float64).log(), with_and_without_each(by_seed))

    def smooth(self) -> "Curves":
        """Return cubic fits from the second checkpoint on, which follow the curves to about 1 %, as dense curves."""
        x, y = self.log_evaluations[1:], self.log_excess[:, 1:]
        dense = torch.linspace(float(x[0]), float(x[-1]), NUM_DENSE, dtype=x.dtype)
        powers, dense_powers = (torch.stack([(z - x.mean()) ** k for k in range(4)]) for z in (x, dense))  # (4, C)
        return Curves(dense, y @ torch.linalg.pinv(powers) @ dense_powers)

    def at(self, log_evaluations: Tensor) -> Tensor:
        """Return the log excess (S + 1,) by so many evaluations, ()."""
        x = self.log_evaluations
        right = int((x < log_evaluations).sum().clamp(1, len(x) - 1))
        share = (log_evaluations - x[right - 1]) / (x[right] - x[right - 1])
        return torch.lerp(self.log_excess[:, right - 1], self.log_excess[:, right], share)

    def first_below(self, target: Tensor) -> Tensor:
        """Return the log evaluations (S + 1,) by which the targets (S + 1,) are reached, or infinity."""
        x, y = self.log_evaluations, self.log_excess
        reached = y <= target[:, None]
        right = reached.int().argmax(1).clamp(min=1)  # (S + 1,)
        high, low = y.gather(1, right[:, None] - 1)[:, 0], y.gather(1, right[:, None])[:, 0]
        share = ((high - target) / (high - low).clamp(min=1e-12)).clamp(0, 1)
        return torch.where(reached.any(1), torch.lerp(x[right - 1], x[right], share), torch.inf)

    def beyond(self, target: Tensor) -> Tensor:
        """Return when the targets (S + 1,) would be reached if the last checkpoints' power law went on."""
        x, y = self.log_evaluations[-NUM_LAST:], self.log_excess[:, -NUM_LAST:]
        around = x - x.mean()
        slope = (y @ around / around.square().sum()).clamp(max=-1e-3)
        return (x.mean() + (target - y.mean(1)) / slope).clamp(min=float(x[-1]))


def with_and_without_each(by_seed: Tensor) -> Tensor:
    """Return the mean over seeds of (S, ...) and the means without one of them each: (S + 1, ...)."""
    mean, num = by_seed.mean(0, keepdim=True), len(by_seed)
    return torch.cat([mean, (num * mean - by_seed) / (num - 1)])


def log_costs(outcome: Outcome, base: Outcome, metric: int) -> Tensor:
    """Return the logs of evaluations to reach what uniform ends with, as ratios to uniform's budget, (S + 1,)."""
    curves, log_budget = Curves.of(outcome, metric), math.log(budget(base))
    target = Curves.of(base, metric).smooth().at(torch.tensor(log_budget))
    within = curves.smooth().first_below(target)
    log_cost = torch.where(within.isfinite(), within, curves.beyond(target))
    return (log_cost - log_budget).clamp(max=math.log(COST_CAP))


def log_finals(outcome: Outcome, base: Outcome, metric: int) -> Tensor:
    """Return the logs of ratios to uniform's excess at equal evaluations, (S + 1,)."""
    log_budget = torch.tensor(math.log(budget(base)))
    ours, theirs = (Curves.of(one, metric).smooth().at(log_budget) for one in (outcome, base))
    return ours - theirs


def log_distances(outcome: Outcome, base: Outcome, metric: int = 0) -> Tensor:
    """Return the logs of ratios to uniform's sliced Wasserstein distance at equal evaluations, (S + 1,)."""
    ours, theirs = (torch.tensor(one.distance, dtype=torch.float64).log() for one in (outcome, base))
    return with_and_without_each(ours - theirs)


def cost(outcomes: Outcomes, settings: Sequence[str], arm: str, base: str, metric: int) -> Ratio:
    """Return the cost ratio of an arm, the geometric mean over settings."""
    logs = torch.stack([log_costs(outcomes[name][arm], outcomes[name][base], metric) for name in settings])
    most = [math.log(outcomes[name][arm].evaluations[-1] / budget(outcomes[name][base])) for name in settings]
    beyond = bool((logs[:, 0] > torch.tensor(most) + 1e-9).any())
    return Ratio.of(logs.mean(0), extrapolated=beyond, capped=bool((logs[:, 0] >= math.log(COST_CAP)).any()))


def final(
    outcomes: Outcomes,
    settings: Sequence[str],
    arm: str,
    base: str,
    metric: int,
    measure: Callable[[Outcome, Outcome, int], Tensor] = log_finals,
) -> Ratio:
    """Return the ratio of an arm's final value to uniform's, the geometric mean over settings."""
    return Ratio.of(
        torch.stack([measure(outcomes[name][arm], outcomes[name][base], metric) for name in settings]).mean(0)
    )


def budget(base: Outcome) -> float:
    """Return the evaluations that all arms are compared at."""
    return base.evaluations[NUM_CHECKPOINTS - 1]


HEADER = ["arm", *(f"cost, {name}" for name in METRICS), *(f"final, {name}" for name in METRICS)]
HEADER += ["sliced Wasserstein", "probes", "seconds"]
LEGEND = """Ratios to uniform, below 1 is better, ± half the 95 % interval over paired seeds; "worse": wholly above 1.
cost: network evaluations, probes included, to reach what uniform ends with; ~ extrapolated in some setting, > capped.
final: excess at equal evaluations. noise: mean squared error of the noise over uniform t; bound: with the weights of
the variational bound; log-SNR: geometric mean over levels of log-SNR. seconds: of training all seeds in all settings on
one core."""


def rows_of(outcomes: Outcomes, arms: Sequence[str], base: str) -> list[list[str]]:
    """Return the table over all settings together."""
    settings = list(outcomes)
    rows = []
    for arm in arms:
        seconds = f"{sum(outcomes[name][arm].seconds for name in settings):.0f}"
        probes = f"{sum(outcomes[name][arm].probe_share for name in settings) / len(settings):.1%}"
        if arm == base:
            rows.append([arm, *["1"] * (2 * len(METRICS) + 1), probes, seconds])
            continue
        ratios = [cost(outcomes, settings, arm, base, metric) for metric in range(len(METRICS))]
        ratios += [final(outcomes, settings, arm, base, metric) for metric in range(len(METRICS))]
        ratios += [final(outcomes, settings, arm, base, 0, log_distances)]
        rows.append([arm, *map(str, ratios), probes, seconds])
    return rows


def rows_by_setting(outcomes: Outcomes, arms: Sequence[str], base: str) -> list[list[str]]:
    """Return the cost in the noise for each setting; for uniform, what it ends with."""
    rows = [[f"{base} (excess)"]]
    for outcome in (outcomes[name][base] for name in outcomes):
        rows[0].append(f"{float(Curves.of(outcome, 0).log_excess[0, NUM_CHECKPOINTS - 1].exp()):.2e}")
    for arm in arms:
        if arm != base:
            rows.append([arm, *(str(cost(outcomes, [name], arm, base, 0)) for name in outcomes)])
    return rows


def as_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as markdown whose columns line up."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in lines
    )


def as_record(outcomes: Outcomes, arms: Sequence[str], base: str) -> list[dict[str, object]]:
    """Return the ratios of each arm in each setting and over all."""
    record = []
    for group in ([name] for name in outcomes), [list(outcomes)]:
        for settings in group:
            for arm in arms:
                entry: dict[str, object] = {"settings": settings, "arm": arm}
                for metric, name in enumerate(METRICS):
                    entry[f"cost {name}"] = vars(cost(outcomes, settings, arm, base, metric))
                    entry[f"final {name}"] = vars(final(outcomes, settings, arm, base, metric))
                entry["sliced Wasserstein"] = vars(final(outcomes, settings, arm, base, 0, log_distances))
                record.append(entry)
    return record
