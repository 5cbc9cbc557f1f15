"""Curves as a picture, drawn with Pillow: some panels side by side, a legend below each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kairostep.data.extras import require

SCALE = 3  # drawn larger, then reduced: lines come out smooth
WIDTH, HEIGHT = 560, 300  # of a panel's axes
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 48, 50  # around them
HEAD, LEGEND_LINE = 64, 22
INK, SOFT, GRID, PAPER = "#1f2430", "#667085", "#e6e8ee", "#ffffff"
COLOURS = ("#2f6fde", "#e07b00", "#1f2430", "#1a9850", "#c2185b", "#7b4fc9", "#00a3a3", "#9c6b30")
Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A named line through points in the order of x."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """Curves over one axis."""

    title: str
    x_label: str
    curves: Sequence[Curve]
    y_label: str = ""
    log: bool = False  # of y; values of 0 and below are then left out
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)  # vertical lines with a word each


class Canvas:
    """A picture drawn at several times its size, in points of the final one."""

    def __init__(self, width: int, height: int) -> None:
        require("PIL", "a picture")
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (width * SCALE, height * SCALE), PAPER)
        self.draw = ImageDraw.Draw(self.image)

    def text(self, at: Point, text: str, size: int, colour: str = INK, anchor: str = "lm") -> None:
        """Write text at a point."""
        from PIL import ImageFont

        font = ImageFont.load_default(size * SCALE)
        self.draw.text((at[0] * SCALE, at[1] * SCALE), text, fill=colour, font=font, anchor=anchor)

    def line(self, points: Sequence[Point], colour: str, width: float) -> None:
        """Draw a line through points."""
        scaled = [(x * SCALE, y * SCALE) for x, y in points]
        self.draw.line(scaled, fill=colour, width=round(width * SCALE), joint="curve")

    def finished(self) -> Any:
        """Return the picture in its size."""
        from PIL import Image

        size = (self.image.width // SCALE, self.image.height // SCALE)
        return self.image.resize(size, Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class Axes:
    """A rectangle of the picture and what it spans."""

    left: float
    top: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def place(self, x: float, y: float) -> Point:
        """Return the point of a value; what lies beyond the axes goes to their edge."""
        across = (x - self.x_range[0]) / (self.x_range[1] - self.x_range[0])
        up = (y - self.y_range[0]) / (self.y_range[1] - self.y_range[0])
        return self.left + min(1.0, max(0.0, across)) * WIDTH, self.top + HEIGHT * (1 - min(1.0, max(0.0, up)))


def write_picture(title: str, note: str, panels: Sequence[Panel], path: Path) -> None:
    """Write a PNG of the panels side by side."""
    lines = max(len(panel.curves) for panel in panels)
    width = len(panels) * (LEFT + WIDTH + RIGHT)
    canvas = Canvas(width, HEAD + TOP + HEIGHT + BOTTOM + LEGEND_LINE * ((lines + 1) // 2))
    canvas.text((LEFT, 26), title, 20)
    canvas.text((LEFT, 52), note, 13, SOFT)
    for number, panel in enumerate(panels):
        draw_panel(canvas, number * (LEFT + WIDTH + RIGHT) + LEFT, HEAD + TOP, panel)
    canvas.finished().save(path)


def draw_panel(canvas: Canvas, left: float, top: float, panel: Panel) -> None:
    """Draw grid, marks, curves and legend."""
    axes = axes_of(panel, left, top)
    canvas.text((left, top - 28), panel.title, 16)
    canvas.text((left + WIDTH, top - 27), panel.y_label, 12, SOFT, "rm")
    for tick in ticks(*axes.x_range):
        x, bottom = axes.place(tick, axes.y_range[0])
        canvas.line([(x, top), (x, bottom)], GRID, 1)
        canvas.text((x, bottom + 13), f"{tick:g}", 12, SOFT, "mm")
    for tick in log_ticks(*axes.y_range) if panel.log else ticks(*axes.y_range):
        _, y = axes.place(axes.x_range[0], math.log10(tick) if panel.log else tick)
        canvas.line([(left, y), (left + WIDTH, y)], SOFT if tick == 0 else GRID, 1)
        canvas.text((left - 8, y), f"{tick:g}", 12, SOFT, "rm")
    for place, word in panel.marks:
        x, _ = axes.place(place, 0)
        canvas.line([(x, top), (x, top + HEIGHT)], SOFT, 1)
        canvas.text((x, top - 9), word, 12, SOFT)
    canvas.text((left + WIDTH, top + HEIGHT + 30), panel.x_label, 12, SOFT, "rm")
    for number, curve in reversed(list(enumerate(panel.curves))):
        drawn = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y > 0 or not panel.log]
        points = [axes.place(x, math.log10(y) if panel.log else y) for x, y in drawn]
        canvas.line(points, COLOURS[number % len(COLOURS)], 2)
    for number, curve in enumerate(panel.curves):
        x, y = left + (number % 2) * WIDTH / 2, top + HEIGHT + BOTTOM + LEGEND_LINE * (number // 2)
        canvas.line([(x, y), (x + 28, y)], COLOURS[number % len(COLOURS)], 3)
        canvas.text((x + 36, y), curve.name, 13)


def axes_of(panel: Panel, left: float, top: float) -> Axes:
    """Return axes that hold all curves and, unless they are logarithmic, 0."""
    xs, ys = ([v for curve in panel.curves for v in getattr(curve, key)] for key in ("x", "y"))
    heights = [math.log10(y) for y in ys if y > 0] or [0.0] if panel.log else [0.0, *ys]
    return Axes(left, top, span(xs), span(heights))


def span(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and the greatest value, apart from each other."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low, low + 1)


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between the powers of ten to two ends, one to three for each power."""
    factors = (1, 2, 5) if high - low < 3 else (1,)
    numbers = [factor * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for factor in factors]
    return [number for number in numbers if low <= math.log10(number) <= high]


def ticks(low: float, high: float, num: int = 6) -> list[float]:
    """Return round numbers between two ends, about so many."""
    rough = (high - low) / num
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]
