"""A reader that goes away, a full disk behind stdout, a closed stream: training goes on, and ends as it would have."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import ADAPTIVE, PATIENCE, Child, arguments, assert_same_run, last_step, num_lines, real_environment

SHELL = {"a reader that goes away": "2>&1 | head -n 1", "a full disk": "> /dev/full 2>&1"}


@pytest.mark.parametrize("redirection", SHELL.values(), ids=SHELL)
def test_a_run_whose_output_is_lost_ends_as_any_other(
    redirection: str, tmp_path: Path, whole_runs: Callable[..., Path]
) -> None:
    directory = tmp_path / "run"
    command = " ".join(f"'{argument}'" for argument in arguments(directory, ADAPTIVE))
    ended = subprocess.run(
        ["bash", "-c", f"set -o pipefail; kairostep {command} {redirection}"],
        env={**real_environment(tmp_path), "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert last_step(directory) == ADAPTIVE["steps"]
    assert_same_run(directory, whole_runs("adaptive", ADAPTIVE))  # which has no .lock in it


def close_output() -> None:
    for descriptor in (1, 2):
        os.close(descriptor)
    sys.stdout = sys.stderr = None  # as the interpreter has them where they were closed at its start


def test_a_run_without_stdout_and_stderr_ends_as_any_other(tmp_path: Path, whole_runs: Callable[..., Path]) -> None:
    child = Child(arguments(tmp_path / "run", ADAPTIVE), tmp_path / "log", close_output)
    assert child.join() == 0
    assert_same_run(tmp_path / "run", whole_runs("adaptive", ADAPTIVE))


# A terminal that hangs up


def lose_terminal() -> None:
    """Write to a pipe that nobody reads, as to a terminal that was closed."""
    reading, writing = os.pipe()
    os.close(reading)
    for descriptor in (1, 2):
        os.dup2(writing, descriptor)


def test_a_lost_terminal_saves_although_it_tells_twice(tmp_path: Path, whole_runs: Callable[..., Path]) -> None:
    directory = tmp_path / "run"
    endless = {**ADAPTIVE, "steps": 10**6, "checkpoint_every": 10**6}
    child = Child(arguments(directory, endless), tmp_path / "log", lose_terminal)
    assert child.wait_until(lambda: num_lines(directory) >= 2)
    child.tell(signal.SIGHUP)
    assert child.send(signal.SIGHUP) == 128 + signal.SIGHUP
    assert last_step(directory) > 0
    again = Child(arguments(directory, {**ADAPTIVE, "steps": max(50, last_step(directory) + 1)}), tmp_path / "log")
    assert again.join() == 0, again.output


def hold_off_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path, whole_runs: Callable[..., Path]) -> None:
    child = Child(arguments(tmp_path / "run", ADAPTIVE), tmp_path / "log", hold_off_hangups)
    assert child.wait_until(lambda: num_lines(tmp_path / "run") >= 2)
    assert child.send(signal.SIGHUP) == 0
    assert_same_run(tmp_path / "run", whole_runs("adaptive", ADAPTIVE))
