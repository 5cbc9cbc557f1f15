"""SIGINT, SIGTERM and SIGHUP: the run saves, says how to go on, and goes on as if nothing had been."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_runs import (
    ADAPTIVE,
    PATIENCE,
    Child,
    arguments,
    assert_same_run,
    last_step,
    num_lines,
    real_environment,
    state_of,
)

import kairostep.cli
from kairostep.runs import checkpoint
from kairostep.training import interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_the_run_goes_on(
    number: signal.Signals, tmp_path: Path, whole_runs: Callable[..., Path]
) -> None:
    directory = tmp_path / "stopped"
    child = Child(arguments(directory, ADAPTIVE), tmp_path / "log")
    assert child.wait_until(lambda: num_lines(directory) >= 2)
    assert child.send(number) == 128 + number
    step = last_step(directory)
    assert 0 < step < ADAPTIVE["steps"]
    message = f"stopped at step {step} of {ADAPTIVE['steps']}, saved; go on with: kairostep train --config "
    assert message in child.output
    assert "Traceback" not in child.output
    assert state_of(directory)["trainer"]["step"] == step
    kairostep.cli.main(arguments(directory, ADAPTIVE))
    assert_same_run(directory, whole_runs("adaptive", ADAPTIVE))


def test_the_command_in_the_message_works_in_a_shell(tmp_path: Path, whole_runs: Callable[..., Path]) -> None:
    directory = tmp_path / "a run's directory"
    environment = real_environment(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "kairostep", *arguments(directory, ADAPTIVE)],
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE
    while num_lines(directory) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, errors
    found = re.search(r"stopped at step (\d+) of 50, saved; go on with: (.*)$", errors, re.MULTILINE)
    assert found, errors
    again = subprocess.run(
        found[2], shell=True, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert again.returncode == 0, again.stderr
    assert f"going on from step {found[1]} to" in again.stdout
    assert_same_run(directory, whole_runs("adaptive", ADAPTIVE))


def hang_while_saving() -> None:
    checkpoint.save_file = lambda *_, **__: time.sleep(PATIENCE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_that_hangs(number: signal.Signals, tmp_path: Path) -> None:
    directory = tmp_path / "hangs"
    endless = {**ADAPTIVE, "steps": 100_000, "checkpoint_every": 100_000}
    child = Child(arguments(directory, endless), tmp_path / "log", hang_while_saving)
    assert child.wait_until(lambda: num_lines(directory) >= 1)
    child.tell(number)
    assert not child.ends_within(0.5)
    assert child.send(number) != 0
    assert "stopped at step" not in child.output
    assert "Traceback" not in child.output


def test_several_processes_agree_often_at_first_then_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, step = [], 0

    def sum_over_ranks(own: torch.Tensor) -> torch.Tensor:
        asked.append(step)
        return 2 * own

    monkeypatch.setattr(interruption, "world_size", lambda: 2)
    monkeypatch.setattr(interruption, "sum_over_ranks", sum_over_ranks)
    monkeypatch.setattr(interruption.time, "monotonic", lambda: step / 16)  # seconds
    both = interruption.Interruption(torch.device("cpu"))
    for step in range(1, 150):
        assert not both.agreed(step)
    assert asked == [1, 3, 7, 15, 31, 63, 95, 127]
    both.signal = signal.SIGTERM
    assert [both.agreed(step) for step in range(157, 161)] == [False, False, True, False]
