"""Plots as plain data, for pages and pictures. A `Figure` has `Panel`s, each with `Curve`s or a `Heat`.

`kairostep.reports.write_figures(title, intro, figures, output)` writes them as one self-contained HTML page:

    Figure("Loss by time", "Lower is better; 0 is clean data.", [Panel(Axis("t"), Axis("loss", log=True), curves)])
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Axis:
    """An axis: its title with unit, its scale and its ends."""

    title: str
    log: bool = False
    start: float | None = None  # None: fits the data
    end: float | None = None


@dataclass(frozen=True)
class Curve:
    """Values over x. None and non-finite values are gaps."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float | None]
    errors: Sequence[float | None] = ()  # standard errors of y, shown in tooltips and exported
    group: str = ""  # curves of one group share a colour and are hidden together; default: the name
    style: Literal["line", "points", "bars"] = "line"
    faint: bool = False

    def plain(self) -> dict[str, Any]:
        """Return what the page needs of it."""
        return {
            "name": self.name,
            "group": self.group or self.name,
            "x": _numbers(self.x),
            "y": _numbers(self.y),
            "errors": _numbers(self.errors),
            "style": self.style,
            "faint": self.faint,
        }


@dataclass(frozen=True)
class Heat:
    """Values over x and y as colours."""

    name: str
    x: Sequence[float | str]  # (N,)
    y: Sequence[float | str]  # (M,)
    z: Sequence[Sequence[float | None]]  # (M, N)
    group: str = ""
    label: str = "value"  # of z
    relative: bool = False  # each column is a histogram of M equal bins, coloured by its distance from uniform

    def plain(self) -> dict[str, Any]:
        """Return what the page needs of it."""
        return {
            "name": self.name,
            "group": self.group or self.name,
            "x": _numbers(self.x),
            "y": _numbers(self.y),
            "z": [_numbers(row) for row in self.z],
            "label": self.label,
            "relative": self.relative,
        }


@dataclass(frozen=True)
class Panel:
    """One pair of axes with curves or one heat map."""

    x: Axis
    y: Axis
    curves: Sequence[Curve] = ()
    heat: Heat | None = None
    title: str = ""
    marks: Sequence[tuple[float, str]] = ()  # vertical lines: x and a word; only pictures draw them

    def plain(self) -> dict[str, Any]:
        """Return what the page needs of it."""
        return {
            "title": self.title,
            "x": vars(self.x),
            "y": vars(self.y),
            "curves": [curve.plain() for curve in self.curves],
            "heat": self.heat and self.heat.plain(),
        }


@dataclass(frozen=True)
class Figure:
    """Panels side by side under one title."""

    title: str
    how_to_read: str  # one sentence
    panels: Sequence[Panel]
    note: str = ""  # what is missing or differs, if anything

    def plain(self) -> dict[str, Any]:
        """Return what the page needs of it."""
        panels = [panel.plain() for panel in self.panels]
        return {"title": self.title, "how_to_read": self.how_to_read, "note": self.note, "panels": panels}


def _numbers(values: Sequence[Any]) -> list[Any]:
    """Return values that JSON can hold, with None for non-finite numbers."""
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in values]
