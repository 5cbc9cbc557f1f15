"""A run in any state is shown as such, never an exception."""

import os
import re
import time
from html import unescape
from pathlib import Path

import pytest
import yaml
from made_runs import add_grids, make_run
from read_pages import figure_of, text_of

import kairostep.reports.sample_grids as sample_grids_module
from kairostep.reports import write_report


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
    assert state_of(directory, tmp_path) == "run: nothing recorded yet."


def test_a_run_that_still_writes_is_shown_as_such(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", reach=300)
    (directory / ".lock").touch()
    assert state_of(directory, tmp_path) == "run: running, at step 300 of 1,000."


def test_a_crashed_run_is_shown_as_such(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", reach=300)
    assert state_of(directory, tmp_path) == "run: stopped at step 300 of 1,000."
    (directory / ".lock").touch()
    for path in directory.iterdir():
        os.utime(path, (time.time() - 7300, time.time() - 7300))
    told = "run: no sign of life for 2 hours, at step 300 of 1,000: killed or crashed."
    assert state_of(directory, tmp_path) == told


@pytest.mark.parametrize("torn", ['{"step": 310, "loss": 0.', "[1, 2]", "\x00\x00", "{" * 100_000, '{"step": null}'])
def test_a_torn_last_line_is_told_and_left_out(torn: str, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(torn)
    told = "run: the last line of metrics.jsonl cannot be read and is left out."
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
    told = "run: 2 of 4 lines of evaluations.jsonl cannot be read; 1 line of metrics.jsonl cannot be read and is left"
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
