"""Logs of earlier studies are read, and the published tables are those of the logs."""

import math
import shutil
from pathlib import Path

import pytest

import kairostep.cli
from kairostep.comparison.log_tables import MARKERS, base_cell, cell, summary, tables
from kairostep.comparison.logs import Log
from kairostep.seed_statistics import Ratio

RESULTS = Path(__file__).parents[2] / "results"
STUDIES = [RESULTS / "convergence", *sorted(RESULTS.glob("study/*/rate-*"))]


@pytest.mark.parametrize("folder", STUDIES, ids=lambda path: str(path.relative_to(RESULTS)))
def test_the_published_tables_are_those_of_the_logs(folder: Path) -> None:
    long, brief = tables(folder)
    assert long in (folder / "README.md").read_text()
    if folder.name == "convergence":
        assert brief in (RESULTS / "README.md").read_text()


def test_the_command_writes_them_where_they_belong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "study" / "mine"
    shutil.copytree(RESULTS / "study" / "linear-8000" / "rate-16e-4", folder)
    expected = (folder / "README.md").read_text()
    (folder / "README.md").write_text(f"# Mine\n\n{MARKERS[0]}\n{MARKERS[1]}\n")
    kairostep.cli.main(["compare", "--table", str(tmp_path / "study")])
    assert "0.651 (0.624, 0.679)" in capsys.readouterr().out
    text = (folder / "README.md").read_text()
    assert text.partition(MARKERS[0])[2] == expected.partition(MARKERS[0])[2]


def test_a_torn_log_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "study" / "task" / "uniform" / "seed-0.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"seed": 0}\n{"step"')
    with pytest.raises(SystemExit) as left:
        kairostep.cli.main(["compare", "--table", str(tmp_path / "study")])
    assert left.value.code == 2
    assert "must be the log of a run, got" in capsys.readouterr().err


def test_the_interval_is_that_of_the_paired_logarithms() -> None:
    text = summary([Ratio(math.exp(-0.1)), Ratio(1.0), Ratio(math.exp(0.1))], seeds=False)
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert text == f"1.000 ({math.exp(-half):.3f}, {math.exp(half):.3f})"
    assert summary([Ratio(0.9), Ratio(1.2, reached=False)]) == "> 1.039 (1 of 2 reached it) [0.900, > 1.200]"


def test_wall_clock_is_compared_within_one_commit() -> None:
    def log(commit: str, seconds: float) -> Log:
        points = [
            {"step": n, "seconds": n * seconds, "training_evaluations": n, "probe_evaluations": 0, "epsilon_mse": 1 / n}
            for n in (1, 2)
        ]
        return Log({"commit": commit}, points, {})

    base, same, other = log("a", 1.0), log("a", 0.5), log("b", 0.5)
    for column in ("seconds per step", "wall-clock to uniform's ε-MSE"):
        assert cell(column, [(same, base), (other, base)], seeds=False) == "0.500 (one seed)"
        assert cell(column, [(other, base)], seeds=False) == "-"
    assert cell("evaluations to uniform's ε-MSE", [(other, base)], seeds=False) == "1.000 (one seed)"


def test_fid_is_told_of_those_that_have_it() -> None:
    with_fid, without = (Log({}, [], end) for end in ({"fid": [12.3456, 0.1]}, {}))
    assert base_cell("FID", [without, with_fid]) == "-, 12.35"
    assert base_cell("FID", [without, without]) == "-"
