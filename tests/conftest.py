"""One thread per process: the tensors of these tests are small, and threads waiting for each other cost more."""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from real_libraries import LIBRARIES

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and so would the runs that tests start
sys.path.append(str(LIBRARIES))  # last: what the environment has comes first


LONG = (
    "test_kills",
    "test_processes",
    "test_rank_kills",
    "test_lost_processes",
    "test_conduct",
    "test_demo",
    "test_outside_parts",
    "test_signals",
    "test_docs_site",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that take longest: at the end, one of them would keep a single process busy."""
    items.sort(key=lambda item: item.path.stem not in LONG)


def pytest_xdist_auto_num_workers() -> int:
    """Return the processes of `-n auto`: one more than there are cores, since tests of runs wait for each other."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 1


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of the test's own, as a new process on a CPU would."""
    from accelerate.state import AcceleratorState

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)  # accelerate remembers the precision of the first run in a process


@pytest.fixture(scope="session")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives the directory of a run never interrupted, trained once per session."""
    from small_runs import train_here

    done: dict[str, Path] = {}

    def directory_of(name: str, settings: Mapping[str, Any]) -> Path:
        if name not in done:
            done[name] = tmp_path_factory.mktemp("whole") / name
            train_here(done[name], settings)
        return done[name]

    return directory_of
