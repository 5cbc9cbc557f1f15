"""The benchmark of convergence: runs are kept once, without places, and tables put arms beside uniform."""

import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ("--held_out_images=32", "--sample_steps=1", "--batch_size=16", "--network.channels=8")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("convergence_table")


@pytest.fixture
def run_arms(monkeypatch: pytest.MonkeyPatch, table: ModuleType, tmp_path: Path) -> Callable[..., None]:
    convergence = importlib.import_module("convergence")

    def run(arms: str, *settings: str) -> None:
        chosen = ["--process", "flow", "--arms", arms, "--steps", "4", "--output", str(tmp_path), *SMALL, *settings]
        monkeypatch.setattr(sys, "argv", ["convergence.py", "run", *chosen])
        convergence.main()

    return run


def test_runs_are_kept_once_without_places(
    tmp_path: Path, run_arms: Callable[..., None], table: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    run_arms("uniform,infonoise")
    logs = sorted(tmp_path.glob("digits-flow/*/seed-0.jsonl"))
    assert [path.parent.name for path in logs] == ["infonoise", "uniform"]
    lines = [json.loads(line) for line in logs[1].read_text().splitlines()]
    assert [line["step"] for line in lines[1:-1]] == [1, 2, 3, 4]
    assert lines[-2]["epsilon_mse"] < lines[-2]["loss"]  # (1 - t)**2 times the error of the velocity, averaged
    assert lines[-1]["epsilon_mse"][0] == pytest.approx(lines[-2]["epsilon_mse"], rel=0.2)
    kept = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert str(tmp_path) not in kept

    before = {path: path.stat().st_mtime_ns for path in logs}
    run_arms("uniform,infonoise")
    assert capsys.readouterr().out.endswith("all of these runs are there\n")
    with pytest.raises(SystemExit, match=r"learning_rate: 0.003 -> 0.1\)"):
        run_arms("min_snr", "--learning_rate=0.1")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("digits-flow/*/seed-0.jsonl")} == before

    short = table.write_tables(tmp_path)
    assert "| infonoise | 1 |" in short
    assert short.count("one seed") >= 2
    written = (tmp_path / "README.md").read_text()
    table.write_tables(tmp_path)
    assert (tmp_path / "README.md").read_text() == written


def test_runs_with_and_without_fid_compare_but_not_fid_of_other_numbers(tmp_path: Path, table: ModuleType) -> None:
    convergence = importlib.import_module("convergence")
    config = convergence.resolved(convergence.preset("digits"))

    def task(num_generated: int) -> Any:
        return convergence.Task("uniform", config, tmp_path / "digits-linear" / "uniform", num_generated, fid_every=0)

    for num_generated in (0, 64, 0):
        convergence.check(task(num_generated))
        convergence.write_log(task(num_generated), [])
    with pytest.raises(ValueError, match="num_generated: 64 -> 128"):
        convergence.check(task(128))

    with_fid, without = (table.Log(tmp_path, {}, [], end) for end in ({"fid": [12.3456, 0.1]}, {}))
    assert table.base_cell("FID", [without, with_fid]) == "-, 12.35"
    assert table.base_cell("FID", [without, without]) == "-"


def test_the_cost_of_reaching_a_loss_is_linear_in_its_logarithm(table: ModuleType) -> None:
    cost = table.cost_to_reach
    assert cost([10, 20, 30], [1.0, 0.25, 0.1], 0.5) == pytest.approx(15)
    assert cost([10, 20, 30], [1.0, 0.25, 0.1], 0.1) == pytest.approx(30)
    assert cost([10, 20, 30], [1.0, 0.25, 0.1], 0.05) is None


def test_the_interval_is_that_of_the_paired_logarithms(table: ModuleType) -> None:
    ratio, summary = table.Ratio, table.summary
    text = summary([ratio(math.exp(-0.1)), ratio(1.0), ratio(math.exp(0.1))], seeds=False)
    half = 4.303 * 0.1 / math.sqrt(3)
    assert text == f"1.000 ({math.exp(-half):.3f}, {math.exp(half):.3f})"
    assert summary([ratio(0.9), ratio(1.2, reached=False)]) == ">1.039 (1 of 2 reached it) [0.900, >1.200]"


def test_wall_clock_is_compared_within_one_commit(table: ModuleType, tmp_path: Path) -> None:
    def log(commit: str, seconds: float) -> object:
        points = [
            {"step": n, "seconds": n * seconds, "training_evaluations": n, "probe_evaluations": 0, "epsilon_mse": 1 / n}
            for n in (1, 2)
        ]
        return table.Log(tmp_path, {"commit": commit}, points, {})

    base, same, other = log("a", 1.0), log("a", 0.5), log("b", 0.5)
    for column in ("seconds per step", "wall-clock to uniform's ε-MSE"):
        assert table.cell(column, [(same, base), (other, base)], seeds=False) == "0.500 (one seed)"
        assert table.cell(column, [(other, base)], seeds=False) == "-"
    assert table.cell("evaluations to uniform's ε-MSE", [(other, base)], seeds=False) == "1.000 (one seed)"


def test_the_published_tables_are_those_of_the_logs(table: ModuleType) -> None:
    results = BENCHMARKS.parent / "results"
    long, brief = table.tables(results / "convergence")
    assert long in (results / "convergence" / "README.md").read_text()
    assert brief in (results / "README.md").read_text()
