"""Numbers in files and pictures."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kairostep.analysis.picture import write_picture
from kairostep.analysis.result_file import plain, write_result
from kairostep.analysis.table import bar, columns
from kairostep.evaluation import Estimate
from kairostep.plots import Axis, Curve, Panel


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    write_result(tmp_path / "deep" / "one.json", "one", {}, {3: [Estimate(1.0, float("nan"))], "x": float("inf")})
    document = json.loads((tmp_path / "deep" / "one.json").read_text())
    assert document == {
        "schema": 1,
        "analysis": "one",
        "result": {"3": [{"value": 1.0, "error": None}], "x": None},
    }
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["one.json"]


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="results must go to a file that can be written"):
        write_result(tmp_path / "file" / "one.json", "one", {}, plain({}))


def test_a_picture_shows_its_curves(tmp_path: Path) -> None:
    curves = [Curve("rising", [0, 1], [0.001, 10]), Curve("flat", [0, 1], [1, 1])]
    panels = [
        Panel(Axis("t"), Axis(""), curves, title="plain", marks=((0.5, "middle"),)),
        Panel(Axis("t"), Axis("", log=True), curves, title="log"),
    ]
    write_picture("title", "note", panels, tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3).astype(int)
    for colour in ((0x2F, 0x6F, 0xDE), (0xE0, 0x7B, 0x00)):
        assert (np.abs(pixels - colour).max(1) < 8).sum() > 100


def test_bars_and_columns_line_up() -> None:
    assert [len(bar(share)) for share in (0, 0.3, 1, 2)] == [12] * 4
    assert columns(["a", "long"], [["1", "2"]]).splitlines() == ["a  long", "-------", "1     2"]
