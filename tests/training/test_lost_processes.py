"""One of two processes is killed, hangs or fails: the other says which, what is lost and how to go on, and ends."""

import ctypes
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SMALL, Child, arguments, last_step, num_lines, start_ranks
from test_failures import limit_files

from kairostep.ranks import is_lost_rank, rank
from kairostep.runs import checkpoint
from kairostep.runs.directory import DirectoryLock
from kairostep.training import Trainer, process_watch

ENDLESS = {**SMALL, "steps": 10**6, "rank_timeout": 2, "evaluate_every": 10**6, "density_every": 10**6}
PATIENCE = 15.0  # seconds in which the other process ends: 2 of silence, 1 to end, the rest for busy cores


def be_quick() -> None:
    """Leave less time to the main thread, so that the tests need not wait for it."""
    process_watch.SECONDS_TO_END, process_watch.SUSPICIOUS_SILENCE = 1.0, 1.0


def fail(error: BaseException) -> None:
    """Raise the error in step 8."""
    be_quick()
    plain = Trainer.step

    def step(self: Trainer, *arguments: Any) -> Any:
        if self.step_number == 8:
            raise error
        return plain(self, *arguments)

    Trainer.step = step  # type: ignore[method-assign]


def start_pair(
    tmp_path: Path, own: Callable[[], None] = be_quick, *, which: int = 1, **settings: Any
) -> tuple[Child, Child]:
    """Start two processes. Return the one that is to be lost, with what it prepares, and the other."""
    prepare = {which: own, 1 - which: be_quick}
    children = start_ranks(arguments(tmp_path / "run", {**ENDLESS, **settings}), tmp_path / "log", prepare=prepare)
    return children[which], children[1 - which]


def start_training(tmp_path: Path, which: int, **settings: Any) -> tuple[Child, Child]:
    """Start two processes and wait until they have taken 15 steps."""
    pair = start_pair(tmp_path, which=which, **settings)
    assert pair[0].wait_until(lambda: num_lines(tmp_path / "run") >= 3)
    return pair


def complaint_of(child: Child) -> str:
    """Return the one line that says what is wrong."""
    lines = [line for line in child.output.splitlines() if "kairostep: error" in line]
    assert len(lines) == 1, child.output
    assert "Traceback" not in child.output
    assert "gloo" not in child.output
    return lines[0]


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_process(which: int, tmp_path: Path) -> None:
    lost, other = start_training(tmp_path, which)
    assert lost.send(signal.SIGKILL) == -signal.SIGKILL
    assert other.ends_within(PATIENCE)
    assert other.join() == 1
    complaint = complaint_of(other)
    assert f"process {which} of 2 (pid {lost.process.pid} on " in complaint
    assert ") ended without a word, as if killed; lost: " in complaint
    found = re.search(
        r"lost: (\d+) steps? since the last checkpoint \(of step (\d+)\); go on with: accelerate ", complaint
    )
    assert found, complaint
    assert int(found[1]) <= 1 + ENDLESS["checkpoint_every"]
    assert int(found[2]) <= last_step(tmp_path / "run")


def test_a_process_that_hangs(tmp_path: Path) -> None:
    lost, other = start_training(tmp_path, 0, checkpoint_every=10**6)  # while it writes it may be silent for longer
    lost.tell(signal.SIGSTOP)
    try:
        assert other.ends_within(PATIENCE)
        assert other.join() == 1
        assert f"process 0 of 2 (pid {lost.process.pid} on " in complaint_of(other)
        assert ") has been silent for 2 s: it hangs, or cannot be reached; lost: " in complaint_of(other)
        lost.tell(signal.SIGCONT)  # and it sees that it is alone
        assert lost.join() == 1
        assert "has been silent for 2 s" in complaint_of(lost)
    finally:
        lost.tell(signal.SIGKILL)


def be_impatient() -> None:
    """Take a step of 4 seconds for one that does not end."""
    be_quick()
    process_watch.BUSY_FACTOR = 2


def stick() -> None:
    """Wait in step 8, as a read from a dead network disk does: other threads go on."""
    be_impatient()
    plain = Trainer.step

    def step(self: Trainer, *arguments: Any) -> Any:
        time.sleep(1000 if self.step_number == 8 else 0)
        return plain(self, *arguments)

    Trainer.step = step  # type: ignore[method-assign]


def test_a_process_that_is_stuck_while_its_heart_beats(tmp_path: Path) -> None:
    prepare = {0: be_impatient, 1: stick}
    children = start_ranks(arguments(tmp_path / "run", ENDLESS), tmp_path / "log", prepare=prepare)
    assert [child.join() for child in children] == [1, 1]
    said = "".join(child.output for child in children)
    assert re.search(
        r"process [01] of 2 \(pid \d+ on \S+\) has been at one step for \d s: it, or a process that it waits for, is "
        r"stuck in its data, its disk or its GPU; lost: 1 step since the last checkpoint \(of step 7\); go on",
        said,
    ), said
    assert "Traceback" not in said


def test_a_signal_while_another_process_hangs(tmp_path: Path) -> None:
    lost, other = start_training(tmp_path, 1, rank_timeout=1000, checkpoint_every=10**6)
    lost.tell(signal.SIGSTOP)
    try:
        time.sleep(0.5)  # the other now waits for it
        other.tell(signal.SIGTERM)
        assert other.ends_within(PATIENCE)
        assert other.join() == 128 + signal.SIGTERM
        assert "SIGTERM came, but nothing can be saved, since process 1 of 2" in complaint_of(other)
        assert "; lost: " in complaint_of(other)
    finally:
        lost.tell(signal.SIGKILL)


def test_a_process_without_memory(tmp_path: Path) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    lost, other = start_pair(tmp_path, partial(fail, error))
    assert (lost.join(), other.join()) == (1, 1)
    assert "memory ran out (CUDA out of memory. Tried to allocate 9 GiB): lower --batch_size" in complaint_of(lost)
    assert f"process 1 of 2 (pid {lost.process.pid} on " in complaint_of(other)
    assert ") ended: OutOfMemoryError: CUDA out of memory. Tried" in complaint_of(other)
    assert "lost: 1 step since the last checkpoint (of step 7); go on with: accelerate" in complaint_of(other)


def test_a_full_disk(tmp_path: Path) -> None:
    lost, other = start_pair(tmp_path, partial(limit_files, 20_000), which=0)
    assert (lost.join(), other.join()) == (1, 1)
    assert "File too large" in complaint_of(lost)
    assert f") ended: cannot write to {tmp_path / 'run'} at step 7: " in complaint_of(other)
    assert complaint_of(other).count("go on with") == 1


def test_a_process_that_fails_at_the_start(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path / "run")  # which the first process alone asks for
    lost, other = start_pair(tmp_path, which=0)
    assert (lost.join(), other.join()) == (2, 1)
    lock.release()
    assert "in which another is at work" in complaint_of(lost)
    assert "ended: a directory must be written by one command at a time" in complaint_of(other)
    assert "no step was taken yet: run the same command again" in complaint_of(other)


# A slow disk is no lost process


def write_slowly() -> None:
    """Take three seconds to write, in which other threads have to wait too, as with older versions of safetensors."""
    plain = checkpoint.save_file

    def save_file(*arguments: Any, **options: Any) -> None:
        ctypes.PyDLL(None).sleep(3)
        plain(*arguments, **options)

    checkpoint.save_file = save_file


@pytest.mark.skipif(sys.platform == "win32", reason="sleep is a function of POSIX")
def test_a_slow_disk_ends_nothing(tmp_path: Path) -> None:
    settings = {"steps": 3, "held_out_images": 0, "rank_timeout": 1}
    pair = start_pair(tmp_path, write_slowly, which=0, **settings)
    assert [child.join() for child in pair] == [0, 0], [child.output for child in pair]


def test_only_the_loss_of_another_process_is_taken_for_one() -> None:
    gloo = "[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:61104: Connection reset by peer"
    assert rank() == 0
    assert not is_lost_rank(RuntimeError(gloo))  # one process has no other
    assert is_lost_rank(torch.distributed.DistNetworkError("the server is gone"))
    assert not is_lost_rank(RuntimeError("shapes cannot be multiplied"))
    assert not is_lost_rank(ValueError(gloo))
