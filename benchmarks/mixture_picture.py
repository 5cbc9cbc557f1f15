"""The picture of exact_mixture.py: in each setting the excess by network evaluations, and below it beside uniform's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from mixture_report import Curves, Outcomes, Ratio
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SCALE = 3  # drawn larger, then reduced: lines come out smooth
PANEL_WIDTH, MAIN_HEIGHT, STRIP_HEIGHT, GAP = 430, 200, 200, 14
LEFT, RIGHT, TOP, BOTTOM = 66, 18, 46, 54  # around the axes of a panel
HEAD = 66
COLUMNS = 4
INK, SOFT, GRID, PAPER = "#1f2430", "#667085", "#e6e8ee", "#ffffff"
COLOURS = ("#1f2430", "#2f6fde", "#e07b00", "#1a9850", "#c2185b", "#7b4fc9", "#00a3a3", "#9c6b30", "#d4a800", "#7f8c9b")
RATIO_TICKS = (0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6)


@dataclass(frozen=True)
class Line:
    """A curve with a band, all as logs."""

    x: Tensor  # (C,)
    middle: Tensor  # (C,)
    low: Tensor  # (C,)
    high: Tensor  # (C,)
    colour: str
    dashed: bool


@dataclass(frozen=True)
class Axes:
    """A rectangle of the picture with logarithmic axes."""

    box: tuple[float, float, float, float]  # left, top, right, bottom
    x_range: tuple[float, float]  # logs
    y_range: tuple[float, float]  # logs

    def place(self, x: Tensor, y: Tensor) -> list[tuple[float, float]]:
        """Return the pixels of points."""
        left, top, right, bottom = self.box
        across = (x - self.x_range[0]) / (self.x_range[1] - self.x_range[0])
        down = (self.y_range[1] - y.clamp(*self.y_range)) / (self.y_range[1] - self.y_range[0])
        return list(zip((left + across * (right - left)).tolist(), (top + down * (bottom - top)).tolist(), strict=True))


class Canvas:
    """A picture drawn at several times its size, in points of the final one."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width * SCALE, height * SCALE), PAPER)
        self.draw = ImageDraw.Draw(self.image, "RGBA")

    def text(self, at: tuple[float, float], text: str, size: int, colour: str = INK, anchor: str = "lm") -> None:
        """Write text at a point."""
        font = ImageFont.load_default(size * SCALE)
        self.draw.text((at[0] * SCALE, at[1] * SCALE), text, fill=colour, font=font, anchor=anchor)

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float, *, dashed: bool = False) -> None:
        """Draw a line through points."""
        scaled = [(x * SCALE, y * SCALE) for x, y in points]
        for part in dashes(scaled, 7 * SCALE, 4 * SCALE) if dashed else [scaled]:
            self.draw.line(part, fill=colour, width=round(width * SCALE), joint="curve")

    def band(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """Fill a polygon faintly."""
        self.draw.polygon([(x * SCALE, y * SCALE) for x, y in points], fill=colour + "26")

    def finished(self) -> Image.Image:
        """Return the picture in its size."""
        return self.image.resize((self.image.width // SCALE, self.image.height // SCALE), Image.Resampling.LANCZOS)


def dashes(points: Sequence[tuple[float, float]], on: float, off: float) -> list[list[tuple[float, float]]]:
    """Return the pieces of a line that are drawn if `on` pixels are and the next `off` are not."""
    pieces, piece, drawing, left = [], [points[0]], True, on
    for (x0, y0), (x1, y1) in pairwise(points):
        length, done = math.hypot(x1 - x0, y1 - y0), 0.0
        while length - done > left:
            done += left
            at = (x0 + (x1 - x0) * done / length, y0 + (y1 - y0) * done / length)
            if drawing:
                pieces.append([*piece, at])
            piece, drawing = [at], not drawing
            left = on if drawing else off
        left -= length - done
        piece.append((x1, y1))
    return [*pieces, piece] if drawing else pieces


def band_of(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends (C,) of the intervals of curves (S + 1, C), the first of all seeds, the others without one."""
    ratios = [Ratio.of(column) for column in logs.T]
    return tuple(torch.tensor([math.log(getattr(ratio, end)) for ratio in ratios]) for end in ("low", "high"))


def lines_of(outcomes: Outcomes, setting: str, arms: Sequence[str], base: str, *, relative: bool) -> list[Line]:
    """Return the curves of a setting, or their ratios to uniform at equal evaluations."""
    reference = Curves.of(outcomes[setting][base], 0)
    lines = []
    for number, arm in enumerate(arms):
        curves = Curves.of(outcomes[setting][arm], 0)
        logs = curves.log_excess
        if relative:
            logs = torch.stack(
                [ours - reference.at(x) for ours, x in zip(logs.T, curves.log_evaluations, strict=True)], 1
            )
        lines.append(
            Line(curves.log_evaluations, logs[0], *band_of(logs), COLOURS[number % len(COLOURS)], is_control(arm))
        )
    return lines


def is_control(arm: str) -> bool:
    """Return whether the arm is there to be compared with, not to be used."""
    return arm.startswith(("control", "oracle"))


def draw_axes(canvas: Canvas, axes: Axes, x_ticks: Sequence[float], y_ticks: Sequence[float], *, labels: bool) -> None:
    """Draw the grid, its numbers at the left, and below if `labels`."""
    left, top, right, bottom = axes.box
    for tick in x_ticks:
        (x, _), *_ = axes.place(torch.tensor([math.log(tick)]), torch.tensor([0.0]))
        canvas.line([(x, top), (x, bottom)], GRID, 1)
        if labels:
            canvas.text((x, bottom + 12), f"{tick / 1000:g}k", 12, SOFT, "mm")
    for tick in y_ticks:
        (_, y), *_ = axes.place(torch.tensor([axes.x_range[0]]), torch.tensor([math.log(tick)]))
        canvas.line([(left, y), (right, y)], SOFT if tick == 1 else GRID, 1)
        canvas.text((left - 7, y), f"{tick:g}", 12, SOFT, "rm")


def draw_lines(canvas: Canvas, axes: Axes, lines: Sequence[Line]) -> None:
    """Draw bands, then the curves over them, the first curve at last."""
    for line in lines:
        canvas.band(axes.place(line.x, line.high) + axes.place(line.x, line.low)[::-1], line.colour)
    for line in reversed(lines):
        canvas.line(axes.place(line.x, line.middle), line.colour, 1.8, dashed=line.dashed)


def ticks_between(low: float, high: float, steps: Sequence[float] = (1, 2, 5)) -> list[float]:
    """Return round numbers between two logs."""
    powers = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    ticks = [step * 10.0**power for power in powers for step in steps]
    return [tick for tick in ticks if low <= math.log(tick) <= high]


def draw_panel(
    canvas: Canvas, left: float, top: float, title: str, lines: Sequence[Line], ratios: Sequence[Line]
) -> None:
    """Draw one setting: the curves, and the strip of ratios below."""
    x_range = (min(float(line.x[0]) for line in lines), max(float(line.x[-1]) for line in lines))
    low, high = (end([end(line.middle.tolist()) for line in lines]) for end in (min, max))
    right = left + PANEL_WIDTH - RIGHT
    left, top = left + LEFT, top + TOP
    middle = top + MAIN_HEIGHT
    main = Axes((left, top, right, middle), x_range, (low - 0.1, high + 0.1))
    strip = Axes(
        (left, middle + GAP, right, middle + GAP + STRIP_HEIGHT),
        x_range,
        (math.log(RATIO_TICKS[0]), math.log(RATIO_TICKS[-1])),
    )
    x_ticks = ticks_between(*x_range)
    canvas.text((left, top - 16), title, 17)
    canvas.text((right, top - 15), "excess", 12, SOFT, "rm")
    canvas.text((right, middle + GAP + STRIP_HEIGHT + 28), "network evaluations", 12, SOFT, "rm")
    draw_axes(canvas, main, x_ticks, ticks_between(*main.y_range), labels=False)
    draw_axes(canvas, strip, x_ticks, RATIO_TICKS, labels=True)
    draw_lines(canvas, main, lines)
    draw_lines(canvas, strip, ratios)


def draw_legend(canvas: Canvas, left: float, top: float, arms: Sequence[str]) -> None:
    """Draw the names of the arms."""
    for number, arm in enumerate(arms):
        y = top + 26 * number
        canvas.line([(left, y), (left + 34, y)], COLOURS[number % len(COLOURS)], 2.6, dashed=is_control(arm))
        canvas.text((left + 44, y), arm, 15)


def draw_curves(outcomes: Outcomes, arms: Sequence[str], base: str) -> Image.Image:
    """Return the picture of all settings."""
    columns = min(COLUMNS, len(outcomes) + 1)
    height = TOP + MAIN_HEIGHT + GAP + STRIP_HEIGHT + BOTTOM
    rows = -(-(len(outcomes) + 1) // columns)
    canvas = Canvas(columns * PANEL_WIDTH, HEAD + rows * height)
    canvas.text((LEFT, 28), "Excess squared error of the noise by network evaluations, probes included", 22)
    note = f"mean over seeds and 95 % interval; below: ratio to {base} at equal evaluations, up to {RATIO_TICKS[-1]}"
    canvas.text((LEFT, 54), note, 15, SOFT)
    for number, setting in enumerate(outcomes):
        row, column = divmod(number, columns)
        lines = [lines_of(outcomes, setting, arms, base, relative=relative) for relative in (False, True)]
        draw_panel(canvas, column * PANEL_WIDTH, HEAD + row * height, setting, *lines)
    row, column = divmod(len(outcomes), columns)
    draw_legend(canvas, column * PANEL_WIDTH + LEFT, HEAD + row * height + TOP + 8, arms)
    return canvas.finished()
