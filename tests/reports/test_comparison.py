"""Reports say what run directories say, whatever state those are in."""

import ast
import json
import sys
from pathlib import Path

import pytest
import yaml

import kairostep.reports
from kairostep.experiments import preset
from kairostep.experiments.config import with_overrides
from kairostep.reports import comparison_table
from kairostep.runs import RunHistory
from kairostep.training import Run

TINY = ["--network.channels=8", "--network.multipliers=[1,1]", "--network.attention=[]", "--workers=0"]
SHORT = ["--steps=4", "--batch_size=8", "--log_every=2", "--evaluate_every=2", "--held_out_images=16"]
SHORT += ["--sample_steps=2", "--warmup_steps=0"]
BELOW = (
    "bounded_files",
    "files",
    "installation",
    "renamed_options",
    "plots",
    "runs.evaluations",
    "runs.history",
    "runs.metrics",
    "runs.thinning",
    "seed_statistics",
    "version",
)  # all that reports import of the library: standard library alone
ADAPTIVE = ["--sampler=adaptive", "--sampler.every=2", "--sampler.sweep=8", "--weighting=min_snr"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the directories of two real runs, one of them with a sampler that probes."""
    place = tmp_path_factory.mktemp("runs")
    for name, settings in (("plain", ["--sampler=uniform"]), ("adaptive", ADAPTIVE)):
        Run(with_overrides(preset("digits"), [*TINY, *SHORT, *settings, f"--output={place / name}"])).train()
    return [place / "plain", place / "adaptive"]


def lines_of(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_the_numbers_of_the_table_are_those_of_the_files(runs: list[Path]) -> None:
    header, rule, *rows = comparison_table(runs).splitlines()
    assert header.split("  ")[0] == "run"
    assert rule == "-" * len(header)
    assert len(rows) == 2
    for directory, row in zip(runs, rows, strict=True):
        config = yaml.safe_load((directory / "config.yaml").read_text())
        last = lines_of(directory)[-1]
        held_out = last["held_out"]
        assert isinstance(held_out, dict)
        assert last["training_evaluations"] == 4 * 8
        probes = last["probe_evaluations"]
        assert bool(probes) == (directory.name == "adaptive")
        expected = [
            directory.name,
            config["sampler"]["name"],
            config["weighting"]["name"],
            f"{held_out['loss']:.5f} ± {held_out['loss_error']:.5f}",
            f"{held_out['vlb']:.5f} ± {held_out['vlb_error']:.5f}",
            f"32 + {probes:,}" if probes else "32",
            f"{last['seconds']:.0f}",
        ]
        assert [cell.strip() for cell in row.split("  ") if cell.strip()] == expected


def test_columns_stand_under_each_other(runs: list[Path]) -> None:
    header, _, *rows = comparison_table(runs).splitlines()
    for name in ("sampler", "weighting", "held-out loss", "evaluations", "seconds"):
        at = header.index(name)
        assert all(row[at - 1] == " " != row[at] for row in rows)


def test_a_run_is_read_whole(runs: list[Path]) -> None:
    run, lines = RunHistory.read(runs[0]), lines_of(runs[0])
    assert list(run.metrics.get("loss").values) == [line["loss"] for line in lines]
    assert list(run.metrics.get("images").steps) == [line["step"] for line in lines]
    assert run.spent("images") == 32
    assert run.spent("nothing of the kind") is None
    assert run.part("sampler") == "uniform"
    assert run.part("prediction") == "epsilon"


@pytest.mark.parametrize("torn", ['{"step": 9, "seco', "", "\n\n", "[1, 2]", "\x00\x00"])
def test_a_torn_line_is_left_out(torn: str, runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((runs[0] / "config.yaml").read_text())
    (tmp_path / "metrics.jsonl").write_text((runs[0] / "metrics.jsonl").read_text() + torn)
    assert RunHistory.read(tmp_path).metrics.series == RunHistory.read(runs[0]).metrics.series
    one, other = (comparison_table([path]).splitlines()[2].split()[1:] for path in (tmp_path, runs[0]))
    assert one == other


def test_a_line_torn_within_a_letter_is_left_out(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((runs[0] / "config.yaml").read_text())
    (tmp_path / "metrics.jsonl").write_bytes((runs[0] / "metrics.jsonl").read_bytes() + b'{"note": "\xc3')
    assert RunHistory.read(tmp_path).metrics.series == RunHistory.read(runs[0]).metrics.series


@pytest.mark.parametrize("content", [None, "", "{"])
def test_a_run_without_metrics_yet_has_an_empty_row(content: str | None, runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((runs[1] / "config.yaml").read_text())
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    row = comparison_table([tmp_path]).splitlines()[2]
    assert row.split() == [tmp_path.name, "adaptive", "min_snr", "-", "-", "0", "0"]


def test_losses_that_were_not_finite_are_shown_as_missing(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((runs[0] / "config.yaml").read_text())
    held_out = {"loss": None, "loss_error": None, "vlb": 0.25, "vlb_error": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "held_out": held_out, "seconds": 7.4}) + "\n")
    row = comparison_table([tmp_path]).splitlines()[2]
    assert row.split()[3:] == ["-", "0.25000", "0", "7"]


@pytest.mark.parametrize(
    "line",
    [
        {"step": 1, "held_out": "low", "seconds": "long", "training_evaluations": [], "probe_evaluations": {}},
        {"step": 1, "held_out": {"loss": "low", "loss_error": [], "vlb": True}, "seconds": None},
    ],
)
def test_what_is_no_number_is_shown_as_missing(line: dict[str, object], runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((runs[0] / "config.yaml").read_text())
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert comparison_table([tmp_path]).splitlines()[2].split()[3:] == ["-", "-", "0", "0"]


def test_a_run_is_named_also_where_one_stands_in_it(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs[0])
    assert comparison_table([Path()]).splitlines()[2].split()[0] == "plain"


@pytest.mark.parametrize("content", [None, "", "- a list", "steps: [", "just text"])
def test_a_folder_that_is_no_run_is_refused_by_name(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ValueError, match=rf"a run directory must hold config\.yaml.*{tmp_path.name}"):
        comparison_table([tmp_path])
    with pytest.raises(ValueError, match=r"a run directory must hold config.yaml, got .*missing"):
        comparison_table([tmp_path / "missing"])


def test_the_reader_that_was_removed_is_told_with_the_one_that_stays() -> None:
    with pytest.raises(AttributeError, match=r"reports\.RunFiles has another name now: kairostep\.runs\.RunHistory"):
        _ = kairostep.reports.RunFiles
    with pytest.raises(AttributeError, match=r"module 'kairostep\.reports' has no attribute 'Nonsense'"):
        _ = kairostep.reports.Nonsense


def test_reports_import_neither_torch_nor_the_library() -> None:
    allowed = {*sys.stdlib_module_names, "yaml"}
    reports = Path(kairostep.reports.__file__).parent
    for path in (*reports.glob("*.py"), *(reports.parent / f"{name.replace('.', '/')}.py" for name in BELOW)):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                ours = name.startswith("kairostep.reports.") or name.removeprefix("kairostep.") in BELOW
                assert ours or name.split(".")[0] in allowed, f"{path.name}: {name}"
