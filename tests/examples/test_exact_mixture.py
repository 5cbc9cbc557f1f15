"""The benchmark on mixtures runs from end to end: a row for each arm, probes charged, a picture."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "mixtures" / "exact_mixture.py"
ARMS = [
    "uniform",
    "least-noise",
    "root-loss + pairs + stable target",
    "adaptive, loss",
    "control: root-loss, permuted",
    "oracle",
]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact_mixture")
    size = ["--seeds", "2", "--steps", "60", "--settings", "flow-2", "--processes", "1", "--output", str(folder)]
    command = [sys.executable, str(BENCHMARK), *size, "--arms", *ARMS]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert printed.strip() == (folder / "table.md").read_text().strip()
    return folder


def test_every_arm_has_a_row(output: Path) -> None:
    rows = [line for line in (output / "table.md").read_text().splitlines() if line.startswith("| ")]
    for arm in ARMS:
        assert any(row.startswith(f"| {arm} ") for row in rows)


def test_only_probes_are_charged_beside_the_batches(output: Path) -> None:
    outcomes = json.loads((output / "outcomes.json").read_text())["outcomes"]["flow-2"]
    assert outcomes["uniform"]["evaluations"] == outcomes["oracle"]["evaluations"] == [384.0 * i for i in range(1, 12)]
    assert outcomes["adaptive, loss"]["evaluations"][-1] == 66 * 64 + 2 * 640  # after the steps 1 and 41


def test_the_excess_falls(output: Path) -> None:
    for outcome in json.loads((output / "outcomes.json").read_text())["outcomes"]["flow-2"].values():
        first, last = (sum(seed[0] for seed in outcome["excess"][i]) for i in (0, -1))
        assert last < first


def test_the_picture_can_be_seen(output: Path) -> None:
    with Image.open(output / "curves.png") as picture:
        assert min(picture.size) > 300
