"""Draws docs/study.png from the logs of the study: held-out error and FID over training, each seed and the mean.

python benchmarks/study_picture.py
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from document_tables import ROOT, STUDY, Log

from kairostep.analysis.picture import INK, SOFT, new_figure, style

PICTURE = ROOT / "docs" / "study.png"
ARMS = {  # in the order of drawing -> name, colour, width
    ("uniform", 256): ("Uniform, batch 256", "#a9b1bf", 5),
    ("uniform", 128): ("Uniform", "#e07b00", 2),
    ("root_loss", 128): ("RootLoss", "#2f6fde", 2),
}
MEASURES = {"epsilon_mse": "held-out error", "fid": "FID of 5000 images"}
START = 2000  # the first FID
INCHES = (10, 3.9)

Curve = dict[int, float]  # step -> value


def read_curves(measure: str, folder: Path = STUDY) -> dict[tuple[str, int], list[Curve]]:
    """Return the values of each drawn arm by step, one curve for each seed."""
    found: dict[tuple[str, int], list[Curve]] = {arm: [] for arm in ARMS}
    for path in sorted(folder.rglob("seed-*.jsonl")):
        log = Log.read(path)
        if log.arm in found:
            lines = [line for line in log.checkpoints if line["step"] >= START and measure in line]
            curve = {line["step"]: float(line[measure]) for line in lines}
            if measure == "fid":
                curve[log.checkpoints[-1]["step"]] = float(log.end["fid"][0])
            found[log.arm].append(curve)
    return found


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean over seeds at each step that all have."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: statistics.fmean(curve[step] for curve in curves) for step in steps}


def draw(axes: Any, curves: Mapping[tuple[str, int], Sequence[Curve]], label: str) -> None:
    """Draw each seed thin and the mean thick."""
    for arm, (name, colour, width) in ARMS.items():
        for curve in curves[arm]:
            axes.plot(list(curve), list(curve.values()), color=colour, linewidth=0.8, alpha=0.5)
        mean = mean_curve(curves[arm])
        axes.plot(list(mean), list(mean.values()), color=colour, linewidth=width, label=name)
    style(axes, label, "steps", "")
    axes.set_xlim(START, max(mean))


def main() -> None:
    """Write the picture."""
    figure = new_figure(*INCHES)
    panels = figure.subplots(1, len(MEASURES))
    for axes, (measure, label) in zip(panels, MEASURES.items(), strict=True):
        draw(axes, read_curves(measure), label)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(ARMS), frameon=False, labelcolor=INK)
    title = "CIFAR-10, linear schedule, U-Net of 6.5M, batch 128 unless named, three seeds: lower is better"
    figure.suptitle(title, x=0.01, ha="left", color=SOFT, fontsize=10)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
