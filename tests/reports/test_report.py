"""The page says what the run files say, and the command what it cannot do."""

import json
import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from commands import refused
from made_runs import add_grids, make_run
from read_pages import data_of, figure_of, lines_of, text_of

from kairostep.cli import main
from kairostep.installation import install_command
from kairostep.reports import Axis, Curve, Figure, Heat, Panel, write_figures, write_report
from kairostep.reports.page import import_extra
from kairostep.reports.report import make_report
from kairostep.runs.history import RunHistory

# Numbers


def test_held_out_curves_are_those_of_the_files(runs: list[Path], page: Path) -> None:
    keys = {group["name"]: group["key"] for group in data_of(page)["groups"]}
    for title, name in (("Held-out loss", "loss"), ("Held-out variational bound", "vlb")):
        panels = figure_of(page, title)["panels"]
        assert [panel["x"]["title"] for panel in panels] == ["seconds of training", "steps", "network evaluations"]
        for directory in runs:
            lines = [line for line in lines_of(directory) if "held_out" in line]
            costs = [
                [line["seconds"] for line in lines],
                [line["step"] for line in lines],
                [line["training_evaluations"] + line["probe_evaluations"] for line in lines],
            ]
            for panel, cost in zip(panels, costs, strict=True):
                (curve,) = [c for c in panel["curves"] if c["group"] == keys[directory.name]]
                assert curve["x"] == cost
                assert curve["y"] == [line["held_out"][name] for line in lines]
                assert curve["errors"] == [line["held_out"][f"{name}_error"] for line in lines]


@pytest.mark.parametrize(
    ("title", "panel", "value"),
    [
        ("Training loss", 0, lambda line: line["loss"]),
        ("Training loss", 1, lambda line: line["learning_rate"]),
        ("Loss by timestep over training", 2, lambda line: line["loss_quartiles"][2]),
        ("The policy", 0, lambda line: line["sampler"]["a_mean"]),
        ("The policy", 3, lambda line: line["sampler"]["entropy"]),
        ("What the sampler costs", 0, lambda line: 100 * line["probe_evaluations"] / line["training_evaluations"]),
    ],
)
def test_curves_of_training_are_those_of_the_files(
    title: str, panel: int, value: Any, runs: list[Path], page: Path
) -> None:
    lines = lines_of(runs[0])
    curve = figure_of(page, title)["panels"][panel]["curves"][-2]  # adaptive, seed 0: after the baseline
    assert curve["name"] == "adaptive-0"
    assert curve["x"] == [line["step"] for line in lines]
    assert curve["y"] == pytest.approx([value(line) for line in lines], rel=1e-12)


def test_the_noise_that_draws_save_is_shown_over_training(tmp_path: Path) -> None:
    run, uniform = (make_run(tmp_path / sampler, sampler=sampler) for sampler in ("root_loss", "uniform"))
    page = write_report([run, uniform], tmp_path / "report.html")
    panels = figure_of(page, "Gradient noise")["panels"]
    for panel, name in zip(panels, ("noise_ratio", "equivalent_batch"), strict=True):
        (curve,) = panel["curves"]  # uniform draws have nothing to tell
        assert curve["x"] == [line["step"] for line in lines_of(run)]
        assert curve["y"] == pytest.approx([line["sampler"][name] for line in lines_of(run)], rel=1e-12)
    alone = write_report([uniform], tmp_path / "alone.html")
    assert "Gradient noise" not in [figure["title"] for figure in data_of(alone)["figures"]]


def test_densities_are_those_of_the_files(runs: list[Path], page: Path) -> None:
    lines = [line for line in lines_of(runs[0]) if "density" in line]
    (heat,) = [p["heat"] for p in figure_of(page, "Where the draws go")["panels"] if p["title"] == "adaptive-0"]
    assert heat["x"] == [line["step"] for line in lines]
    for i, line in enumerate(lines):
        assert [row[i] for row in heat["z"]] == pytest.approx(line["density"], rel=1e-5)


def test_weights_are_shown_as_probabilities(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", weighting="min_snr")
    page = write_report([directory], tmp_path / "report.html")
    (panel,) = figure_of(page, "What is trained: draws times weights")["panels"]
    line = lines_of(directory)[-1]
    products = [mass * weight for mass, weight in zip(line["density"], line["weights"], strict=True)]
    shown = [row[-1] for row in panel["heat"]["z"]]
    assert sum(shown) == pytest.approx(1, abs=1e-4)
    assert shown == pytest.approx([product / sum(products) for product in products], rel=1e-5)


def test_a_weighting_without_weights_on_file_is_told(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", weighting="p2")
    lines = [{k: v for k, v in line.items() if k != "weights"} for line in lines_of(directory)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report([directory], tmp_path / "report.html")
    assert "Drawn without the weighting, which was not recorded: run." in text_of(page)
    assert "What is trained: draws times weights" not in [figure["title"] for figure in data_of(page)["figures"]]


def test_the_table_has_the_numbers_of_the_files(runs: list[Path], page: Path) -> None:
    text = " ".join(text_of(page).split())
    for directory in runs:
        last = lines_of(directory)[-1]
        held_out = last["held_out"]
        assert f"{held_out['loss']:.5f} ± {held_out['loss_error']:.5f}" in text
        assert f"{last['training_evaluations']:,}" in text
        assert f"{last['probe_evaluations']:,}" in text
    losses = [lines_of(directory)[-1]["held_out"]["loss"] for directory in runs[:2]]
    deviation = abs(losses[0] - losses[1]) / 2**0.5
    digits = min(7, 1 - int(f"{deviation:e}".split("e")[1]))
    assert f"{sum(losses) / 2:.{digits}f} ± {deviation:.{digits}f}" in text
    assert "12.50 ± 0.40" in text  # FID


def test_evaluations_are_drawn(runs: list[Path], page: Path) -> None:
    panels = figure_of(page, "FID")["panels"]
    assert [curve["y"] for curve in panels[1]["curves"]] == [[12.5]] * 4
    assert panels[0]["curves"][-1]["x"] == [lines_of(runs[1])[-1]["seconds"]]
    profile = figure_of(page, "Loss by timestep at the end")["panels"][0]["curves"][0]
    assert profile["x"] == pytest.approx([(i + 0.5) / 20 for i in range(20)])


def test_selection_is_compared_where_runs_differ_in_it(tmp_path: Path, page: Path) -> None:
    assert "How many timesteps the reward needs" not in [figure["title"] for figure in data_of(page)["figures"]]
    made = [
        make_run(tmp_path / f"s{size}-{seed}", "adaptive", seed, options={"num_selected": size})
        for size in (1, 3)
        for seed in (0, 1)
    ]
    panel = figure_of(write_report(made, tmp_path / "r.html"), "How many timesteps the reward needs")["panels"][0]
    ends = [lines_of(directory)[-1]["held_out"]["loss"] for directory in made]
    assert [(curve["x"], curve["y"]) for curve in panel["curves"][:4]] == [
        ([1], [ends[0]]),
        ([1], [ends[1]]),
        ([3], [ends[2]]),
        ([3], [ends[3]]),
    ]
    assert panel["curves"][4]["y"] == pytest.approx([sum(ends[:2]) / 2, sum(ends[2:]) / 2])


# Text


def test_text_from_configs_and_file_names_is_escaped(tmp_path: Path) -> None:
    bad = '<img src=x onerror="alert(1)">'
    made = [make_run(tmp_path / f"{bad.replace('/', '')}{i}", bad, options={bad: bad + str(i)}) for i in range(2)]
    add_grids(made[0], [10])
    text = write_report(made, tmp_path / "report.html").read_text()
    assert "<img src=x" not in text
    assert "&lt;img src=x" in text


def test_the_page_holds_everything(page: Path) -> None:
    text = unescape(page.read_text())
    assert not re.findall(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["'](?!data:)""", text)
    assert "default-src 'none'" in text
    assert "connect-src 'none'" in text


def test_every_figure_says_how_to_read_it(page: Path) -> None:
    for figure in data_of(page)["figures"]:
        assert figure["how_to_read"].endswith(".")
        assert figure["how_to_read"] in text_of(page)


# Commands


def test_the_command_writes_a_page(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(runs[0].parent), "-o", str(tmp_path / "page.html")])
    assert capsys.readouterr().out == f"open {tmp_path / 'page.html'}\n"
    assert len(data_of(tmp_path / "page.html")["groups"]) == 4
    assert list(tmp_path.iterdir()) == [tmp_path / "page.html"]


@pytest.mark.usefixtures("elsewhere")
def test_what_the_command_refuses(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(runs[0])
    missing = str(tmp_path / "missing")
    assert refused(capsys, "report", missing).startswith(f"a report needs directories that exist, got {missing}")
    assert refused(capsys, "report", run, str(tmp_path)).startswith("a report needs run directories with a config.yaml")
    assert refused(capsys, "report", run, "-o", f"{missing}/page.html").startswith(
        "the page must go to a file that can be written"
    )
    assert refused(capsys, "report", run, "-o", str(tmp_path)).startswith(
        "the page must go to a file that can be written"
    )
    assert refused(capsys, "report", "--watch", missing).startswith("a report needs directories that exist")
    assert refused(capsys, "report", "--watch", run, "--port", "99999").startswith("the port must be free, got 99999")
    assert refused(capsys, "report").startswith("the following arguments are required: RUN")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"a report needs plotly, which is not installed: pip install"):
        import_extra("plotly.offline")
    with pytest.raises(SystemExit) as ended:
        main(["report", "anything"])
    assert ended.value.code == 1
    lacking = f"kairostep report needs plotly, which is not installed: {install_command('report')}"
    assert capsys.readouterr().err == f"kairostep: error: {lacking}\n"


def test_runs_are_found_in_folders_in_natural_order(tmp_path: Path) -> None:
    for name in ("b/run-10", "b/run-9", "a/x/y"):
        make_run(tmp_path / name, seed=len(name))
    report = make_report([tmp_path / "b" / "run-9"], RunHistory.read)
    assert report.context["title"] == "run-9"
    page = write_report([tmp_path, tmp_path / "a" / "x" / "y"], tmp_path / "page.html")
    assert [group["short"] for group in data_of(page)["groups"]] == ["5", "7", "8"]


def test_figures_of_plain_data_make_a_page(tmp_path: Path) -> None:
    curves = [Curve("one", [0.0, 1.0], [1.0, float("nan")]), Curve("two", ["a", "b"], [2, 3], style="bars")]
    heat = Heat("three", [1, 2], [0.5], [[1.0, float("inf")]])
    panels = [Panel(Axis("t"), Axis("loss", log=True), curves), Panel(Axis("step"), Axis("t"), heat=heat)]
    page = write_figures("A <title>", "An intro.", [Figure("One", "Look.", panels)], tmp_path / "page.html")
    data = data_of(page)
    assert [group["name"] for group in data["groups"]] == ["one", "two", "three"]
    assert data["figures"][0]["panels"][0]["curves"][0]["y"] == [1.0, None]
    assert data["figures"][0]["panels"][1]["heat"]["z"] == [[1.0, None]]
    assert "<title>A &lt;title&gt;</title>" in page.read_text()


def test_python_code_of_the_document_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "runs" / "one")
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "reporting.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, "reporting.md", "exec"), {})
    assert sorted(path.name for path in tmp_path.glob("*.html")) == ["mine.html", "report.html"]


def test_odd_seeds_and_file_names_are_no_exception(tmp_path: Path) -> None:
    made = [make_run(tmp_path / name, seed=seed) for name, seed in (("a\udcff", 0), ("b", 1))]
    config = made[1] / "config.yaml"
    config.write_text(config.read_text().replace("seed: 1", "seed: [1, {a: b}]"))
    page = write_report(made, tmp_path / "page.html")
    assert len(data_of(page)["groups"]) == 2
