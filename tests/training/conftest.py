"""Lets the tests of this folder import `small_runs` and `by_hand`, also in the processes they start."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


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
