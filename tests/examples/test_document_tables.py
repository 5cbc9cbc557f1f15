"""The tables of README and docs are those of the results and of the classes, and the README stays short."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("document_tables")


def write_log(path: Path, arm: str, batch: int, errors: list[float]) -> None:
    """Write the log of a run with a checkpoint every 10 steps and seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, object]] = [{"arm": arm, "seed": int(path.stem[-1])}]
    for number, error in enumerate(errors, start=1):
        step = 10 * number
        counted = {"training_evaluations": batch * step, "probe_evaluations": 0}
        lines.append({"step": step, "seconds": step, "epsilon_mse": error, **counted})
    lines.append({"fid": [10.0, 0.1]})
    path.write_text("\n".join(map(json.dumps, lines)))


def test_documents_have_the_tables_of_the_results_and_classes(tables: ModuleType) -> None:
    for document, own in tables.documents().items():
        text = document.read_text()
        assert tables.with_tables(text, own) == text, f"{document.name}: run python benchmarks/document_tables.py"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_rows_are_samplers_and_batch_sizes_beside_uniform(tables: ModuleType, tmp_path: Path) -> None:
    for seed in (0, 1):
        write_log(tmp_path / "a" / "uniform" / f"seed-{seed}.jsonl", "uniform", 128, [0.4, 0.2, 0.1])
        write_log(tmp_path / "a" / "root_loss" / f"seed-{seed}.jsonl", "root_loss", 128, [0.2, 0.1, 0.05])
        write_log(tmp_path / "b" / "uniform" / f"seed-{seed}.jsonl", "uniform", 256, [0.4, 0.3, 0.2])
    _, _, *rows = tables.results_table(tmp_path).splitlines()
    assert rows == [
        "| `Uniform` | 128 | 0.10000 | 10.0, 10.0 | 1 |",
        "| `RootLoss` | 128 | 0.05000 | 10.0, 10.0 | 0.67 (0.67 to 0.67) |",
        "| `Uniform` | 256 | 0.20000 | 10.0, 10.0 | not reached |",
    ]


def test_rates_stand_in_their_order_with_the_steps_to_uniforms_error(tables: ModuleType, tmp_path: Path) -> None:
    for rate, errors in (("16e-4", [0.2, 0.1, 0.05]), ("4e-4", [0.4, 0.3, 0.2])):
        write_log(tmp_path / f"rate-{rate}" / "uniform" / "seed-0.jsonl", "uniform", 128, [0.4, 0.2, 0.1])
        write_log(tmp_path / f"rate-{rate}" / "root_loss" / "seed-0.jsonl", "root_loss", 128, errors)
    _, _, *rows = tables.rates_table(tmp_path).splitlines()
    assert rows == [
        "| 4e-4 | 0.10000 / 0.20000 | 10.0 / 10.0 | not reached |",
        "| 16e-4 | 0.10000 / 0.05000 | 10.0 / 10.0 | 0.67 |",
    ]


def test_the_row_of_an_arm_stands_beside_uniform_of_the_same_seeds(tables: ModuleType) -> None:
    (row,) = [line for line in tables.measured_table(["speed"]).splitlines() if "`speed`" in line]
    setting, _, seeds, *_, beside, _ = row.strip("| ").split(" | ")
    assert (setting, seeds) == ("`cifar10-small-linear`, 1500 steps", "1")
    assert len(beside.split(", ")) == 1


def test_a_document_without_the_markers_is_refused(tables: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"must have the lines <!-- costs: .* once: put them where"):
        tables.with_tables("# kairostep", {"costs": ""})


def test_the_picture_of_the_study_has_the_numbers_of_the_table(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    picture = importlib.import_module("study_picture")
    drawn = {measure: picture.read_curves(measure) for measure in picture.MEASURES}
    for arm, curves in drawn["epsilon_mse"].items():
        assert [max(curve) for curve in curves] == [8000] * 3
        fids = [[curve[step] for step in (2000, 4000, 6000, 8000)] for curve in drawn["fid"][arm]]
        row = f"{picture.mean_curve(curves)[8000]:.5f} | {', '.join(f'{values[-1]:.1f}' for values in fids)}"
        assert row in tables.results_table()
    monkeypatch.setattr(picture, "PICTURE", tmp_path / "study.png")
    picture.main()
    assert (tmp_path / "study.png").stat().st_size > 10_000
