"""Runs beside each other have a GPU each, and none outlives the command that started them."""

import os
import signal
import time
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from small_comparisons import command
from small_runs import Child, num_lines

from kairostep.comparison import conduct
from kairostep.comparison.conduct import Work
from kairostep.comparison.plan import PlannedRun
from kairostep.comparison.workers import begin_worker, visible_gpus, work_for_parent, worker_pool
from kairostep.training.run_errors import RunError

PATIENCE = 120.0  # seconds, on a machine with much else to do
PROC = Path("/proc")


@pytest.mark.parametrize(
    ("named", "num", "found"),
    [
        (None, 0, []),
        (None, 3, ["0", "1", "2"]),
        ("2,5", 2, ["2", "5"]),
        ("GPU-1a2b, GPU-3c4d", 2, ["GPU-1a2b", "GPU-3c4d"]),
        ("3,-1,4", 1, ["3"]),  # as CUDA reads it
        ("", 0, []),
    ],
)
def test_gpus_are_those_that_are_visible(
    named: str | None, num: int, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
    assert visible_gpus() == found


def meet(folder: Path, num: int) -> str | None:
    """Wait until so many processes are here, and return the GPU of this one."""
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.iterdir())) < num and time.monotonic() < deadline:
        time.sleep(0.05)
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_each_worker_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    with worker_pool(2, ["4", "7"]) as pool:
        found = [each.result() for each in [pool.submit(meet, tmp_path, 2) for _ in range(2)]]
    assert sorted(map(str, found)) == ["4", "7"]


@pytest.mark.parametrize(("number", "gpu"), [(1, "7"), (2, "6")])
def test_a_worker_asks_cuda_nothing_before_it_has_its_gpu(
    number: int, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = SimpleQueue[int]()
    numbers.put(number)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("is_available", "device_count", "init"):
        monkeypatch.setattr(torch.cuda, name, lambda: pytest.fail("fixes what is visible"))
    begin_worker(numbers, 3, ["6", "7"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu


def test_the_gpus_of_the_command_go_to_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def no_pool(jobs: int, gpus: list[str]) -> None:
        given.append((jobs, gpus))
        raise RunError("enough")

    monkeypatch.setattr(conduct, "worker_pool", no_pool)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RunError):
        Work(2**31)._train_in_processes([None, None, None])  # type: ignore[list-item]
    assert given == [(3, ["0", "1"])]  # no more than there are runs


def end_at_once(run: PlannedRun) -> float:
    os._exit(1)


def test_a_worker_that_is_killed_ends_the_command_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct, "train_run", end_at_once)
    with pytest.raises(RunError, match="ended without a word"):
        Work(2)._train_in_processes([None])  # type: ignore[list-item]


def descendants(pid: int) -> set[int]:
    """Return the processes that a process has started, and those that they have."""
    parents = {}
    for path in PROC.glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # ended meanwhile
    found, before = {pid}, set[int]()
    while found != before:
        before = set(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}


def lives(pid: int) -> bool:
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(not (PROC / "self" / "stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_command_that_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    line = command(tmp_path / "out", "--seeds", "1", "--steps=1000000", "--log_every=5", "--jobs", "2")
    child = Child(line, tmp_path / "log")
    runs = [tmp_path / "out" / "runs" / arm / "rate-0.006" / "seed-0" for arm in ("uniform", "root_loss")]
    deadline = time.monotonic() + PATIENCE
    while not all(run.is_dir() and num_lines(run) >= 2 for run in runs):
        assert child.process.is_alive(), child.output
        assert time.monotonic() < deadline, child.output
        time.sleep(0.05)
    assert child.process.pid is not None
    workers = descendants(child.process.pid)
    assert len(workers) >= 2
    assert child.send(number) == (-number if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + PATIENCE
    while left := {pid for pid in workers if lives(pid)}:
        assert time.monotonic() < deadline, f"{left} of {workers}\n{child.output}"
        time.sleep(0.1)
    assert all(any((run / "checkpoints").iterdir()) for run in runs)  # saved on the way out


def test_a_signal_ends_work_that_does_not_heed_it_yet() -> None:
    """A run that is built: reading a folder and encoding latents may take long."""
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            work_for_parent(signal.raise_signal, signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # until the next run
    finally:
        signal.signal(signal.SIGINT, before)
