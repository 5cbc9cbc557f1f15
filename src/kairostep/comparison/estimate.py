"""Estimates how long a comparison takes: from earlier runs, or from a few steps of each arm."""

import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass, replace

from kairostep.comparison.conduct import every_run
from kairostep.comparison.plan import Plan
from kairostep.comparison.records import Record, read_record
from kairostep.experiments import Config
from kairostep.progress_meter import duration
from kairostep.training import Run

FIRST_STEPS, TIMED_STEPS = 2, 5  # the first steps are slower: they count only where there is no time for others
TIMED_SECONDS = 10.0  # start no step after this


@dataclass(frozen=True)
class Estimate:
    """The time that the missing runs of an arm take."""

    arm: str
    num_runs: int
    num_finished: int
    seconds_per_step: float
    steps: int  # of a run
    measured: bool  # on earlier runs, otherwise on a few steps

    @property
    def seconds(self) -> float:
        """Seconds of training that are left."""
        return (self.num_runs - self.num_finished) * self.steps * self.seconds_per_step


def estimate(plan: Plan) -> list[Estimate]:
    """Return an estimate for each arm. Only the first seed trains at every rate."""
    found = []
    for arm in plan.names:
        config = plan.configs[arm]
        runs = [run for run in every_run(plan) if run.arm == arm]
        num_finished = sum(run.finished or run.diverged for run in runs)
        num_runs = max(1, len(plan.rates)) + len(plan.seeds) - 1
        known = [_seconds_per_step(record) for run in runs if (record := read_record(run)) is not None]
        measured = [value for value in known if value is not None]
        each = measured[-1] if measured else time_steps(config)
        found.append(Estimate(arm, num_runs, min(num_finished, num_runs), each, config.steps, bool(measured)))
    return found


def _seconds_per_step(record: Record) -> float | None:
    last = list(record.spent.values())[-1] if record.spent else {}
    return last["seconds"] / last["steps"] if "seconds" in last else None


def time_steps(config: Config) -> float:
    """Return the seconds of a step, measured on a few steps whose results are thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(replace(config, output=folder, speed="plain", fid_every=0, held_out_images=0))
        try:
            batches = run.batches.from_step(0)
            seconds = list[float]()
            while len(seconds) < FIRST_STEPS + TIMED_STEPS and sum(seconds) < TIMED_SECONDS:
                began = time.perf_counter()
                run.trainer.step(list(itertools.islice(batches, config.accumulate)))
                run.clock.synchronize()
                seconds.append(time.perf_counter() - began)
            batches.close()
        finally:
            run.release()
    return statistics.median(seconds[FIRST_STEPS:] or seconds[-1:])


def describe_plan(plan: Plan, estimates: list[Estimate], jobs: int = 1) -> str:
    """Return the plan in words, for `--dry_run`."""
    seeds = ", ".join(map(str, plan.seeds))
    lines = [f"{len(plan.arms)} arms, {plan.baseline} the baseline, seeds {seeds}, in {plan.output}"]
    if plan.rates:
        tried = ", ".join(f"{rate:g}" for rate in plan.rates)
        lines.append(f"learning rates {tried}: each on seed {plan.seeds[0]}, other seeds at the best of an arm")
    lines.append("")
    width = max(len(each.arm) for each in estimates)
    for each in estimates:
        source = "by runs that are there" if each.measured else "by some steps, not compiled"
        there = f", {each.num_finished} there" if each.num_finished else ""
        lines.append(
            f"  {each.arm.ljust(width)}  {each.num_runs} x {each.steps} steps{there}: "
            f"about {duration(each.seconds)} of training ({source})"
        )
    total = sum(each.seconds for each in estimates) / jobs
    by = f" in {jobs} processes" if jobs > 1 else ""
    lines += ["", f"about {duration(total)} of training in all{by}; held-out losses, FID and files come on top"]
    return "\n".join(lines)
