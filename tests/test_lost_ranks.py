"""One of two processes of `generate` or `evaluate` is lost or fails: the other says which and ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, Child, rank_environments, real_environment, start_ranks, train_here

from kairostep.commands import failures, processes
from kairostep.shares import Share
from kairostep.training import process_watch

PATIENCE = 15.0  # seconds in which the other process ends: 2 of silence, 1 to end, the rest for busy cores
COMMANDS = {
    "generate": ["--num_images", "8", "--batch_size", "2", "--steps", "3"],
    "evaluate": ["--held_out_images", "16", "--batch_size", "4"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "digits"
    train_here(directory, {**SMALL, "steps": 2})
    return directory


def be_quick() -> None:
    """Leave less time to processes, so that the tests need not wait for it."""
    process_watch.SECONDS_TO_END, processes.LONGEST_SILENCE = 1.0, 2.0


def get_lost(end: Callable[[], None]) -> None:
    """Call `end` where this process has begun its share."""
    be_quick()
    plain = Share.batches

    def batches(self: Share, *arguments: Any) -> Any:
        end()
        return plain(self, *arguments)

    Share.batches = batches  # type: ignore[method-assign]


def send_itself(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def fail() -> None:
    raise ValueError("the rule, the value: the fix")


def start(command: str, run: Path, log: Path, end: Callable[[], None]) -> list[Child]:
    typed = [command, str(run), *COMMANDS[command]]
    return start_ranks(typed, log, prepare={0: be_quick, 1: partial(get_lost, end)})


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("number", "what"),
    [
        (signal.SIGSTOP, "has been silent for 2 s: it hangs, or cannot be reached"),
        (signal.SIGKILL, "ended without a word, as if killed"),
    ],
)
def test_the_other_process_names_the_lost_one(
    number: signal.Signals, what: str, command: str, run: Path, tmp_path: Path
) -> None:
    other, lost = start(command, run, tmp_path / "log", partial(send_itself, number))
    try:
        assert other.ends_within(2 * PATIENCE), other.output  # it has to start
        assert other.join() == 1
        assert f"kairostep: error: process 1 of 2 (pid {lost.process.pid} on " in other.output
        typed = " ".join([command, str(run), *COMMANDS[command]])
        again = f"accelerate launch --multi_gpu --num_processes 2 -m kairostep {typed}"
        assert f") {what}; what was written stays; go on with: {again}" in other.output
        assert "Traceback" not in other.output
    finally:
        lost.tell(signal.SIGKILL)


def test_a_signal_to_one_process_ends_both(run: Path, tmp_path: Path) -> None:
    other, stopped = start("generate", run, tmp_path / "log", partial(send_itself, signal.SIGTERM))
    assert (stopped.join(), other.join()) == (128 + signal.SIGTERM, 1)
    assert ") ended: stopped by SIGTERM; what was written stays; go on with: " in other.output


def test_an_error_of_one_process_is_told_by_the_other(run: Path, tmp_path: Path) -> None:
    other, failing = start("evaluate", run, tmp_path / "log", fail)
    assert (failing.join(), other.join()) == (2, 1)
    assert ") ended: the rule, the value: the fix; what was written stays" in other.output


# Errors of all processes


def test_an_error_of_both_processes_ends_both(run: Path, tmp_path: Path) -> None:
    command = ["evaluate", str(run), f"--images={tmp_path / 'none'}", f"--cache={tmp_path / 'cache'}"]
    ranks = start_ranks(command, tmp_path / "log")
    assert [rank.join() for rank in ranks] == [2, 2]
    assert "images must be an npz file or a folder, got" in ranks[0].output


def test_torchrun_shows_an_error_of_all_processes_once(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m", "kairostep"]
    typed = ["train", "digits", "--batch_size=128", "--output=new"]
    done = subprocess.run(
        [*launch, *typed], env=real_environment(tmp_path), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr.count("kairostep: error: ") == 1, done.stderr
    assert (
        "batch_size must be a multiple of accumulate times the processes, 1 x 3, got 128: launch 2 processes, or pass "
        "--batch_size=126 or --batch_size=129\n" in done.stderr
    )


def test_a_process_that_waits_in_vain_for_the_first_speaks(tmp_path: Path) -> None:
    environment = {**rank_environments(2)[1], "TORCHELASTIC_RUN_ID": "none"}
    waiting = Child(["train", "digits", "--steps=0"], tmp_path / "log", wait_briefly, environment)
    assert not waiting.ends_within(1.0)
    assert waiting.output == ""
    assert waiting.join() == 2
    assert waiting.output.startswith("kairostep: error: steps must be a whole number of at least 1, got 0")


def wait_briefly() -> None:
    failures.SECONDS_FOR_FIRST_PROCESS = 3.0
