"""Plots as plain data, for pages and pictures: a `Figure` of `Panel`s, each with `Curve`s or a `Heat`.

`kairostep.reports.write_figures(title, intro, figures, output)` makes one self-contained HTML page of them:

    Figure("Loss by time", "Lower is better; 0 is clean data.", [Panel(Axis("t"), Axis("loss", log=True), curves)])
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Axis:
    """A title with its unit, and how values lie on it."""

    title: str
    log: bool = False
    start: float | None = None  # by default where the data begins
    end: float | None = None


@dataclass(frozen=True)
class Curve:
    """Values over x; values that are not finite, or None, are gaps."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float | None]
    errors: Sequence[float | None] = ()  # standard errors of y, shown on hovering and exported
    group: str = ""  # curves of one group have one colour and are shown and hidden together; by default the name
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
    relative: bool = False  # z are masses of M equal bins in each column: coloured by how far they are from uniform

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
    """One pair of axes and what is drawn in it: curves or one heat map."""

    x: Axis
    y: Axis
    curves: Sequence[Curve] = ()
    heat: Heat | None = None
    title: str = ""
    marks: Sequence[tuple[float, str]] = ()  # vertical lines at x with a word each, drawn in pictures

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
    """A card of the page: panels side by side under one title."""

    title: str
    how_to_read: str  # one sentence
    panels: Sequence[Panel]
    note: str = ""  # what is missing or differs, if anything

    def plain(self) -> dict[str, Any]:
        """Return what the page needs of it."""
        panels = [panel.plain() for panel in self.panels]
        return {"title": self.title, "how_to_read": self.how_to_read, "note": self.note, "panels": panels}


def _numbers(values: Sequence[Any]) -> list[Any]:
    """Return values that JSON can hold: None for what is not finite."""
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in values]
