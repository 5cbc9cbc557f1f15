"""Sample grids for a page, made small enough for it."""

import base64
import importlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairostep.bounded_files import Unreadable, read_bytes
from kairostep.reports.arms import ShownRun

MAX_GRIDS = 4  # of one run
PAGE_BYTES = 4_500_000  # all grids together, before base64
SMALLEST_SIDE = 256
MAX_BYTES = 100_000_000  # of one file
MAX_PIXELS = 80_000_000  # of one picture: 8 by 8 images of 1024 are 67 million


@dataclass(frozen=True)
class Grid:
    """A picture of samples, or why there is none."""

    step: int
    source: str  # a data URI
    ending: str
    problem: str = ""


@dataclass(frozen=True)
class GridsOfRun:
    """The grids of one run over training."""

    key: str
    name: str
    arm: str
    settings: str
    file_name: str
    grids: list[Grid]


def sample_grids(runs: Sequence[ShownRun]) -> list[GridsOfRun]:
    """Return grids of every run that has any: the last and up to three before it, evenly over training."""
    chosen = [(run, _spread(run.history.grids)) for run in runs]
    num = sum(len(paths) for _, paths in chosen)
    limit = PAGE_BYTES // max(1, num)
    found = []
    for run, paths in chosen:
        grids = [_grid(path, limit) for path in paths]
        if grids:
            found.append(GridsOfRun(run.key, run.name, run.arm, run.settings, _file_name(run.name), grids))
    return found


def _spread(paths: Sequence[Path]) -> list[Path]:
    last = len(paths) - 1
    if last < MAX_GRIDS:
        return list(paths)
    return [paths[round(i * last / (MAX_GRIDS - 1))] for i in range(MAX_GRIDS)]


def _grid(path: Path, limit: int) -> Grid:
    step = int(re.sub(r"\D", "", path.stem) or 0)
    try:
        content = read_bytes(path, MAX_BYTES)
        image = _open_image(content)
        kind = "png"
        if len(content) > limit and image is not None:
            content, kind = _shrink(image, limit), "jpeg"
    except Unreadable as error:
        return Grid(step, "", "", f"{path.name} cannot be read: {error}")
    except Exception:  # Pillow raises many kinds of errors for damaged files
        return Grid(step, "", "", f"{path.name} cannot be read: it is damaged, or still being written")
    if len(content) > limit:
        return Grid(step, "", "", f"{path.name} is too large for this page: it is shrunk once Pillow is installed")
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return Grid(step, source, ".jpg" if kind == "jpeg" else ".png")


def _open_image(content: bytes) -> Any:
    """Return the decoded picture, None if Pillow is not installed."""
    try:
        pillow = importlib.import_module("PIL.Image")
    except ModuleNotFoundError:
        return None
    image = pillow.open(io.BytesIO(content), formats=["PNG"])
    if image.width * image.height > MAX_PIXELS:
        raise Unreadable(f"it has more than {MAX_PIXELS:,} pixels")
    image.load()
    return image


def _shrink(image: Any, limit: int) -> bytes:
    """Return a JPEG of at most this many bytes, or of the smallest useful size."""
    side = max(image.size)
    while True:
        small = image.convert("RGB")
        small.thumbnail((side, side))
        file = io.BytesIO()
        small.save(file, "JPEG", quality=85)
        if file.tell() <= limit or side <= SMALLEST_SIDE:
            return file.getvalue()
        side = max(SMALLEST_SIDE, side * 3 // 4)


def _file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "samples"
