"""Run folders that somebody made to do harm: a page in seconds all the same, and the file named."""

import json
import os
import random
import re
import time
import zlib
from collections.abc import Callable
from html import unescape
from itertools import pairwise
from pathlib import Path

import pytest
from made_runs import add_evaluations, add_grids, make_run

import kairostep.runs.metrics as metrics_module
from kairostep.reports import comparison_table, write_report

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdefghij")
)


def warning_of(directory: Path, tmp_path: Path) -> str:
    """Return what the page of a run warns of, made within seconds."""
    start = time.process_time()
    page = write_report([directory], tmp_path / "page.html")
    assert time.process_time() - start < 5
    assert page.stat().st_size < 12_000_000  # plotly.js alone has 5
    (found,) = re.findall(r'<ul class="warning">(.*?)</ul>', page.read_text(), re.DOTALL) or [""]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", found)).split())


def whole_run(tmp_path: Path) -> Path:
    directory = make_run(tmp_path / "run")
    add_evaluations(directory, 1000)
    add_grids(directory, [500, 1000])
    return directory


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("sampler: &a {name: uniform, again: *a}", "an alias stands within what it stands for"),
        ("&a [*a]", "an alias stands within what it stands for"),
        (BOMB, "it holds more than 200,000 characters once its aliases are written out"),
        (f"a: &a {'x' * 9000}\nb: [{', '.join(['*a'] * 9000)}]", "once its aliases are written out"),
        ("[" * 100_000, "it is nested more than 32 levels deep"),
        ("a: x\n" * 100_000, "it is larger than 200,000 bytes"),
        ("seed: 0x" + "f" * 9000, "a number has more than 400 digits"),
        ("steps: 2001-99-99", "a value is not of its kind"),
        ("steps: [", "expected the node content"),
    ],
)
def test_a_config_without_end_is_named(content: str, reason: str, tmp_path: Path) -> None:
    directory = whole_run(tmp_path)
    (directory / "config.yaml").write_text(content)
    told = warning_of(directory, tmp_path)
    assert "config.yaml cannot be read: " in told
    assert reason in told
    with pytest.raises(ValueError, match=r"a run directory must hold config\.yaml, got .*run \("):
        comparison_table([directory])


def test_a_config_cut_anywhere_makes_a_page(tmp_path: Path) -> None:
    directory = whole_run(tmp_path)
    whole = (directory / "config.yaml").read_bytes()
    for end in range(0, whole.index(b"kairostep: 0"), 23):
        (directory / "config.yaml").write_bytes(whole[:end])
        assert "config.yaml" in warning_of(directory, tmp_path), whole[:end]


@pytest.mark.parametrize(
    ("name", "warned"),
    [("config.yaml", True), ("metrics.jsonl", True), ("evaluations.jsonl", True), ("samples/step-00001000.png", False)],
)
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_named_at_once(name: str, warned: bool, tmp_path: Path) -> None:
    directory = whole_run(tmp_path)
    makers: list[Callable[[Path], object]] = [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir]
    for make in makers:
        path = directory / name
        path.unlink()
        make(path)
        told = warning_of(directory, tmp_path)
        reason = f"{path.name} cannot be read: it is no regular file"
        assert reason in (told if warned else (tmp_path / "page.html").read_text())


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"step": 210, "what": "\xff',
        b"\xff",
        b'{"step": "many"}',
        b"[" * 100_000,
        b'{"step": 210, "weights": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"step": 210, "x": "' + b"x" * 3_000_000 + b'"}',
    ],
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_a_damaged_line_is_told_with_its_file(name: str, damaged: bytes, tmp_path: Path) -> None:
    directory = whole_run(tmp_path)
    lines = (directory / name).read_bytes().splitlines()
    (directory / name).write_bytes(b"\n".join([*lines[:9], damaged, *lines[9:]]) + b"\n")
    told = warning_of(directory, tmp_path)
    if name == "metrics.jsonl":
        assert told.endswith("1 line of metrics.jsonl cannot be read and is left out.")
    elif b"[" in damaged or b"\xff" in damaged:
        assert told.endswith(f"1 of {len(lines) + 1} lines of evaluations.jsonl cannot be read.")


def test_bytes_changed_at_random_make_a_page(tmp_path: Path) -> None:
    draw = random.Random(0)
    for i in range(12):
        directory = make_run(tmp_path / str(i) / "run", "adaptive", steps=200)
        add_evaluations(directory, 200)
        add_grids(directory, [200])
        for path in [path for path in directory.rglob("*") if path.is_file()]:
            content = bytearray(path.read_bytes())
            for _ in range(1 + i):
                content[draw.randrange(len(content))] = draw.randrange(256)
            path.write_bytes(content)
        warning_of(directory, tmp_path)


def test_more_than_a_run_writes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_run(tmp_path / "run", steps=100)
    lines = [{"step": i, "sampler": {f"k{i}-{j}": 1.0 for j in range(100)}} for i in range(101, 201)]
    lines.append({"step": 201, "density": [1e-5] * 100_000})
    with (directory / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    metrics = metrics_module.Metrics.read(directory / "metrics.jsonl")
    assert len(metrics.series) == 500
    assert {len(row) for row in metrics.histograms["density"].rows} == {100}
    monkeypatch.setattr(metrics_module, "MAX_BYTES", 1000)
    problems = metrics_module.Metrics.read(directory / "metrics.jsonl").problems
    assert problems == ["metrics.jsonl is read up to 1,000 bytes, the rest is left out"]


def test_a_picture_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path: Path) -> None:
    directory = whole_run(tmp_path)
    path = directory / "samples" / "step-00001000.png"
    content = bytearray(path.read_bytes())
    for side in (60_000, 9_200):  # Pillow refuses the first one, warns of the second and unpacks it
        content[16:24] = side.to_bytes(4, "big") * 2
        content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
        path.write_bytes(content)
        assert warning_of(directory, tmp_path) == ""
        assert "step-00001000.png cannot be read" in (tmp_path / "page.html").read_text()
    assert "it has more than 80,000,000 pixels" in (tmp_path / "page.html").read_text()
