"""The demo trains every arm by `kairostep compare`, goes on where it was stopped, and proves nothing by one seed."""

import json
import re
import shlex
from pathlib import Path

import pytest
from small_runs import Child

ARMS = ("uniform", "uniform-min_snr", "root_loss", "adaptive")
PATIENCE = 300.0  # seconds, on a machine with much else to do
MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text()


def run_demo(output: Path) -> str:
    line = re.search(r"\$\(BIN\)/kairostep (compare .*)", MAKEFILE)
    assert line is not None
    words = [word for word in shlex.split(line[1]) if word not in ("--steps=500", "runs/demo")]
    short = ["--steps=12", "--sample_steps=4", "--held_out_images=64"]
    log = output.with_suffix(".log")
    log.unlink(missing_ok=True)
    child = Child([*words, str(output), *short], log)
    assert child.ends_within(PATIENCE), child.output
    assert child.join() == 0, child.output
    return child.output


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "demo"


@pytest.fixture(scope="module")
def printed(output: Path) -> str:
    return run_demo(output)


@pytest.mark.parametrize("arm", ARMS)
def test_the_table_has_each_arm_and_its_run_the_same_budget(output: Path, printed: str, arm: str) -> None:
    last = json.loads((output / "runs" / arm / "rate-0.006/seed-0/metrics.jsonl").read_text().splitlines()[-1])
    assert last["training_evaluations"] == 12 * 128
    assert any(line.startswith(f"{arm} ") for line in printed.splitlines())
    assert bool(last["probe_evaluations"]) == (arm == "adaptive")


def test_it_ends_with_verdicts_that_one_seed_cannot_give(printed: str) -> None:
    verdicts = [line for line in printed.splitlines() if line.endswith("one seed: no verdict")]
    assert [line.split()[0] for line in verdicts] == list(ARMS[1:])
    assert "One seed and a few minutes show that everything works, not which sampler is best" in MAKEFILE


def test_the_page_shows_every_arm(output: Path, printed: str) -> None:
    assert str(output / "comparison.html") in printed
    page = (output / "comparison.html").read_text()
    assert all(f"{arm}/seed-0" in page for arm in ARMS)


def test_a_second_demo_shows_the_same_without_training(output: Path, printed: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in output.glob("runs/*/*/*/checkpoints/*")}
    again = run_demo(output)
    assert again.strip() in printed
    assert {path: path.stat().st_mtime_ns for path in output.glob("runs/*/*/*/checkpoints/*")} == before
