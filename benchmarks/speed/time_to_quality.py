"""Seconds until `kairostep train` is as good as diffusers' example makes the same network: whole systems, side by side.

    python benchmarks/speed/time_to_quality.py --data.path=cifar10.npz --inception=inception.pt --output FILE
    python benchmarks/speed/time_to_quality.py ... --loops=1e-4  # one loop, if time is short; the others later

Each loop has its own recipe: diffusers' example of unconditional training (`diffusers_loop` of train_speed.py) at
learning rates, of which 1e-4 is its own, and `kairostep`, which is `kairostep train` with the preset. The best rate is
the one with the lowest held-out error at the end, among those in FILE. You may choose it on one seed and give it alone
for another. The example is treated generously: batch size, bf16 and mirrored images are the preset's, and its weights
are averaged. By default it trains without all these, on 16 images a step. Its rate decays to 0 in exactly these steps.

A call trains the loops that FILE lacks, and writes FILE after each checkpoint. Verdicts are of all loops in FILE. Seeds
and other settings have a FILE each. A loop that was cut short starts again.

All loops start from the same weights, see as many images, and are judged by their averaged weights: the held-out error
of the noise, with the same images, times and noise for all, and FID of images from the same noise. The target is what
the example has at its end. Between our checkpoints values are linear in the logarithm.

Seconds are of training, from the first step on. Ours are those that the run itself counts: with recording graphs or
compiling, lines of metrics and progress, and all else that it does between steps. Left out for both: loading data and
the GPU's libraries (two steps of the example come first, for either), measuring, samples and checkpoints.
"""

import argparse
import copy
import json
import math
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from train_speed import diffusers_loop

from kairostep.experiments import Component, Config, Experiment, build, preset
from kairostep.experiments.command_line import settle
from kairostep.experiments.config import to_dict, with_overrides
from kairostep.files import whole_file
from kairostep.runs.directory import provenance
from kairostep.seed_statistics import cost_to_reach
from kairostep.training import Run
from kairostep.training.assembly import make_accelerator, step_mode_of
from kairostep.training.image_quality import ImageQuality
from kairostep.training.monitor import Monitor
from kairostep.training.stopwatch import Stopwatch

BATCH = 512  # of images that are generated
EXAMPLE_RATE = 1e-4  # the example's own
LOOPS = "1e-4,4e-4,8e-4,16e-4,32e-4,kairostep"
OURS = "kairostep"
PLACES = ("output", "cache", "inception")  # settings that may differ in one file


@dataclass(frozen=True)
class Checkpoint:
    """How good a model was after some training."""

    step: int
    seconds: float
    epsilon_mse: float
    fid: float | None


FidOf = Callable[[Experiment, nn.Module], float | None]
Report = Callable[[Checkpoint], None]


def train_example(config: Config, rate: float, fid_of: FidOf, report: Report) -> None:
    """Train the loop of diffusers' example at a learning rate, and report what it has at its end."""
    accelerator = make_accelerator(config)
    parts = build(replace(config, sampler=Component("uniform")), accelerator.device)
    model = copy.deepcopy(parts.model).to(accelerator.device).eval().requires_grad_(False)
    steps, average = diffusers_loop(parts, accelerator, learning_rate=rate, num_steps=config.steps)
    clock = Stopwatch(accelerator.device)
    clock.synchronize()
    clock.start()
    steps(config.steps)
    seconds = clock.seconds()
    average.copy_to(model.parameters())
    error = Monitor(parts, model, accelerator).evaluate()["loss"]
    report(Checkpoint(config.steps, seconds, error, fid_of(parts, model) if math.isfinite(error) else None))


def train_ours(config: Config, fid_of: FidOf, report: Report) -> None:
    """Do what `kairostep train` does, and report whenever it measures its held-out error."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(replace(config, output=folder))
        print(run.description, flush=True)

        def follow(line: Mapping[str, float], step: int) -> None:
            if "held_out/loss" in line:
                seconds = run.clock.seconds()
                with run.clock.paused():
                    fid = fid_of(run.experiment, run.trainer.ema.model)
                    report(Checkpoint(step, seconds, line["held_out/loss"], fid))

        run.recorder.track = follow  # is called with each line of metrics
        run.train()


class Results:
    """The file of a comparison: its settings, and of each loop the checkpoints and where it was trained."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings, self.loops = path, json.loads(json.dumps(settings)), dict[str, Any]()
        if path.exists():
            content = json.loads(path.read_text())
            other = [key for key, value in self.settings.items() if content["settings"].get(key) != value]
            if other:
                raise ValueError(f"{path} has other settings ({', '.join(other)}): pass another --output")
            self.loops = content["loops"]

    def start(self, name: str, where: Mapping[str, Any]) -> Report:
        """Return what adds a checkpoint to a loop that starts here."""
        points: list[dict[str, Any]] = []

        def report(point: Checkpoint) -> None:
            points.append(vars(point))
            self.loops[name] = {"where": where, "checkpoints": points}
            with whole_file(self.path) as temporary:
                temporary.write_text(json.dumps({"settings": self.settings, "loops": self.loops}, indent=1) + "\n")
            print(line_of(name, point), flush=True)

        return report

    def complete(self) -> dict[str, list[Checkpoint]]:
        """Return the loops that were trained to their end."""
        curves = {name: [Checkpoint(**point) for point in loop["checkpoints"]] for name, loop in self.loops.items()}
        return {name: curve for name, curve in curves.items() if curve[-1].step == self.settings["steps"]}

    def machines(self) -> set[str]:
        """Return the machines on which the loops were trained."""
        return {loop["where"]["machine"] for loop in self.loops.values()}


def line_of(name: str, point: Checkpoint) -> str:
    """Return a checkpoint as a line of the table."""
    fid = "-" if point.fid is None else f"{point.fid:.1f}"
    return f"{name:18} {point.step:6} {point.seconds:8.1f} {point.epsilon_mse:8.5f} {fid:>7}"


def verdicts(curves: Mapping[str, Sequence[Checkpoint]]) -> list[str]:
    """Return the seconds of ours to what the example has at its end, at each of its rates."""
    ends = {name: curve[-1] for name, curve in curves.items() if name != OURS}
    ends = {name: end for name, end in ends.items() if math.isfinite(end.epsilon_mse)}  # a high rate may diverge
    if OURS not in curves or not ends:
        return []
    remarks = {name_of(EXAMPLE_RATE): ", its own rate"}
    best = min(ends, key=lambda name: ends[name].epsilon_mse)
    remarks[best] = remarks.get(best, "") + ", its best rate"
    return [
        f"{measure} of {name}{remarks.get(name, '')}: {verdict(curves[OURS], end, measure)}"
        for name, end in ends.items()
        for measure in ("epsilon_mse", "fid")
        if getattr(end, measure) is not None
    ]


def verdict(ours: Sequence[Checkpoint], end: Checkpoint, measure: str) -> str:
    """Return the seconds of ours to a measure of the example's end."""
    target = getattr(end, measure)
    taken = cost_to_reach([point.seconds for point in ours], [getattr(point, measure) for point in ours], target)
    found = "does not reach it" if taken is None else f"{taken:.1f} s, {end.seconds / taken:.2f} times as fast"
    return f"{target:.5g} after {end.seconds:.1f} s, {OURS} {found}"


def name_of(rate: float) -> str:
    """Return the name of the example's loop at a rate."""
    return f"diffusers, {rate:g}"


def read_loops(text: str) -> dict[str, float | None]:
    """Return the loops by name, each with its rate; None for ours."""
    rates = [None if word == OURS else float(word) for word in text.split(",")]
    return {OURS if rate is None else name_of(rate): rate for rate in rates}


def where_of(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Return versions, device, machine and commit."""
    found, on_gpu = provenance(device, 1), device.type == "cuda"
    machine = str(torch.cuda.get_device_properties(device).uuid) if on_gpu else platform.node()
    return {**found, "machine": machine, "commit": commit or found["commit"]}


def read_arguments() -> tuple[argparse.Namespace, Config]:
    """Return the arguments and the config of all loops."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--preset", default="cifar10-small")
    parser.add_argument("--loops", type=read_loops, default=LOOPS, help=f"rates of the example, and {OURS}: {LOOPS}")
    parser.add_argument("--output", type=Path, required=True, help="JSON file; loops are added to those it has")
    parser.add_argument("--commit", help="of this code, where it is no git checkout")
    known, settings = parser.parse_known_args()
    settings = ["--steps=3000", "--evaluate_every=250", *settings]
    config = settle(with_overrides(preset(known.preset), settings), settings)
    if config.accumulate > 1:
        parser.error(f"the example takes a batch at once, got accumulate {config.accumulate}: pass --accumulate=1")
    return known, config


def main() -> None:
    """Train the loops that the file lacks, and print the verdicts."""
    known, config = read_arguments()
    accelerator = make_accelerator(config)
    device, mode = accelerator.device, step_mode_of(config, accelerator)
    parts = build(config, device)
    measures_fid = bool(config.inception or config.features)
    settings = {key: value for key, value in to_dict(parts.config).items() if key not in PLACES}
    results = Results(known.output, {**settings, "measures_fid": measures_fid})
    quality = ImageQuality.open(parts, device, BATCH) if measures_fid else None
    where = where_of(device, known.commit)
    print(f"{known.preset}, batch {config.batch_size}, seed {config.seed}, {where['device']}, torch {where['torch']}")
    if not quality:
        print("FID is not measured: pass --inception=FILE to measure it")
    diffusers_loop(parts, accelerator)[0](2)  # loads the GPU's libraries

    def fid_of(experiment: Experiment, model: nn.Module) -> float | None:
        return quality.measure(experiment, model)["fid"] if quality else None

    for name, rate in known.loops.items():
        if name in results.complete():
            print(f"{name}: in {known.output} already", flush=True)
        elif rate is None:
            train_ours(config, fid_of, results.start(name, {**where, "speed": f"{mode.mode}: {mode.why}"}))
        else:
            train_example(config, rate, fid_of, results.start(name, where))
    curves = results.complete()
    print(f"\n{'loop':18} {'step':>6} {'seconds':>8} {'eps-MSE':>8} {'FID':>7}")
    print(*(line_of(name, point) for name, curve in curves.items() for point in curve), sep="\n")
    print("", *verdicts(curves), sep="\n")
    if len(results.machines()) > 1:
        print("careful: these seconds are of several machines")


if __name__ == "__main__":
    main()
