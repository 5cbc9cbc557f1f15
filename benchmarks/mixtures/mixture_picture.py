"""The picture of exact_mixture.py: in each setting the excess by network evaluations, and below it beside uniform's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mixture_report import Curves, Outcomes, Ratio
from torch import Tensor

from kairostep.analysis.picture import INK, SOFT, new_figure, round_log_ticks, style

PANEL_INCHES = (4.3, 5.2)
HEAD_INCHES = 0.7
MAX_COLUMNS = 4
COLOURS = ("#1f2430", "#2f6fde", "#e07b00", "#1a9850", "#c2185b", "#7b4fc9", "#00a3a3", "#9c6b30", "#d4a800", "#7f8c9b")
RATIO_TICKS = (0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6)


@dataclass(frozen=True)
class Line:
    """A curve with a band, all as logs."""

    name: str
    x: Tensor  # (C,)
    middle: Tensor  # (C,)
    low: Tensor  # (C,)
    high: Tensor  # (C,)
    colour: str


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
        lines.append(Line(arm, curves.log_evaluations, logs[0], *band_of(logs), COLOURS[number % len(COLOURS)]))
    return lines


def is_control(arm: str) -> bool:
    """Return whether the arm is there to be compared with, not to be used."""
    return arm.startswith(("control", "oracle"))


def draw_lines(axes: Any, lines: Sequence[Line]) -> None:
    """Draw bands, then the curves over them, the first curve on top."""
    for number, line in enumerate(lines):
        x, middle, low, high = (logs.exp().tolist() for logs in (line.x, line.middle, line.low, line.high))
        axes.fill_between(x, low, high, color=line.colour, alpha=0.15, linewidth=0)
        dashes = "--" if is_control(line.name) else "-"
        axes.plot(x, middle, dashes, color=line.colour, linewidth=1.8, label=line.name, zorder=3 - number / 100)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(min(math.exp(line.x[0]) for line in lines), max(math.exp(line.x[-1]) for line in lines))


def draw_panel(main: Any, strip: Any, title: str, lines: Sequence[Line], ratios: Sequence[Line]) -> None:
    """Draw one setting: the curves, and the strip of ratios below."""
    draw_lines(main, lines)
    low, high = (end(end(line.middle.tolist()) for line in lines) for end in (min, max))
    main.set_ylim(math.exp(low - 0.1), math.exp(high + 0.1))
    round_log_ticks(main.yaxis)
    style(main, title, "", "excess")
    main.tick_params(labelbottom=False, which="both")
    draw_lines(strip, ratios)
    strip.set_ylim(RATIO_TICKS[0], RATIO_TICKS[-1])
    strip.set_yticks(RATIO_TICKS, [f"{tick:g}" for tick in RATIO_TICKS])
    strip.minorticks_off()
    round_log_ticks(strip.xaxis, lambda tick, _: f"{tick / 1000:g}k")
    style(strip, "", "network evaluations", "ratio")
    strip.axhline(1, color=SOFT, linewidth=0.8)


def draw_curves(outcomes: Outcomes, arms: Sequence[str], base: str, path: Path) -> None:
    """Write the picture of all settings."""
    rows = math.ceil((len(outcomes) + 1) / MAX_COLUMNS)  # the last place is the legend's
    columns = math.ceil((len(outcomes) + 1) / rows)
    figure = new_figure(columns * PANEL_INCHES[0], HEAD_INCHES + rows * PANEL_INCHES[1])
    title = "Excess squared error of the noise by network evaluations, probes included"
    note = f"mean over seeds and 95 % interval; below: ratio to {base} at equal evaluations, up to {RATIO_TICKS[-1]}"
    figure.suptitle(f"{title}\n{note}", x=0.01, ha="left", color=INK, fontsize=13)
    places = figure.subfigures(rows, columns, squeeze=False).flat
    for place, setting in zip(places, outcomes, strict=False):
        lines = [lines_of(outcomes, setting, arms, base, relative=relative) for relative in (False, True)]
        draw_panel(*place.subplots(2, 1, sharex=True), setting, *lines)
    drawn = places[0].axes[0].get_legend_handles_labels()
    places[len(outcomes)].legend(*drawn, loc="center left", frameon=False, fontsize=12)
    figure.savefig(path)
