"""Do several processes train what one trains, in graph mode, on one GPU? And what does a process group cost?

    python benchmarks/speed/processes_on_one_gpu.py [--speed graph] [--processes 2] [--steps 60]

Digits in float32: alone, alone after another start, as the one process of a group, and as one of several, which
exchange gradients by gloo. For each the largest difference of the losses to those of the first, the time of a step, how
many CUDA graphs were recorded, and how many were replayed in a step: at least two, gradient and update, if steps are
replayed. Graphs are counted in the process with the fewest. Processes that share a GPU take turns on it, so that only
the first three times can be compared.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from two_commits import free_port, group_member

ARMS = {
    "uniform": ("--sampler=uniform",),
    "adaptive, a probe every 5 steps": ("--sampler=adaptive", "--sampler.every=5"),
    "root_loss, two micro-batches": ("--sampler=root_loss", "--accumulate=2"),
}
STEPS_TO_SETTLE = 20


@dataclass(frozen=True)
class Measured:
    """What one arm did, in one process or in several."""

    losses: torch.Tensor  # (steps,)
    milliseconds: float  # of a step
    num_graphs: int  # recorded
    replays: float  # of graphs, in a step


def work(speed: str, num_steps: int, output: Path) -> None:
    """Train every arm as this process's share, and save what was measured."""
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    from kairostep.experiments import build, preset
    from kairostep.experiments.config import with_overrides
    from kairostep.training.assembly import make_accelerator, make_batches, make_trainer

    found = {}
    for name, settings in ARMS.items():
        config = with_overrides(preset("digits"), [f"--speed={speed}", "--precision=fp32", *settings])
        accelerator = make_accelerator(config)
        experiment = build(config, accelerator.device)
        trainer = make_trainer(experiment, accelerator)
        batches = make_batches(experiment, accelerator).from_step(0)
        losses = []
        with counted_graphs() as counts:
            for number in range(num_steps):
                if number == STEPS_TO_SETTLE:
                    start, before = now(accelerator.device), counts["replayed"]
                step = trainer.step([next(batches) for _ in range(config.accumulate)])
                losses.append((step.losses * step.drawn.weight).mean())
        num_timed = num_steps - STEPS_TO_SETTLE
        milliseconds = 1e3 * (now(accelerator.device) - start) / num_timed
        replays = (counts["replayed"] - before) / num_timed
        found[name] = (torch.stack(losses).cpu(), milliseconds, counts["recorded"], replays)
    torch.save(found, output / f"{os.environ.get('RANK', '0')}.pt")


@contextmanager
def counted_graphs() -> Iterator[dict[str, int]]:
    """Count the graphs that are recorded and replayed within the block."""
    from kairostep.training.cuda_graphs import Recording

    counts, make, replay = {"recorded": 0, "replayed": 0}, Recording.__init__, Recording.replay

    def counted_make(self: Recording, *arguments: Any) -> None:
        counts["recorded"] += 1
        make(self, *arguments)

    def counted_replay(self: Recording, inputs: Any) -> Any:
        counts["replayed"] += 1
        return replay(self, inputs)

    Recording.__init__, Recording.replay = counted_make, counted_replay  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        Recording.__init__, Recording.replay = make, replay  # type: ignore[method-assign]


def now(device: torch.device) -> float:
    """Return the time once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def train(num_processes: int, speed: str, num_steps: int) -> dict[str, Measured]:
    """Return what was measured by arm, with the slowest process's time; 0 processes are one without a group."""
    port, ranks = free_port(), range(max(1, num_processes))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", folder, "--speed", speed, "--steps", str(num_steps)]
        own = [group_member(rank, num_processes, port) if num_processes else {} for rank in ranks]
        running = [subprocess.Popen(command, env={**os.environ, **each}) for each in own]
        codes = [process.wait() for process in running]
        if any(codes):
            raise RuntimeError(f"one of {len(ranks)} processes failed: its error is above")
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in ranks]
    return {name: over_processes([Measured(*each[name]) for each in found]) for name in ARMS}


def over_processes(own: list[Measured]) -> Measured:
    """Return the mean losses, the longest time and the fewest graphs."""
    return Measured(
        torch.stack([each.losses for each in own]).mean(0),
        max(each.milliseconds for each in own),
        min(each.num_graphs for each in own),
        min(each.replays for each in own),
    )


def main() -> None:
    """Train, compare and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", default="graph")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.speed, arguments.steps, Path(arguments.worker))
        return
    starts = {"alone": 0, "alone again": 0, "group of 1": 1, f"group of {arguments.processes}": arguments.processes}
    runs = {name: train(number, arguments.speed, arguments.steps) for name, number in starts.items()}
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"digits, {arguments.speed}, fp32, {arguments.steps} steps, torch {torch.__version__}, {where}\n")
    columns = f"{'largest difference of the loss':>30} {'ms per step':>12} {'graphs':>7} {'replays per step':>17}"
    print(f"{'':32} {'':12} {columns}")
    for arm in ARMS:
        for name, run in runs.items():
            own, difference = run[arm], float((run[arm].losses - runs["alone"][arm].losses).abs().max())
            numbers = f"{difference:30.1e} {own.milliseconds:12.2f} {own.num_graphs:7} {own.replays:17.2f}"
            print(f"{arm:32} {name:12} {numbers}")


if __name__ == "__main__":
    main()
