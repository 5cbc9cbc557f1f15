"""Time of a training step in two trees, side by side: each in processes of its own, in turns.

    python benchmarks/speed/two_commits.py OLD NEW [--modes graph,compile] [--preset NAME] [--rounds 12] [--group]

OLD and NEW are folders that hold `src`, such as two worktrees. With --group NEW trains as the one process of a process
group, so that the same folder twice says what a group costs. Images are random. The ratio is NEW / OLD, paired by
round, with its 95 % interval; above 1, NEW is slower.
"""

import argparse
import importlib
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

T_QUANTILE = 2.2  # 0.975, at about a dozen rounds
ASSEMBLY = ("kairostep.training.assembly", "kairostep.training.setup")  # where trainers are made: now, and before


def work(preset: str, mode: str) -> None:
    """Train with the tree that is imported: as many steps as each line of stdin says, their time printed."""
    from kairostep.data import InMemory
    from kairostep.experiments import Component, build, experiment
    from kairostep.experiments import preset as find_preset

    if "RANK" in os.environ:
        torch.distributed.init_process_group()

    def load_noise(*_: object) -> tuple[InMemory, None]:
        return InMemory(torch.randint(256, (10_000, 3, 32, 32), dtype=torch.uint8), flip=True), None

    experiment.load_data = load_noise
    assembly = import_first(ASSEMBLY)
    data = Component("cifar10", {"path": "unused"})
    config = replace(find_preset(preset), data=data, speed=mode, precision="bf16", steps=1_000_000)
    accelerator = assembly.make_accelerator(config)
    parts = build(config, accelerator.device)
    trainer, batches = assembly.make_trainer(parts, accelerator), assembly.make_batches(parts, accelerator).from_step(0)
    for num in chain((12,), map(int, iter(sys.stdin.readline, ""))):  # the first ones compile and record
        start = time.perf_counter()
        for _ in range(num):
            trainer.step([next(batches)])
        torch.cuda.synchronize()
        print(time.perf_counter() - start, flush=True)


def import_first(names: tuple[str, ...]) -> Any:
    """Return the first of these modules that the tree has."""
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return importlib.import_module(names[-1])


def group_member(rank: int, num_processes: int, port: int) -> dict[str, str]:
    """Return the environment of a process in a process group on one machine and one GPU."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    size = {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    return {**address, **size, "RANK": str(rank), "LOCAL_RANK": "0"}


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Worker:
    """A process that trains with one tree."""

    def __init__(self, tree: str, preset: str, mode: str, group: bool = False) -> None:
        path = os.pathsep.join([f"{tree}/src", os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path} | (group_member(0, 1, free_port()) if group else {})
        command = [sys.executable, __file__, "--worker", mode, "--preset", preset]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> float:
        """Return the next time it prints; what else is printed is passed over."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                return float(line)
            except ValueError:
                continue
        raise RuntimeError(f"a worker ended with exit code {self.process.wait()}: its error is above")

    def take(self, num_steps: int) -> float:
        """Return the seconds of so many steps."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{num_steps}\n")
        self.process.stdin.flush()
        return self.read()


def compare(mode: str, workers: list[Worker], rounds: int, num_steps: int) -> str:
    """Return the line of one mode, from turns in alternating order; the first round only warms up."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for tree in (0, 1) if number % 2 else (1, 0):
            taken = workers[tree].take(num_steps) / num_steps
            seconds[tree].extend([taken] if number else [])
    logs = [math.log(new / old) for old, new in zip(*seconds, strict=True)]
    mean, half = statistics.mean(logs), T_QUANTILE * statistics.stdev(logs) / math.sqrt(len(logs))
    old, new = (1e3 * statistics.median(own) for own in seconds)
    interval = f"{math.exp(mean - half):.4f} to {math.exp(mean + half):.4f}"
    turns = f"{rounds} rounds of {num_steps} steps"
    return f"{mode}: {old:.3f} ms a step before, {new:.3f} ms now: {math.exp(mean):.4f} ({interval}), {turns}"


def main() -> None:
    """Compare two trees in each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", help="OLD NEW")
    parser.add_argument("--modes", default="graph,compile")
    parser.add_argument("--preset", default="cifar10-small")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--group", action="store_true", help="NEW is the one process of a process group")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.preset, arguments.worker)
        return
    if len(arguments.trees) != 2:
        parser.error("two trees must be named, OLD and NEW")
    modes = arguments.modes.split(",")
    groups = (False, arguments.group)
    workers = {
        mode: [Worker(tree, arguments.preset, mode, group) for tree, group in zip(arguments.trees, groups, strict=True)]
        for mode in modes
    }
    for worker in (worker for both in workers.values() for worker in both):
        worker.read()
    for mode, both in workers.items():
        print(compare(mode, both, arguments.rounds, arguments.steps), flush=True)


if __name__ == "__main__":
    main()
