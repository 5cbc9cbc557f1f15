"""Writes a comparison as a table with verdicts, as comparison.json and as comparison.csv."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kairostep.comparison.answers import COST_NAMES, ArmAnswer, Reaching
from kairostep.comparison.plan import UNWEIGHTED, WEIGHTED
from kairostep.comparison.records import COSTS, LABELS, Record
from kairostep.files import whole_file
from kairostep.seed_statistics import PairedRatio, ratio_text, spread_of

MISSING = "-"
ONE_RATE = "One learning rate was used for all arms: one that suits the baseline may not suit the others."
HOW_TO_READ = (
    "Ratios to {baseline} of the same seeds, 95 % intervals in parentheses: below 1 is better. Costs are those of "
    "getting to {baseline}'s final {metric}; `> 1.2 (1 of 3)`: one of three seeds got there."
)


@dataclass(frozen=True)
class Outcome:
    """The result of a comparison."""

    baseline: str
    answers: list[ArmAnswer]
    records: Mapping[str, Mapping[int, Record]]
    rate_trials: Mapping[str, Mapping[float, float | None]]  # by arm and rate: the end on the first seed
    notes: list[str]
    choose_by: str = UNWEIGHTED  # the metric of these ends
    judge_by: str = UNWEIGHTED  # the metric of verdicts and costs
    diverged_rates: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by arm, on the first seed

    @property
    def verdicts(self) -> list[str]:
        """One sentence for each arm except the baseline."""
        return [each.verdict for each in self.answers if each.verdict]


def make_notes(rates: Sequence[float], arms: Sequence[ArmAnswer], more: Sequence[str] = ()) -> list[str]:
    """Return what a reader must know besides the numbers."""
    notes = [ONE_RATE] if len(rates) < 2 and len({each.rate for each in arms}) < 2 else []
    one_seed = all(len(each.seeds) < 2 for each in arms)
    if one_seed:
        notes.append("One seed shows no difference beyond the spread of seeds: there is no verdict (--seeds 3).")
    for each in arms:
        if each.diverged:
            places = ", ".join(f"seed {seed} at step {step}" for seed, step in each.diverged.items())
            notes.append(f"{each.arm} diverged: {places}.")
        if each.unfinished:
            notes.append(f"{each.arm} has not finished seed {', '.join(map(str, each.unfinished))}.")
    return [*notes, *more]


def terminal_table(outcome: Outcome) -> str:
    """Return the table, the rates that were tried, the notes and, last, the verdicts."""
    parts = [
        align_columns(rows_of(outcome)),
        HOW_TO_READ.format(baseline=outcome.baseline, metric=LABELS[outcome.judge_by]),
    ]
    if any(len(trials) > 1 for trials in outcome.rate_trials.values()):
        parts.append(align_columns(rate_rows(outcome)))
    ranges = range_rows(outcome)
    parts += [align_columns(ranges)] if len(ranges) > 1 else []
    parts += ["\n".join(outcome.notes)] if outcome.notes else []
    parts += ["\n".join(outcome.verdicts)] if outcome.verdicts else []
    return "\n\n".join(parts)


def rows_of(outcome: Outcome) -> list[list[str]]:
    """Return a heading and a row for each arm."""
    metrics = [metric for metric in LABELS if any(_is_shown(each, metric) for each in outcome.answers)]
    goals = list(dict.fromkeys(r.goal for each in outcome.answers for r in each.reaching if r.target))
    costs = _useful_costs(outcome)
    head = ["arm", "rate", "seeds", *(LABELS[metric] for metric in metrics), *(COST_NAMES[cost] for cost in costs)]
    rows = [[*head, *(f"steps to {goal}" for goal in goals)]]
    for each in outcome.answers:
        own = each.arm == outcome.baseline
        cells = [each.arm, MISSING if each.rate is None else f"{each.rate:g}", str(len(each.seeds))]
        cells += [_final(each, metric, own) for metric in metrics]
        cells += ["1" if own else _ratio(_to_end(each, outcome.judge_by), cost) for cost in costs]
        cells += [_spent(next((r for r in each.reaching if r.goal == goal), None)) for goal in goals]
        rows.append(cells)
    return rows


def _is_shown(each: ArmAnswer, metric: str) -> bool:
    """Return whether an arm has a metric that compares: weighted losses do where the baseline has the weighting."""
    return metric in each.finals and (metric != WEIGHTED or metric in each.ratios)


def _useful_costs(outcome: Outcome) -> list[str]:
    """Return the costs to show: images only if batch sizes differ, evaluations if these or probes do."""
    records = [record for of_arm in outcome.records.values() for record in of_arm.values()]
    sizes = len({record.batch_size for record in records}) > 1
    told = {"steps": True, "images": sizes, "evaluations": sizes or any(record.probes for record in records)}
    return [cost for cost in COSTS if told.get(cost, True)]


def rate_rows(outcome: Outcome) -> list[list[str]]:
    """Return where every rate that was tried ended, the chosen one marked."""
    rates = sorted({rate for trials in outcome.rate_trials.values() for rate in trials})
    chosen = {each.arm: each.rate for each in outcome.answers}
    rows = [[f"{LABELS[outcome.choose_by]} by rate", *(f"{rate:g}" for rate in rates)]]
    for arm, trials in outcome.rate_trials.items():
        diverged = outcome.diverged_rates.get(arm, ())
        texts = ["diverged" if rate in diverged else _number(trials.get(rate)) for rate in rates]
        rows.append([arm, *(text + " *" * (chosen[arm] == rate) for text, rate in zip(texts, rates, strict=True))])
    return rows


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.5g}"


def range_rows(outcome: Outcome) -> list[list[str]]:
    """Return the ratios of held-out losses by range of t."""
    num = max((len(each.ranges) for each in outcome.answers), default=0)
    rows = [["held-out loss by t", *(f"{i / num:g}-{(i + 1) / num:g}" for i in range(num))]]
    return rows + [[each.arm, *map(ratio_text, each.ranges)] for each in outcome.answers if len(each.ranges) == num > 0]


def _to_end(each: ArmAnswer, metric: str) -> Reaching | None:
    return next((reaching for reaching in each.reaching if reaching.metric == metric and reaching.target is None), None)


def _ratio(reaching: Reaching | None, cost: str) -> str:
    ratio = reaching.ratios.get(cost) if reaching else None
    return MISSING if ratio is None else ratio_text(ratio)


def _final(each: ArmAnswer, metric: str, own: bool) -> str:
    if own or metric in ("precision", "recall"):
        values = list(each.finals.get(metric, {}).values())
        return f"{spread_of(values).mean:.5g}" if values else MISSING
    ratio = each.ratios.get(metric)
    return MISSING if ratio is None else ratio_text(ratio)


def _spent(reaching: Reaching | None) -> str:
    found = list(reaching.spent.get("steps", {}).values()) if reaching else []
    return ", ".join("never" if value is None else f"{value:,.0f}" for value in found) or MISSING


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text in aligned columns, with a line below the first row."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def plain(outcome: Outcome) -> dict[str, Any]:
    """Return the comparison as plain data."""
    return {
        "baseline": outcome.baseline,
        "verdicts": outcome.verdicts,
        "notes": outcome.notes,
        "choose_by": outcome.choose_by,
        "judge_by": outcome.judge_by,
        "learning_rates": {
            arm: {f"{rate:g}": value for rate, value in trials.items()} for arm, trials in outcome.rate_trials.items()
        },
        "diverged_rates": {arm: list(rates) for arm, rates in outcome.diverged_rates.items() if rates},
        "arms": {each.arm: _plain_arm(each) for each in outcome.answers},
    }


def _plain_arm(each: ArmAnswer) -> dict[str, Any]:
    return {
        "learning_rate": each.rate,
        "seeds": list(each.seeds),
        "diverged": {str(seed): step for seed, step in each.diverged.items()},
        "unfinished": list(each.unfinished),
        "decided": {-1: "better", 0: None, 1: "worse"}[each.decided],
        "verdict": each.verdict,
        "final": {metric: {str(seed): v for seed, v in values.items()} for metric, values in each.finals.items()},
        "final_ratio": {metric: _plain_ratio(ratio) for metric, ratio in each.ratios.items()},
        "loss_by_t_ratio": [_plain_ratio(ratio) for ratio in each.ranges],
        "reaching": [
            {
                "metric": reaching.metric,
                "target": reaching.target.value if reaching.target else "the baseline's final value",
                "spent": {c: {str(seed): v for seed, v in by.items()} for c, by in reaching.spent.items()},
                "ratio": {cost: _plain_ratio(ratio) for cost, ratio in reaching.ratios.items()},
            }
            for reaching in each.reaching
        ],
    }


def _plain_ratio(ratio: PairedRatio) -> dict[str, Any]:
    by_seed = {str(seed): {"value": one.value, "reached": one.reached} for seed, one in ratio.by_seed.items()}
    return {"mean": ratio.mean, "interval": ratio.interval, "by_seed": by_seed}


def csv_text(outcome: Outcome) -> str:
    """Return the comparison as CSV, one row for each run."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["arm", "learning_rate", "seed", "state", *COSTS, *LABELS])
    rates = {each.arm: each.rate for each in outcome.answers}
    for arm, records in outcome.records.items():
        for seed, record in records.items():
            spent = list(record.spent.values())[-1] if record.spent else {}
            ends = [list(values.values())[-1] if (values := record.values.get(name)) else "" for name in LABELS]
            writer.writerow([arm, rates[arm], seed, record.state, *(spent.get(cost, "") for cost in COSTS), *ends])
    return file.getvalue()


def write_files(outcome: Outcome, folder: Path) -> list[Path]:
    """Write comparison.json and comparison.csv, each whole or not at all, and return their paths."""
    texts = {"comparison.json": json.dumps(plain(outcome), indent=1) + "\n", "comparison.csv": csv_text(outcome)}
    for name, text in texts.items():
        with whole_file(folder / name) as temporary:
            temporary.write_text(text)
    return [folder / name for name in texts]
