"""The page says what the run files say, whatever state those are in."""

import json
import os
import re
import sys
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_runs import add_evaluations, add_grids, make_run

import kairostep.reports.sample_grids as sample_grids_module
from kairostep.cli import main
from kairostep.reports import Axis, Curve, Figure, Heat, Panel, write_figures, write_report
from kairostep.reports.page import needed
from kairostep.reports.report import make_report
from kairostep.reports.run_history import RunHistory


def data_of(page: Path) -> dict[str, Any]:
    """Return the data of the figures of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def text_of(page: Path) -> str:
    """Return what a page says, without its scripts and tags."""
    text = re.sub(r"<(script|style).*?</\1>", "", page.read_text(), flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]*>", " ", text))


def figure_of(page: Path, title: str) -> dict[str, Any]:
    (figure,) = [figure for figure in data_of(page)["figures"] if figure["title"] == title]
    return figure


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


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


# Numbers


def test_held_out_curves_are_those_of_the_files(runs: list[Path], page: Path) -> None:
    keys = {group["name"]: group["key"] for group in data_of(page)["groups"]}
    for title, name in (("Held-out loss", "loss"), ("Held-out variational bound", "vlb")):
        panels = figure_of(page, title)["panels"]
        assert [panel["x"]["title"] for panel in panels] == ["seconds of training", "steps", "network evaluations"]
        for directory in runs:
            sampler, seed = directory.name.split("-")
            lines = [line for line in lines_of(directory) if "held_out" in line]
            costs = [
                [line["seconds"] for line in lines],
                [line["step"] for line in lines],
                [line["training_evaluations"] + line["probe_evaluations"] for line in lines],
            ]
            for panel, cost in zip(panels, costs, strict=True):
                (curve,) = [c for c in panel["curves"] if c["group"] == keys[f"{sampler} · seed {seed}"]]
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
    assert curve["name"] == "adaptive · seed 0"
    assert curve["x"] == [line["step"] for line in lines]
    assert curve["y"] == pytest.approx([value(line) for line in lines], rel=1e-12)


def test_densities_are_those_of_the_files(runs: list[Path], page: Path) -> None:
    lines = [line for line in lines_of(runs[0]) if "density" in line]
    (heat,) = [p["heat"] for p in figure_of(page, "Where the draws go")["panels"] if p["title"] == "adaptive · seed 0"]
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
    assert "Drawn without the weighting" in figure_of(page, "Where the draws go")["note"]
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


# Runs in any state


def state_of(directory: Path, tmp_path: Path) -> str:
    page = write_report([directory], tmp_path / "state.html")
    (found,) = re.findall(r'<ul class="warning">(.*?)</ul>', page.read_text(), re.DOTALL) or [""]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", found)).split())


def test_a_whole_run_has_no_warning(runs: list[Path], tmp_path: Path) -> None:
    assert state_of(runs[0], tmp_path) == ""


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_an_empty_run_is_shown_as_such(content: str | None, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", reach=0)
    (directory / "metrics.jsonl").unlink()
    if content is not None:
        (directory / "metrics.jsonl").write_text(content)
    assert state_of(directory, tmp_path) == "uniform: nothing recorded yet."


def test_a_run_that_still_writes_is_shown_as_such(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", reach=300)
    (directory / ".lock").touch()
    assert state_of(directory, tmp_path) == "uniform: running, at step 300 of 1,000."


def test_a_crashed_run_is_shown_as_such(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", reach=300)
    assert state_of(directory, tmp_path) == "uniform: stopped at step 300 of 1,000."
    (directory / ".lock").touch()
    for path in directory.iterdir():
        os.utime(path, (time.time() - 7300, time.time() - 7300))
    told = "uniform: no sign of life for 2 hours, at step 300 of 1,000: killed or crashed."
    assert state_of(directory, tmp_path) == told


@pytest.mark.parametrize("torn", ['{"step": 310, "loss": 0.', "[1, 2]", "\x00\x00", "{" * 100_000, '{"step": null}'])
def test_a_torn_last_line_is_told_and_left_out(torn: str, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(torn)
    told = "uniform: the last line of metrics.jsonl cannot be read and is left out."
    assert state_of(directory, tmp_path) == told


def test_torn_lines_within_and_odd_values_are_no_exception(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    lines[10] = lines[10][:50]
    lines[20] = '{"step": 210, "loss": "high", "seconds": null, "sampler": [1], "held_out": 3, "density": "x"}'
    lines[30] = (
        '{"step": 310, "loss": NaN, "loss_quartiles": [null, 1, Infinity, true], "density": [], "sampler": null}'
    )
    lines[40] = f'{{"step": 410, "loss": {10**400}, "density": [1, null], "held_out": {{"loss": -1}}, "weights": {{}}}}'
    lines[50] = '{"step": 510, "loss": {"a": {"b": 1}}, "loss_quartiles": [[1]], "images": false}'
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "evaluations.jsonl").write_text('{"what": "fid"}\n{"what": "epsilon_mse_at", "t": "x"}\n3\n{"wha')
    told = (
        "uniform: 2 of 4 lines of evaluations.jsonl cannot be read; 1 line of metrics.jsonl cannot be read and is left"
    )
    assert state_of(directory, tmp_path) == f"{told} out."


def test_a_run_that_went_on_from_an_earlier_step_is_drawn_once(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    (directory / "metrics.jsonl").write_text("\n".join(lines[:60] + lines[40:]) + "\n")
    page = write_report([directory], tmp_path / "report.html")
    assert figure_of(page, "Training loss")["panels"][0]["curves"][0]["x"] == [10.0 * (i + 1) for i in range(100)]


def test_an_older_version_is_shown_as_such(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    config = yaml.safe_load((directory / "config.yaml").read_text())
    config["provenance"]["kairostep"] = "0.0.1"
    config["sampler"] = "uniform"  # a name alone
    del config["weighting"], config["seed"]
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    (directory / "metrics.jsonl").write_text('{"step": 1000, "loss": 1.0}\n')
    assert state_of(directory, tmp_path) == "run: written by kairostep 0.0.1, this is 0.1.0."


@pytest.mark.parametrize(
    "content", ["", "- a list", "steps: [", "just text", "a: !!python/object:os.system {}", "\x00"]
)
def test_a_damaged_config_is_shown_as_such(content: str, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    (directory / "config.yaml").write_text(content)
    assert "config.yaml" in state_of(directory, tmp_path)


def test_pictures_that_cannot_be_shown_are_told(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    add_grids(directory, [500, 1000])
    path = directory / "samples" / "step-00001000.png"
    path.write_bytes(path.read_bytes()[:200])
    text = text_of(write_report([directory], tmp_path / "report.html"))
    assert "step-00001000.png cannot be read: it is damaged, or still being written" in text


def test_large_pictures_are_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_run(tmp_path / "run")
    add_grids(directory, [1000], size=1024, noisy=True)
    monkeypatch.setattr(sample_grids_module, "PAGE_BYTES", 100_000)
    before = write_report([directory], tmp_path / "report.html").read_text()
    (source,) = re.findall(r'src="(data:image/jpeg;base64,[^"]*)"', before)
    assert 10_000 < len(source) < 140_000


def test_many_grids_are_reduced_to_a_few_over_training(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    add_grids(directory, [100 * (i + 1) for i in range(10)])
    page = write_report([directory], tmp_path / "report.html").read_text()
    assert re.findall(r"at step (\d+)", page) == ["100", "400", "700", "1000"]


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


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("kairostep: error: ")
    assert error.count("\n") == 1
    return error.removeprefix("kairostep: error: ").strip()


def test_the_command_writes_a_page(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(runs[0].parent), "-o", str(tmp_path / "page.html")])
    assert capsys.readouterr().out == f"open {tmp_path / 'page.html'}\n"
    assert len(data_of(tmp_path / "page.html")["groups"]) == 4
    assert list(tmp_path.iterdir()) == [tmp_path / "page.html"]


def test_what_the_command_refuses(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(runs[0])
    missing = str(tmp_path / "missing")
    assert refused(capsys, missing).startswith(f"a report needs directories that exist, got {missing}")
    assert refused(capsys, run, str(tmp_path)).startswith("a report needs run directories with a config.yaml")
    assert refused(capsys, run, "-o", f"{missing}/page.html").startswith(
        "the page must go to a file that can be written"
    )
    assert refused(capsys, run, "-o", str(tmp_path)).startswith("the page must go to a file that can be written")
    assert refused(capsys, "--watch", missing).startswith("a report needs directories that exist")
    assert refused(capsys, "--watch", run, "--port", "99999").startswith("the port must be free, got 99999")
    assert refused(capsys).startswith("the following arguments are required: RUN")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"a report needs plotly: pip install 'kairostep\[report\]'"):
        needed("plotly.offline")
    with pytest.raises(SystemExit) as ended:
        main(["report", "anything"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "kairostep: error: this command needs plotly: pip install 'kairostep[report]'\n"


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
