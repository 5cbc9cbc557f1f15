"""Draws panels side by side with matplotlib, a legend below each."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kairostep.data.extras import require
from kairostep.plots import Panel

INCHES, DPI = (6.5, 4.6), 100  # of a panel
WIDE = 1e3  # a logarithmic axis with a larger ratio of its ends is only marked at powers of ten
INK, SOFT, GRID = "#1f2430", "#667085", "#e6e8ee"
COLOURS = ("#2f6fde", "#e07b00", "#1f2430", "#1a9850", "#c2185b", "#7b4fc9", "#00a3a3", "#9c6b30")


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure, sizes in inches, without pyplot and its global state."""
    figure = require("matplotlib.figure", "a picture", "report")
    return figure.Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def write_picture(title: str, note: str, panels: Sequence[Panel], path: Path) -> None:
    """Write a PNG of the panels side by side."""
    figure = new_figure(INCHES[0] * len(panels), INCHES[1])
    figure.suptitle(f"{title}\n", x=0.01, ha="left", color=INK, fontsize=15)
    figure.text(0.01, 0.91, note, ha="left", va="center", color=SOFT, fontsize=10)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw_panel(axes, panel)
    figure.savefig(path)


def draw_panel(axes: Any, panel: Panel) -> None:
    """Draw the curves, the first on top, then the marks, and the legend below."""
    for number, curve in enumerate(panel.curves):
        known = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None]
        points = [(x, y) for x, y in known if y > 0 or not panel.y.log]
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(x, y, color=COLOURS[number % len(COLOURS)], label=curve.name, zorder=3 - number / 100)
    if panel.x.log:
        axes.set_xscale("log")
        round_log_ticks(axes.xaxis)
    if panel.y.log:
        axes.set_yscale("log")
        round_log_ticks(axes.yaxis)
    else:
        axes.axhline(0, color=SOFT, linewidth=0.8)
    style(axes, panel.title, panel.x.title, panel.y.title)
    top = {"xycoords": ("data", "axes fraction"), "xytext": (2, 2), "textcoords": "offset points"}
    for place, word in panel.marks:
        axes.axvline(place, color=SOFT, linewidth=0.8)
        axes.annotate(word, (place, 1), **top, color=SOFT, fontsize=9)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False, fontsize=10)


def style(axes: Any, title: str, x_label: str, y_label: str) -> None:
    """Give axes their title and labels, a light grid and no box."""
    axes.set_title(title, loc="left", color=INK, fontsize=12, pad=16)
    axes.set_xlabel(x_label, color=SOFT)
    axes.set_ylabel(y_label, color=SOFT)
    axes.tick_params(colors=SOFT)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def round_log_ticks(axis: Any, text: str | Callable[[float, int], str] = "{x:g}") -> None:
    """Mark a logarithmic axis at round numbers, one to three for each power of ten, with the format `text`."""
    low, high = axis.get_view_interval()
    factors = (1, 2, 5) if high / low < WIDE else (1,)
    axis.set_major_locator(require("matplotlib.ticker", "a picture", "report").LogLocator(subs=factors))
    axis.set_major_formatter(text)
    axis.set_minor_formatter("")
