"""`kairostep compare`: which sampler and weighting suit these data, and is the difference real?"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kairostep.comparison.answers import Target
    from kairostep.comparison.arms import ComparisonFile
    from kairostep.comparison.plan import Plan
    from kairostep.comparison.tables import Outcome

TEXT = """\
Trains arms with the same seeds, data, initial weights and noise, and says which is better, as in

  kairostep compare digits --arms uniform,root_loss --seeds 3 --output comparisons/digits
  kairostep compare images --data.folder=photos --arms uniform,"logit_normal --weighting=min_snr" --output compared
  kairostep compare --arms experiments/comparisons/ablation-S.yaml --data.path=cifar10.npz --output compared
  kairostep compare --table comparisons/digits [--baseline root_loss]

An arm is a sampler, or one with settings of its own after it; the first arm is the baseline. Settings of all arms are
--key=value: `kairostep train --help` lists them. The same command goes on where it was stopped, and may add arms and
seeds.
"""
PARSER = {
    "help": "compare samplers on your data",
    "usage": "kairostep compare PRESET | --config FILE --arms ARMS --output DIR [--seeds 3] [--key=value ...]",
    "description": TEXT,
    "allow_abbrev": False,
}
DEFAULT_SEEDS = "3"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_SEEDS = 1000
FOR_TRAINING = ("config", "arms", "seeds", "learning_rates", "budget", "drop", "jobs", "dry_run", "output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments other than settings."""
    add = parser.add_argument
    add("--config", type=Path, help="a YAML file of settings instead of a preset, such as config.yaml of a run")
    add("--arms", help='uniform,root_loss,"logit_normal --weighting=min_snr", or a YAML file of named arms')
    add("--baseline", help="arm that the others are measured by (the first)")
    add("--seeds", help="how many (3), or which: 0,1,5, or 7, for one")
    add("--learning_rates", help="as in 4e-4,8e-4: each arm is compared at its best, chosen on the first seed")
    add(
        "--choose_by",
        choices=["loss", "weighted_loss", "bound", "fid", "kid"],
        help="metric whose final value chooses it (weighted_loss if all arms share a weighting, else loss)",
    )
    add("--target", action="append", metavar="METRIC=VALUE", help="also tell what it takes to get there")
    add("--budget", help="time for this call, as in 30m or 2h: no run starts that would end later")
    add("--drop", action="store_true", help="no further seeds for arms that are worse already")
    add("--jobs", type=int, default=1, help="runs that train at once, one process and GPU each (1)")
    add("--dry_run", action="store_true", help="show what would be trained and how long it takes")
    add("--table", type=Path, metavar="DIR", help="only show the comparison in a folder, as it is now")
    add("--output", type=Path, help="folder of the comparison")
    parser.set_defaults(run=run)


def run(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Train what is missing and show the comparison."""
    from kairostep.comparison.answers import parse_target

    targets = [parse_target(text) for text in known.target or ()]
    if known.table is not None:
        show_table(known, settings, targets)
        return
    from kairostep.comparison.stored_plan import take_up

    plans, targets = read_plans(known, settings)
    plans = {name: take_up(plan, known.choose_by) for name, plan in plans.items()}
    budget = seconds_of(known.budget)
    if known.jobs < 1:
        raise ValueError(f"--jobs must be a whole number of at least 1, got {known.jobs}: pass for instance --jobs 2")
    if known.dry_run:
        show_plans(plans, known.jobs)
        return
    train_and_show(plans, known, targets, budget)


def read_plans(known: argparse.Namespace, settings: Sequence[str]) -> "tuple[dict[str, Plan], list[Target]]":
    """Return the targets, and the plan of each task by the name of its folder."""
    from kairostep.comparison.answers import parse_target
    from kairostep.comparison.arms import read_arms
    from kairostep.comparison.plan import make_plan
    from kairostep.experiments.command_line import take_preset
    from kairostep.experiments.config import load

    name, settings = take_preset(settings)
    if known.arms is None:
        raise ValueError("compare needs arms, got none: pass for instance --arms uniform,root_loss")
    if known.output is None:
        raise ValueError("compare needs a folder to work in, got none: pass for instance --output comparisons/mine")
    file = read_arms(known.arms)
    if name is None and known.config is None:
        name = file.preset
    if (name is None) == (known.config is None):
        raise ValueError("compare takes a preset or --config FILE: `kairostep presets` lists the presets")
    base = name or load(known.config, pipes=True)  # once: a pipe has nothing to read a second time
    tasks = file.tasks or {"": ()}
    plans = {
        task: make_plan(
            known.output / task,
            base,
            file.arms,
            [*file.settings, *own, *settings],
            seeds=seeds_of(known.seeds or file.seeds or DEFAULT_SEEDS),
            rates=rates_of(known.learning_rates, file),
            baseline=known.baseline or file.baseline,
        )
        for task, own in tasks.items()
    }
    targets = [*(known.target or ()), *file.targets]
    check_targets(targets, plans)
    if known.choose_by in ("fid", "kid") and not all(_measures_fid(plan) for plan in plans.values()):
        raise ValueError(f"--choose_by {known.choose_by} needs FID, got runs without: pass --fid_every, such as 5000")
    return plans, [parse_target(text) for text in targets]


def check_targets(texts: Sequence[str], plans: "dict[str, Plan]") -> None:
    """Raise ValueError for a target that no run would measure."""
    from kairostep.comparison.answers import parse_target

    for text in texts:
        target = parse_target(text)
        if target.metric in ("fid", "kid") and not all(_measures_fid(plan) for plan in plans.values()):
            raise ValueError(
                f"--target {text} needs FID along the way, got runs without: pass --fid_every, such as 500"
            )


def _measures_fid(plan: "Plan") -> bool:
    return plan.configs[plan.baseline].fid_every > 0


def rates_of(text: str | None, file: "ComparisonFile") -> tuple[float, ...]:
    """Return the learning rates of the command line, or of the file if there are none."""
    from kairostep.comparison.arms import parse_rates

    return file.learning_rates if text is None else parse_rates(text)


def seeds_of(text: str) -> tuple[int, ...]:
    """Return 0, 1, 2 for `3`, and the seeds themselves for a list such as `0,1,5` or `7,`."""
    words = text.removesuffix(",").split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"--seeds must be a number or a list such as 0,1,2, got {text!r}: pass for instance --seeds 3")
    numbers = [int(word) for word in words]
    if len(numbers) == 1 and not text.endswith(","):
        if not 1 <= numbers[0] <= MAX_SEEDS:
            raise ValueError(f"--seeds must be in 1..{MAX_SEEDS}, got {numbers[0]}: pass for instance --seeds 3")
        return tuple(range(numbers[0]))
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"seeds must differ, got {text!r}: name each once")
    return tuple(numbers)


def seconds_of(text: str | None) -> float:
    """Return the seconds of `30m`, `2h` or `1h30m`."""
    if text is None:
        return math.inf
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    total = sum(float(number) * UNITS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or not total:
        raise ValueError(f"--budget must be a time such as 90s, 30m or 1h30m, got {text!r}: pass for instance 30m")
    return total


def show_plans(plans: "dict[str, Plan]", jobs: int) -> None:
    """Print what would be trained."""
    from kairostep.comparison.estimate import describe_plan, estimate

    if any(not (plan.output / "runs" / arm).exists() for plan in plans.values() for arm in plan.names):
        print("timing some steps of each arm that has no runs yet", file=sys.stderr, flush=True)
    for plan in plans.values():
        print(describe_plan(plan, estimate(plan), jobs), flush=True)


def train_and_show(plans: "dict[str, Plan]", known: argparse.Namespace, targets: "list[Target]", budget: float) -> None:
    """Train the missing runs of each comparison, then show all comparisons."""
    from kairostep.commands.failures import RUN_ERROR, fail
    from kairostep.comparison.conduct import Work, conduct
    from kairostep.comparison.outcome import outcome_of
    from kairostep.comparison.stored_plan import write_plan
    from kairostep.runs.directory import alone_in
    from kairostep.training import RunError

    if any(config.features for plan in plans.values() for config in plan.configs.values()):
        sys.path.append("")  # find modules in the working directory, as `python -m` does
    work = Work(known.jobs, budget)
    shown = []
    for task, plan in plans.items():
        with alone_in(plan.output):
            write_plan(plan)
            try:
                notes = conduct(plan, work, drop=known.drop)
            except RunError as error:
                fail(str(error), RUN_ERROR)
            shown.append((task, plan, outcome_of(plan, targets, notes=notes)))
    for task, plan, outcome in shown:
        show(task, plan, outcome)


def show_table(known: argparse.Namespace, settings: Sequence[str], targets: "list[Target]") -> None:
    """Print the comparisons in a folder, whatever state they are in, beside any of their arms."""
    from kairostep.comparison.log_tables import write_tables
    from kairostep.comparison.logs import has_logs
    from kairostep.comparison.outcome import outcome_of, plans_in
    from kairostep.registry import unknown

    folder = known.table
    given = [f"--{name}" for name in FOR_TRAINING if getattr(known, name) != known.parser.get_default(name)]
    studies = [place for place in (folder, *sorted(folder.glob("*"))) if has_logs(place)]
    given += ["--baseline"] if studies and known.baseline else []
    if settings or given:
        raise ValueError(f"--table shows what is there, got {[*settings, *given][0]}: leave it out")
    for place in studies:
        print(f"\n{place}\n\n{write_tables(place)}", flush=True)
    for task, plan in plans_in(folder).items() if not studies else ():
        if known.choose_by not in (None, plan.choose_by):
            raise ValueError(
                f"--table shows what was chosen by {plan.choose_by}, got --choose_by {known.choose_by}: leave it out"
            )
        if known.baseline not in (None, *plan.names):
            raise ValueError(f"the baseline must be one of the arms: {unknown('arm', known.baseline, plan.names)}")
        plan = replace(plan, baseline=known.baseline or plan.baseline)
        show(task, plan, outcome_of(plan, targets), page=False)


def show(task: str, plan: "Plan", outcome: "Outcome", *, page: bool = True) -> None:
    """Print a comparison and write its files, and its page if plotly is installed."""
    from kairostep.comparison.outcome import write_comparison_page
    from kairostep.comparison.tables import terminal_table, write_files

    title = f"{task}\n\n" if task else ""
    print(f"\n{title}{terminal_table(outcome)}", flush=True)
    if not page:
        return
    files = write_files(outcome, plan.output)
    if not any(outcome.records.values()):
        return
    try:
        files.append(write_comparison_page(plan, outcome))
    except ModuleNotFoundError as error:
        print(f"kairostep: note: no page: {error}", file=sys.stderr)
    print("\nalso in " + ", ".join(map(str, files)), flush=True)
