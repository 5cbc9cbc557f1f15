"""Random processes of a run are killed, as often as one likes: it goes on by hand or by torchrun, and ends the same.

`KAIROSTEP_KILLS=20 pytest tests/training/test_rank_kills.py` kills twenty times.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import (
    ADAPTIVE,
    PATIENCE,
    arguments,
    assert_same_run,
    last_step,
    num_lines,
    real_environment,
    start_ranks,
)

NUM_KILLS = int(os.environ.get("KAIROSTEP_KILLS", "2"))
SETTINGS = {**ADAPTIVE, "steps": 40}
Whole = Callable[[int], Path]


@pytest.fixture(scope="module")
def whole_pair(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return a function that gives the directory of a run of two processes never killed, of so many steps."""

    def train(steps: int) -> Path:
        directory = tmp_path_factory.getbasetemp() / f"whole_pair_{steps}"
        if not directory.exists():
            children = start_ranks(arguments(directory, {**SETTINGS, "steps": steps}), directory.with_suffix(".log"))
            assert [child.join() for child in children] == [0, 0], [child.output for child in children]
        return directory

    return train


def test_kills_of_random_processes_leave_no_trace(whole_pair: Whole, tmp_path: Path) -> None:
    chance, directory, steps = random.Random(3), tmp_path / "pair", []
    endless = arguments(directory, {**SETTINGS, "steps": 10**6})
    for number in range(NUM_KILLS):
        children = start_ranks(endless, tmp_path / f"{number}.log")
        target = num_lines(directory) + chance.randint(1, 4)
        assert children[0].wait_until(lambda target=target: num_lines(directory) >= target), children[0].output
        time.sleep(chance.uniform(0, 0.05))
        killed = chance.randrange(2)
        assert children[killed].send(signal.SIGKILL) == -signal.SIGKILL
        assert children[1 - killed].join() == 1, children[1 - killed].output  # by itself
        assert f"process {killed} of 2" in children[1 - killed].output
        steps.append(last_step(directory))
        print(f"kill {number + 1}: process {killed}, the last checkpoint is of step {steps[-1]}", flush=True)
    num_steps = max(40, steps[-1] + 10)
    children = start_ranks(arguments(directory, {**SETTINGS, "steps": num_steps}), tmp_path / "last.log")
    assert [child.join() for child in children] == [0, 0], [child.output for child in children]
    assert steps == sorted(steps)
    assert steps[-1] > 0
    assert_same_run(directory, whole_pair(num_steps))


def test_torchrun_goes_on_by_itself(whole_pair: Whole, tmp_path: Path) -> None:
    directory, log = tmp_path / "pair", tmp_path / "log"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]
    launch += ["--standalone", "--monitor-interval=0.1", "-m", "kairostep"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*launch, *arguments(directory, SETTINGS)], env=real_environment(tmp_path), stdout=file, stderr=file
        )
        deadline = time.monotonic() + PATIENCE
        while last_step(directory) < 14 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(rank_of(process.pid, 1), signal.SIGKILL)
        assert process.wait(2 * PATIENCE) == 0, log.read_text()
    output = log.read_text()
    assert re.search(r"process 1 of 2 \(pid \d+ on .*\) ended without a word, as if killed; lost: ", output)
    assert "going on from step" in output
    assert_same_run(directory, whole_pair(40))


def rank_of(launcher: int, rank: int) -> int:
    """Return the process id of a rank that a launcher has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat, environment = (folder / "stat").read_text(), (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == launcher and f"RANK={rank}".encode() in environment:
            return int(folder.name)
    raise AssertionError(f"process {launcher} has no rank {rank}")
