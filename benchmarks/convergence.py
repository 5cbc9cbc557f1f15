"""Samplers side by side on images, through the trainer: held-out error, bound and FID against wall-clock.

    python benchmarks/convergence.py run --preset digits --arms uniform,infonoise --seeds 0,1 --steps 1000
    python benchmarks/convergence.py run --preset cifar10-small --process flow --steps 4000 --time-budget 570 \
        --data.path=cifar10.npz --inception inception.pt --speed=compile
    python benchmarks/convergence.py table

Further --key=value are settings of the run, as in `kairostep train`. Arms of a seed share initial weights, data order
and number of steps; all are measured on their averaged weights, with the same held-out images, times and noise, and
generate from the same noise. What is kept is OUTPUT/PRESET-PROCESS/ARM/config.yaml and one seed-N.jsonl per run: a line
on where it ran, one per checkpoint, one on the end. A run whose log is there is not repeated, other settings are
refused, and seeds are worked off one after the other, so that several calls add up. `table` puts all that is there into
OUTPUT/README.md and prints a short form.
"""

import argparse
import gc
import json
import math
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from convergence_measures import END_BINS, CloserMonitor, Judge, measure_end, open_judge
from convergence_table import write_tables

from kairostep.evaluation.features import INCEPTION_SHA256
from kairostep.experiments import Config, preset
from kairostep.experiments.config import to_dict, with_overrides
from kairostep.experiments.experiment import make_objective
from kairostep.experiments.parts import check_options, with_defaults
from kairostep.registry import REGISTRIES, unknown
from kairostep.runs import load_trained
from kairostep.runs.directory import provenance
from kairostep.training import Run, RunError

ARMS: dict[str, tuple[str, ...]] = {
    "uniform": ("--sampler=uniform",),
    "uniform-256": ("--sampler=uniform", "--batch_size=256"),
    "root_loss": ("--sampler=root_loss",),
    "root_loss-pairs": ("--sampler=root_loss", "--pairs=true"),
    "root_loss-pairs-stable_target": ("--sampler=root_loss", "--pairs=true", "--stable_target=256"),
    "adaptive-vlb": ("--sampler=adaptive", "--sampler.reward=vlb"),
    "adaptive-loss": ("--sampler=adaptive", "--sampler.reward=loss"),
    "infonoise": ("--sampler=infonoise",),
    "min_snr": ("--sampler=uniform", "--weighting=min_snr"),
    "logit_normal": ("--sampler=logit_normal",),
    "speed": ("--sampler=speed",),
}
VARIED = {"sampler", "weighting", "pairs", "stable_target", "batch_size"}  # settings in which arms may differ
NOT_KEPT = ("output", "cache", "resume", "seed")  # of a config: places, and what the log's name says
PLACES = ("path", "folder")  # options of data of which only the name is kept
HELD_OUT_IMAGES = 2048


@dataclass(frozen=True)
class Task:
    """One arm with one seed, and where its log belongs."""

    arm: str
    config: Config  # every default filled in
    folder: Path  # of the arm
    num_generated: int  # images for FID, 0 for none
    fid_every: int  # steps between measurements of FID before the last one, 0 for none

    @property
    def log(self) -> Path:
        """The file of this seed."""
        return self.folder / f"seed-{self.config.seed}.jsonl"

    @property
    def settings(self) -> dict[str, Any]:
        """What has to be the same in all seeds of an arm, without places, and how many images FID is of."""
        kept = {key: value for key, value in to_dict(self.config).items() if key not in NOT_KEPT}
        names = {key: Path(str(kept["data"][key])).name for key in PLACES if key in kept["data"]}
        return {**kept, "data": {**kept["data"], **names}, "num_generated": self.num_generated}


def make_tasks(arguments: argparse.Namespace, settings: Sequence[str]) -> list[Task]:
    """Return all arms of the first seed, then of the next; ValueError for what cannot be built or compared."""
    every = math.ceil(arguments.steps / arguments.checkpoints)
    usual = [f"--steps={arguments.steps}", f"--evaluate_every={every}", f"--log_every={every}", "--sample_every=0"]
    usual += [f"--density_every={arguments.steps}", f"--checkpoint_every={arguments.steps}"]
    usual += [f"--held_out_images={HELD_OUT_IMAGES}", f"--process={arguments.process}"]
    num_generated = arguments.num_generated if arguments.inception else 0
    tasks = []
    for seed in arguments.seeds:
        for arm in arguments.arms:
            if arm not in ARMS:
                raise ValueError(unknown("arm", arm, ARMS))
            changes = [*usual, *ARMS[arm], *settings, f"--seed={seed}"]
            config = resolved(with_overrides(preset(arguments.preset), changes))
            folder = arguments.output / f"{arguments.preset}-{arguments.process}" / arm
            tasks.append(Task(arm, config, folder, num_generated, arguments.fid_every))
            check(tasks[-1])
    return tasks


def resolved(config: Config) -> Config:
    """Return the config as a run writes it, every default filled in, without reading data."""
    for kind, registry in REGISTRIES.items():
        check_options(registry, getattr(config, kind))
    parts: dict[str, Any] = {kind: with_defaults(names, getattr(config, kind)) for kind, names in REGISTRIES.items()}
    return make_objective(replace(config, **parts))[0]


def check(task: Task) -> None:
    """Raise ValueError where the logs that are there would not compare with this one."""
    now = task.settings
    for path in task.folder.parent.glob("*/config.yaml"):
        free = set() if path.parent == task.folder else VARIED
        before = {**to_dict(Config()), **yaml.safe_load(path.read_text())}  # older logs lack newer settings
        if not (before["num_generated"] and now["num_generated"]):
            free = free | {"num_generated"}  # of some without FID all else compares
        other = [key for key in now if key not in free and before.get(key) != now[key]]
        if other:
            changes = "; ".join(f"{key}: {before.get(key)} -> {now[key]}" for key in other)
            raise ValueError(
                f"runs that are compared must share their settings, but {path} has others ({changes}): "
                "pass the same, or another --output"
            )


def perform(task: Task, judge: Judge | None, scratch: Path, facts: Mapping[str, Any]) -> None:
    """Train and measure one task, and write its log."""
    begun = time.monotonic()
    directory = scratch / task.folder.parent.name / task.arm / f"seed-{task.config.seed}"
    run = Run(replace(task.config, output=str(directory)))
    run.monitor = CloserMonitor(run, judge, task.fid_every)
    held_out, device, data = run.monitor.held_out, run.accelerator.device, run.data
    print(f"\n{task.arm}, seed {task.config.seed}: {run.description}", flush=True)
    run.train()
    del run
    free_memory()
    lines = list(checkpoints_in(directory))
    end = measure_end(load_trained(directory, device=device), held_out, judge, device)
    density = [line["density"] for line in lines_in(directory) if "density" in line][-1]
    where = {**provenance(device, 1), **facts, "data": data, "arm": task.arm, "seed": task.config.seed}
    end |= {"density": binned(density), "took_seconds": round(time.monotonic() - begun, 1)}
    write_log(task, [where, *lines, end])
    shutil.rmtree(directory)
    free_memory()


def checkpoints_in(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield what a run wrote at each evaluation: steps, seconds of training, evaluations, held-out losses."""
    kept = ("step", "seconds", "training_evaluations", "probe_evaluations")
    for line in lines_in(directory):
        if "held_out" in line:
            yield {key: line[key] for key in kept} | {"training_loss": line["loss"]} | line["held_out"]


def lines_in(directory: Path) -> list[dict[str, Any]]:
    """Return all that a run measured, in the order of steps."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def free_memory() -> None:
    """Give back what the run before held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def binned(density: Sequence[float]) -> list[float]:
    """Return the mass of a density in the bins of the profile."""
    width = len(density) // END_BINS
    return [round(sum(density[start : start + width]), 5) for start in range(0, END_BINS * width, width)]


def write_log(task: Task, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write the arm's config and the log of a seed, the log whole or not at all."""
    task.folder.mkdir(parents=True, exist_ok=True)
    path = task.folder / "config.yaml"
    num_before = yaml.safe_load(path.read_text())["num_generated"] if path.exists() else 0
    kept = {**task.settings, "num_generated": task.num_generated or num_before}
    path.write_text(yaml.safe_dump(kept, sort_keys=False))
    temporary = task.log.with_name(f".{task.log.name}")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    temporary.replace(task.log)


def without_places(arguments: Sequence[str]) -> str:
    """Return a command line in which absolute paths are names alone."""
    parts = [argument.partition("=") for argument in arguments]
    short = [(Path(key).name if key.startswith("/") else key, equals, value) for key, equals, value in parts]
    shorter = [key + equals + (Path(value).name if value.startswith("/") else value) for key, equals, value in short]
    return shlex.join(["python", "benchmarks/convergence.py", *shorter])


def run_all(arguments: argparse.Namespace, settings: Sequence[str]) -> None:
    """Work off what is not there yet, as far as the time budget goes."""
    started, slowest = time.monotonic(), 0.0
    waiting = [task for task in make_tasks(arguments, settings) if not task.log.exists()]
    if not waiting:
        print("all of these runs are there")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    judge = None
    if arguments.inception:
        network = (arguments.inception, arguments.inception_sha256)
        judge = open_judge(*network, arguments.num_generated, waiting[0].config, device)
    facts = {"command": without_places(sys.argv[1:]), **({"commit": arguments.commit} if arguments.commit else {})}
    with tempfile.TemporaryDirectory() as temporary:
        for number, task in enumerate(waiting):
            begun = time.monotonic()
            if begun - started + slowest > arguments.time_budget:
                left = ", ".join(f"{task.arm} {task.config.seed}" for task in waiting[number:])
                print(f"left for another call: {left}")
                return
            try:
                perform(task, judge, arguments.scratch or Path(temporary), facts)
            except RunError as error:
                print(f"{task.arm}, seed {task.config.seed}, has no result: {error}", flush=True)
            slowest = max(slowest, time.monotonic() - begun)


def main() -> None:
    """Run arms, or print the tables of what was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", allow_abbrev=False, help="train and measure what is not there yet")
    run.add_argument("--preset", default="digits")
    run.add_argument("--process", default="linear")
    run.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS), help=", ".join(ARMS))
    run.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0])
    run.add_argument("--steps", type=int, default=1000)
    run.add_argument("--checkpoints", type=int, default=16, help="times at which the held-out losses are measured")
    run.add_argument("--inception", type=Path, help="file of the network; without it there is no FID")
    run.add_argument("--inception_sha256", default=INCEPTION_SHA256, help="of another file than the usual one")
    run.add_argument("--num_generated", type=int, default=5120, help="images for FID")
    run.add_argument("--fid_every", type=int, default=0, help="steps between measurements of FID before the last one")
    run.add_argument("--time-budget", type=float, default=math.inf, help="seconds; no run starts that would end later")
    run.add_argument("--scratch", type=Path, help="folder for run directories while they are needed (a temporary one)")
    run.add_argument("--commit", help="of the code, where it runs outside its repository")
    table = commands.add_parser("table", help="write the tables of all that is there")
    for command in (run, table):
        command.add_argument("--output", type=Path, default=Path("results/convergence"))
    arguments, settings = parser.parse_known_args()
    try:
        if arguments.command == "run":
            run_all(arguments, settings)
        else:
            print(write_tables(arguments.output))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
