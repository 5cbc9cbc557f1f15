"""SIGKILL at any moment, as often as one likes: the run ends as if it had never been interrupted."""

import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from small_runs import (
    LEARNING,
    Child,
    arguments,
    assert_same_run,
    hidden_files,
    last_step,
    lines_of,
    num_lines,
    train_here,
)

NUM_KILLS = 12
Settings = Mapping[str, Any]
Moment = Callable[[Child, Path, random.Random], None]


def after_some_lines(child: Child, directory: Path, chance: random.Random) -> None:
    """A random number of metric lines after the start, and a moment later."""
    target = num_lines(directory) + chance.randint(2, 4)
    child.wait_until(lambda: num_lines(directory) >= target)
    time.sleep(chance.uniform(0, 0.03))


def after_some_time(child: Child, directory: Path, chance: random.Random) -> None:
    """A random time after the start: while it reads its checkpoint, cuts its metrics, or takes its first steps."""
    time.sleep(chance.uniform(0.2, 0.8))


def while_saving(child: Child, directory: Path, chance: random.Random) -> None:
    """While a checkpoint has not got its final name yet."""
    before = set(hidden_files(directory))  # what earlier kills left
    child.wait_until(lambda: any(path not in before for path in (directory / "checkpoints").glob(".*")))


MOMENTS = (after_some_lines, while_saving, after_some_time, while_saving)


def train_with_kills(
    directory: Path, settings: Settings, num_kills: int, seed: int, moments: tuple[Moment, ...] = MOMENTS
) -> tuple[list[int], int]:
    """Return the last saved step at each kill, and how many kills left a checkpoint half-written.

    The run is endless until the last kill, and goes on to `num_steps_after` then.
    """
    chance, log = random.Random(seed), directory.with_suffix(".log")
    steps: list[int] = []
    num_torn = 0
    while len(steps) < num_kills:
        left_before = set(hidden_files(directory))
        child = Child(arguments(directory, {**settings, "steps": 10**6}), log)
        moments[len(steps) % len(moments)](child, directory, chance)
        assert child.send(signal.SIGKILL) == -signal.SIGKILL, f"ended before kill {len(steps) + 1}:\n{child.output}"
        num_torn += any(path.parent.name == "checkpoints" for path in set(hidden_files(directory)) - left_before)
        steps.append(last_step(directory))
    child = Child(arguments(directory, {**settings, "steps": num_steps_after(steps)}), log)
    assert child.join() == 0, child.output
    assert "Traceback" not in child.output
    return steps, num_torn


def num_steps_after(steps: list[int]) -> int:
    return max(40, steps[-1] + 10)


def test_twelve_kills_leave_no_trace(tmp_path: Path) -> None:
    found, expected = tmp_path / "killed", tmp_path / "whole"
    steps, num_torn = train_with_kills(found, LEARNING["adaptive"], NUM_KILLS, seed=1)
    train_here(expected, {**LEARNING["adaptive"], "steps": num_steps_after(steps)})
    assert len(steps) == NUM_KILLS
    assert steps == sorted(steps)
    assert len(set(steps)) >= 3  # kills all along the run
    assert num_torn >= 1
    assert_same_run(found, expected)
    assert lines_of(found)[-1]["sampler"]["a_std"] > 0  # the sampler had learned something that could be lost


@pytest.mark.parametrize("name", ["loss_second_moment", "infonoise", "root_loss"])
def test_kills_leave_no_trace_with_other_samplers(name: str, tmp_path: Path) -> None:
    found, expected = tmp_path / "killed", tmp_path / "whole"
    steps, _ = train_with_kills(found, LEARNING[name], 2, seed=2, moments=(after_some_lines,))
    assert steps[-1] > 0
    train_here(expected, {**LEARNING[name], "steps": num_steps_after(steps)})
    assert_same_run(found, expected)
    density = lines_of(found)[-1]["density"]
    assert max(density) - min(density) > 0.05 / len(density)  # it had learned something that could be lost
