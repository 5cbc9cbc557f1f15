"""Reads the folder of a comparison and returns its answers and notes, and writes its page."""

from collections.abc import Sequence
from pathlib import Path

from kairostep.comparison.answers import ArmAnswer, Target, answer, verdict_metric
from kairostep.comparison.conduct import chosen_rates, records_of
from kairostep.comparison.plan import NAME, Plan
from kairostep.comparison.records import read_record
from kairostep.comparison.stored_plan import read_plan
from kairostep.comparison.tables import Outcome, make_notes
from kairostep.reports.report import Comparison, write_report
from kairostep.reports.verdict import Verdict

PAGE = "comparison.html"


def outcome_of(plan: Plan, targets: Sequence[Target] = (), *, notes: Sequence[str] = ()) -> Outcome:
    """Return what the runs of a comparison show so far."""
    rates = chosen_rates(plan)
    records = records_of(plan, rates)
    answers = answer(records, plan.baseline, targets, rates)
    diverged = {arm: [run.rate for run in plan.runs(arm, plan.seeds[0]) if run.diverged] for arm in plan.names}
    never = [arm for arm in plan.names if arm not in rates and len(diverged[arm]) == len(plan.rates)]
    told = make_notes(plan.rates, answers, [*(f"{arm} diverged at every learning rate." for arm in never), *notes])
    return Outcome(
        plan.baseline, answers, records, _trials(plan), told, plan.choose_by, verdict_metric(records), diverged
    )


def _trials(plan: Plan) -> dict[str, dict[float, float | None]]:
    """Return where each rate ended on the first seed, by the metric that chooses."""
    found: dict[str, dict[float, float | None]] = {}
    for arm in plan.names:
        for run in plan.runs(arm, plan.seeds[0]):
            record = read_record(run)
            found.setdefault(arm, {})[run.rate] = record.final(plan.choose_by) if record is not None else None
    return found


def plans_in(folder: Path) -> dict[str, Plan]:
    """Return the comparisons in a folder by name: its own under "", or one for each task."""
    if not folder.is_dir():
        raise ValueError(f"a comparison must be a folder, got {folder}: name what `kairostep compare` wrote")
    if (folder / NAME).exists():
        return {"": read_plan(folder)}
    found = {path.parent.name: read_plan(path.parent) for path in sorted(folder.glob(f"*/{NAME}"))}
    return found or {"": read_plan(folder)}  # raises and says what is missing


def headline(answers: Sequence[ArmAnswer], baseline: str, judge_by: str) -> str:
    """Return one line on all arms."""
    others = [each for each in answers if each.arm != baseline]
    if all(len(each.seeds) < 2 for each in others):
        return "No verdict: no arm has two finished seeds."
    words = {-1: f"Better than {baseline}", 1: f"Worse than {baseline}", 0: "No difference that these seeds can show"}
    judged = [each for each in others if (ratio := each.ratios.get(judge_by)) is not None and len(ratio.by_seed) > 1]
    named = {word: [each.arm for each in judged if each.decided == sign] for sign, word in words.items()}
    named["No verdict"] = [each.arm for each in others if each not in judged]
    return " ".join(f"{word}: {', '.join(arms)}." for word, arms in named.items() if arms)


def write_comparison_page(plan: Plan, outcome: Outcome) -> Path:
    """Write the page of a comparison: verdicts first, runs named by arm and seed, each arm at its rate."""
    rates = chosen_rates(plan)
    runs = [
        plan.run(arm, seed, each.rate or rates[arm])
        for each in outcome.answers
        for arm, seed in ((each.arm, seed) for seed in outcome.records[each.arm])
    ]
    return write_report(
        [run.directory for run in runs],
        plan.output / PAGE,
        Comparison(
            {run.directory.absolute(): run.name for run in runs},
            plan.baseline,
            Verdict(headline(outcome.answers, plan.baseline, outcome.judge_by), [*outcome.verdicts, *outcome.notes]),
            plan.output.absolute().name,
        ),
    )
