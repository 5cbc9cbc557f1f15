"""Makes the modules of this folder importable, makes runs and their page, and opens a browser for what needs it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser import open_browser
from made_runs import add_evaluations, add_grids, make_run

from kairostep.reports import write_report


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield a headless Chromium of playwright's, or skip where there is none."""
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("runs")
    made = [make_run(place / f"{name}-{seed}", name, seed) for name in ("adaptive", "uniform") for seed in (0, 1)]
    for directory in made:
        add_grids(directory, [500, 1000])
        add_evaluations(directory, 1000)
    return made


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(runs, tmp_path_factory.mktemp("page") / "report.html")
