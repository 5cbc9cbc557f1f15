"""Trains the missing runs of a comparison, one after the other or in several processes."""

import gc
import json
import math
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from kairostep.comparison.answers import answer, best_rates, verdict_metric
from kairostep.comparison.plan import DATA, DIVERGED, Plan, PlannedRun
from kairostep.comparison.records import Record, read_record
from kairostep.comparison.workers import passing_on_sigterm, visible_gpus, work_for_parent, worker_pool
from kairostep.files import whole_file
from kairostep.progress_meter import duration
from kairostep.runs.checkpoint import Checkpoints
from kairostep.runs.directory import check_same_data
from kairostep.training import Run
from kairostep.training.run_errors import Diverged, RunError

GO_ON = "the same command goes on"


@dataclass
class Work:
    """Trains runs until the time is up.

    Args:
        jobs: How many runs train at once. If several, each has a process of its own.
        budget: Seconds from now. No run starts that would end later, going by the longest so far; the first run always
            starts.
    """

    jobs: int = 1
    budget: float = math.inf
    began: float = field(default_factory=time.monotonic)
    longest: float = 0.0
    left: list[PlannedRun] = field(default_factory=list)  # not started

    def train(self, runs: Sequence[PlannedRun]) -> bool:
        """Train the runs that are neither finished nor diverged. Return False if time ran out before the last."""
        waiting = [run for run in runs if not (run.finished or run.diverged)]
        if self.jobs == 1:
            for number, run in enumerate(waiting):
                if not self._has_time():
                    self.left += waiting[number:]
                    return False
                self._took(train_run(run))
            return True
        with passing_on_sigterm():
            return self._train_in_processes(waiting) if waiting else True

    def _train_in_processes(self, waiting: list[PlannedRun]) -> bool:
        """Give each worker a run, then the next one."""
        jobs = min(self.jobs, max(1, len(waiting)))
        pool = worker_pool(jobs, visible_gpus())
        busy: set[Future[float]] = set()
        try:
            while waiting or busy:
                while waiting and len(busy) < jobs and self._has_time():
                    busy.add(pool.submit(work_for_parent, train_run, waiting.pop(0)))
                if not busy:
                    break
                done, busy = wait(busy, return_when=FIRST_COMPLETED)
                for future in done:
                    self._took(future.result())
        except BrokenProcessPool as error:
            ended = "a process that trains ended without a word, as one does that is out of memory"
            raise RunError(f"{ended}; {GO_ON}") from error
        finally:
            pool.shutdown(cancel_futures=True)
        self.left += waiting
        return not waiting

    def _has_time(self) -> bool:
        return not self.longest or time.monotonic() - self.began + self.longest <= self.budget

    def _took(self, seconds: float) -> None:
        self.longest = max(self.longest, seconds)


def train_run(run: PlannedRun, *, measure_only: bool = False) -> float:
    """Train or resume one run, and return the seconds it took. Mark a run that diverges.

    Args:
        run: What is trained.
        measure_only: As of `Run`; nothing is printed.

    Raises:
        SystemExit: A signal came. In the last step too, so that no other run follows.
        ValueError: The data are not those of the runs before.
    """
    began = time.monotonic()
    training = Run(run.config, measure_only=measure_only, go_on=GO_ON, check_data=partial(check_data, run.comparison))
    if not measure_only:
        print(f"\n{run.name}, learning rate {run.rate:g}: {training.description}", flush=True)
    try:
        training.train()
    except Diverged as error:
        mark_diverged(run, training.trainer.step_number, str(error))
        if not measure_only:
            print(f"{run.name} diverged and is left as it is: {error}", flush=True)
    if training.stopped_by:
        stopped = f"stopped after {run.name}, learning rate {run.rate:g}, which is complete; {GO_ON}"
        print(stopped, file=sys.stderr, flush=True)
        raise SystemExit(training.stopped_by)
    del training
    gc.collect()  # networks and their graphs refer to themselves
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return time.monotonic() - began


def check_data(comparison: Path, fingerprint: str) -> None:
    """Raise ValueError if other runs of a comparison had other data. The first one writes down its own."""
    path = comparison / DATA
    if not path.exists():
        own = path.with_name(f".{DATA}-{uuid.uuid4().hex}")  # processes of --jobs come here at once
        own.write_text((data_of_runs(comparison) or fingerprint) + "\n")
        own.replace(path)
    check_same_data(path.read_text().strip(), fingerprint, f"the runs in {comparison}")


def data_of_runs(comparison: Path) -> str | None:
    """Return the fingerprint in a checkpoint of a run that is there, None without one: of runs of earlier versions."""
    for folder in sorted(comparison.glob("runs/*/*/*/checkpoints")):
        newest = Checkpoints(folder, keep=1).read_newest()
        if newest is not None:
            return str(newest[1]["data"])
    return None


def mark_diverged(run: PlannedRun, step: int, message: str) -> None:
    """Write a mark, so that the same command does not train this run again."""
    with whole_file(run.directory / DIVERGED) as temporary:
        temporary.write_text(json.dumps({"step": step, "message": message}) + "\n")


def conduct(plan: Plan, work: Work, *, drop: bool = False) -> list[str]:
    """Train what a comparison lacks and return notes on what was left out.

    The first seed trains at every rate, the others at the best rate of each arm. All arms start one seed before the
    next seed, so that few seeds are incomplete when the time is up.

    Args:
        plan: What is compared.
        work: Trains the runs.
        drop: Whether arms that end beyond the baseline, by an interval over two seeds or more, train no further seeds.
    """
    notes = list[str]()
    work.left.clear()
    in_time = True
    for seeds in rounds_of(plan, drop=drop):
        if seeds[0] == plan.seeds[0]:
            runs = [run for seed in seeds for arm in plan.names for run in plan.runs(arm, seed)]
        else:
            rates = chosen_rates(plan)
            worse = dropped_arms(plan, rates) if drop else []
            served = [arm for arm in plan.names if arm in rates and arm not in worse]
            runs = [plan.run(arm, seed, rates[arm]) for seed in seeds for arm in served]
            notes += [f"{arm} was dropped before seed {seeds[0]}: its interval is beyond the baseline" for arm in worse]
        in_time = work.train(runs)
        if not in_time:
            break
    if not in_time:
        left = ", ".join(run.name for run in work.left)
        notes.append(f"the budget of {duration(work.budget)} leaves for another call: {left}")
    return list(dict.fromkeys(notes))


def rounds_of(plan: Plan, *, drop: bool) -> list[Sequence[int]]:
    """Return the seeds that train without a look at results: one round, or a new one wherever results decide."""
    if drop:
        return [(seed,) for seed in plan.seeds]
    first, *others = plan.seeds
    return [(first,), others] if others and len(plan.rates) > 1 else [plan.seeds]


def dropped_arms(plan: Plan, rates: dict[str, float]) -> list[str]:
    """Return the arms that are worse than the baseline, beyond the spread of the seeds so far."""
    records = records_of(plan, rates)
    ends = {each.arm: each.ratios.get(verdict_metric(records)) for each in answer(records, plan.baseline)}
    return [arm for arm, ratio in ends.items() if ratio is not None and ratio.decided > 0]


def chosen_rates(plan: Plan) -> dict[str, float]:
    """Return the rate of each arm: the only one, or that which ended best on the first seed."""
    if len(plan.rates) < 2:
        return {arm: (plan.rates or (config.learning_rate,))[0] for arm, config in plan.configs.items()}

    def record(arm: str, rate: float) -> Record | None:
        return read_record(plan.run(arm, plan.seeds[0], rate))

    return best_rates(record, plan.names, plan.rates, plan.choose_by)


def records_of(plan: Plan, rates: dict[str, float]) -> dict[str, dict[int, Record]]:
    """Return the measurements so far, by arm and seed, each arm at its rate."""
    found: dict[str, dict[int, Record]] = {}
    for arm in plan.names:
        runs = [plan.run(arm, seed, rates[arm]) for seed in plan.seeds] if arm in rates else []
        read = {run.seed: read_record(run) for run in runs}
        found[arm] = {seed: record for seed, record in read.items() if record is not None}
    return found


def every_run(plan: Plan) -> Iterator[PlannedRun]:
    """Yield all runs that may exist: each arm, seed and rate."""
    for arm in plan.names:
        for seed in plan.seeds:
            yield from plan.runs(arm, seed)
