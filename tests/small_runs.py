"""Runs of a second or two: here, or in children that start in milliseconds; and whether two runs are the same."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from process_groups import CONTEXT as CONTEXT
from process_groups import free_port

import kairostep.cli
from kairostep.experiments import command_line
from kairostep.runs.checkpoint import read
from kairostep.training import Run

PATIENCE = 60.0  # seconds after which a child is considered stuck

SMALL: Mapping[str, Any] = {
    "sampler": "uniform",
    "network.channels": 8,
    "network.multipliers": [1],
    "network.attention": [],
    "batch_size": 16,
    "steps": 50,
    "warmup_steps": 10,
    "log_every": 5,
    "density_every": 10,
    "evaluate_every": 10,
    "held_out_images": 16,
    "sample_steps": 2,
    "checkpoint_every": 7,
}
ADAPTIVE: Mapping[str, Any] = {
    **SMALL,
    "sampler": "adaptive",
    "sampler.every": 5,
    "sampler.hidden": 16,
    "sampler.sweep": 20,
    "sampler.reward_rows": 8,
}
LEARNING: Mapping[str, Mapping[str, Any]] = {
    "adaptive": ADAPTIVE,
    "loss_second_moment": {
        **SMALL,
        "sampler": "loss_second_moment",
        "sampler.num_bins": 10,
        "sampler.history": 3,
    },
    "root_loss": {**SMALL, "sampler": "root_loss", "sampler.warmup": 4, "sampler.refresh": 2, "sampler.gate": 1.0},
    "infonoise": {**SMALL, "sampler": "infonoise", "sampler.num_bins": 10, "sampler.warmup": 2},
}


def arguments(directory: Path, settings: Mapping[str, Any], preset: str = "digits") -> list[str]:
    """Return what follows `kairostep` on the command line."""
    return ["train", preset, f"--output={directory}", *(f"--{key}={value}" for key, value in settings.items())]


def configure(directory: Path, settings: Mapping[str, Any], preset: str = "digits") -> Any:
    return command_line.configure(preset, None, arguments(directory, settings, preset)[2:])


def train_here(directory: Path, settings: Mapping[str, Any], preset: str = "digits") -> Run:
    run = Run(configure(directory, settings, preset))
    run.train()
    return run


# Children


class Child:
    """`kairostep ARGUMENTS` in a process of its own, forked from one that has imported everything.

    Args:
        command: What follows `kairostep`.
        log: Takes stdout and stderr.
        prepare: Called in the child before the command.
        environment: Added to the child's.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        prepare: Callable[[], None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self.process = CONTEXT.Process(target=_run_command, args=(list(command), str(log), prepare, environment or {}))
        self.process.start()

    @property
    def output(self) -> str:
        """What the child has printed so far."""
        return self.log.read_text() if self.log.exists() else ""

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Whether the condition came to hold while the child was alive."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if not self.process.is_alive():
                return False
            assert time.monotonic() < deadline, f"stuck:\n{self.output}"
            time.sleep(0.0005)  # leaves the core to the child, and is shorter than it takes to write a checkpoint
        return True

    def tell(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def send(self, number: signal.Signals) -> int:
        """Send a signal, wait for the end and return the exit code, negative for a death by signal."""
        self.tell(number)
        return self.join()

    def ends_within(self, seconds: float) -> bool:
        """Whether the child ends within this time."""
        self.process.join(seconds)
        return self.process.exitcode is not None

    def join(self) -> int:
        """Wait for the end and return the exit code."""
        self.process.join(PATIENCE)
        code = self.process.exitcode
        assert code is not None, f"stuck:\n{self.output}"
        return code


def _run_command(
    command: list[str], log: str, prepare: Callable[[], None] | None, environment: Mapping[str, str]
) -> None:
    with open(log, "a") as file:  # noqa: PTH123, a descriptor is needed
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    kairostep.cli.main(command)


def start_ranks(
    command: Sequence[str], log: Path, world_size: int = 2, prepare: Mapping[int, Callable[[], None]] | None = None
) -> list[Child]:
    """Start the command on several ranks, as a launcher would; `prepare` has what some ranks call before."""
    return [
        Child(command, log.with_suffix(f".{rank}"), (prepare or {}).get(rank), environment)
        for rank, environment in enumerate(rank_environments(world_size))
    ]


def rank_environments(world_size: int) -> list[dict[str, str]]:
    port = free_port()
    common = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def real_environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a shell in which `kairostep` is a command."""
    script = tmp_path / "bin" / "kairostep"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kairostep "$@"\n')
    script.chmod(0o755)
    source = str(Path(kairostep.__file__).parents[1])
    return {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}", "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}


# What a run left


def lines_of(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def num_lines(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def checkpoint_paths(directory: Path) -> list[Path]:
    return sorted((directory / "checkpoints").glob("step-*.safetensors"))


def last_step(directory: Path) -> int:
    paths = checkpoint_paths(directory)
    return int(paths[-1].stem.removeprefix("step-")) if paths else 0


def hidden_files(directory: Path) -> list[Path]:
    return list(directory.rglob(".*"))


def state_of(directory: Path) -> dict[str, Any]:
    return read(checkpoint_paths(directory)[-1])


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings and lists, by the path of their keys."""
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        return {name: value}
    return {path: leaf for key, item in items for path, leaf in flat(item, f"{name}/{key!r}").items()}


def same_bits(first: Any, second: Any) -> bool:
    """Whether two values are equal to the last bit: a NaN to itself, 0.0 not to -0.0."""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return type(first) is type(second) and first == second
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(x.detach().cpu().contiguous().flatten().view(torch.uint8) for x in (first, second)))


def assert_same_state(found: Any, expected: Any) -> None:
    found, expected = flat(found), flat(expected)
    assert list(found) == list(expected)
    differing = [name for name in found if not same_bits(found[name], expected[name])]
    assert not differing, ", ".join(differing)


def without_seconds(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_same_run(found: Path, expected: Path) -> None:
    """Weights, average, optimizer, sampler, metrics, samples and exported model are equal, and nothing lies about."""
    found_state, expected_state = state_of(found), state_of(expected)
    assert found_state.pop("seconds") > 0
    expected_state.pop("seconds")
    assert {"model", "ema", "optimizer", "sampler"} <= set(found_state["trainer"])
    assert_same_state(found_state, expected_state)
    assert without_seconds(lines_of(found)) == without_seconds(lines_of(expected))
    seconds = [line["seconds"] for line in lines_of(found) if "seconds" in line]
    assert seconds == sorted(seconds)  # time spent before an interruption counts
    assert hidden_files(found) == []
    files = [sorted(p.relative_to(root) for p in root.rglob("*") if p.is_file()) for root in (found, expected)]
    assert files[0] == files[1]
    for path in files[0]:
        if path.parts[0] in ("model", "samples"):
            assert (found / path).read_bytes() == (expected / path).read_bytes(), path
