"""The demo trains every arm, goes on where it was stopped, and its table tells what the runs wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ARMS = ("uniform", "min_snr", "root_loss", "adaptive")
DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def run_demo(output: Path) -> str:
    command = [sys.executable, str(DEMO), "--steps", "12", "--output", str(output)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def printed(output: Path) -> str:
    return run_demo(output)


@pytest.mark.parametrize("arm", ARMS)
def test_the_table_has_the_figures_of_each_run(output: Path, printed: str, arm: str) -> None:
    last = json.loads((output / arm / "metrics.jsonl").read_text().splitlines()[-1])
    (row,) = [line for line in printed.splitlines() if line.startswith(f"{arm} ")]
    assert f"{last['held_out']['loss']:.5f}" in row
    assert f"{last['training_evaluations']:,}" in row
    assert last["training_evaluations"] == 12 * 128


def test_only_the_adaptive_sampler_probes(printed: str) -> None:
    probing = [line.split()[0] for line in printed.splitlines() if " + " in line and " ± " in line]
    assert probing == ["adaptive"]


def test_the_picture_shows_all_runs_side_by_side(output: Path, printed: str) -> None:
    assert str(output / "samples.png") in printed
    width, height = size_of(output / "samples.png")
    grids = [size_of(next((output / arm / "samples").glob("*.png"))) for arm in ARMS]
    assert width > sum(grid[0] for grid in grids)
    assert height > max(grid[1] for grid in grids)


def test_the_report_shows_every_arm(output: Path, printed: str) -> None:
    assert str(output / "report.html") in printed
    page = (output / "report.html").read_text()
    assert all(arm in page for arm in ARMS)


def test_a_second_demo_shows_the_same_table_without_training(output: Path, printed: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in output.glob("*/checkpoints/*")}
    again = run_demo(output)
    table = [line for line in printed.splitlines() if " ± " in line]
    assert [line for line in again.splitlines() if " ± " in line] == table
    assert {path: path.stat().st_mtime_ns for path in output.glob("*/checkpoints/*")} == before
