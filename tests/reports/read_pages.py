"""What a page holds, and what the files of a run hold."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any


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
