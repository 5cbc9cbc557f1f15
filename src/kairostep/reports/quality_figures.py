"""Quality by wall-clock, steps and network evaluations (Figure 1 of Kim et al. 2025), and by |S| (Figure 7)."""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from kairostep.plots import Axis, Curve, Figure, Panel
from kairostep.reports.arms import Arm, ShownRun, arm_settings
from kairostep.runs.history import RunHistory, evaluations_at
from kairostep.runs.metrics import number
from kairostep.runs.thinning import select_points

COSTS = {
    "seconds": Axis("seconds of training"),
    "step": Axis("steps"),
    "evaluations": Axis("network evaluations"),
}
HELD_OUT = {
    "loss": (
        "Held-out loss",
        "held-out loss",
        "Squared error on images never trained on, all times alike: the curve that is lower, or further left at the "
        "same height, is better; evaluations include the sampler's probes.",
    ),
    "vlb": (
        "Held-out variational bound",
        "held-out bound",
        "The loss weighted as the variational bound weights it, mostly at low noise, from one time per image: lower is "
        "better, and small differences are noise.",
    ),
}
MEASURED = {
    "fid": ("FID", "Distance of generated images from the data, by features of a network: lower is better."),
    "kid": ("KID", "Distance of generated images from the data, without FID's bias at few images: lower is better."),
    "vlb_bits_per_dim": ("Bits per dimension", "Bound on what encoding a held-out image costs: lower is better."),
}
NUM_SELECTED = "sampler.num_selected"


class Point(NamedTuple):
    """A measured number and the cost up to it."""

    step: float
    seconds: float | None
    evaluations: float | None
    value: float
    error: float | None


def quality_figures(runs: Sequence[ShownRun]) -> list[Figure]:
    """Return one figure per kind of quality that was measured."""
    figures = []
    for name, (title, axis, how_to_read) in HELD_OUT.items():
        figures.append(_against_costs(title, axis, how_to_read, [(run, _held_out(run.history, name)) for run in runs]))
    for what, (title, how_to_read) in MEASURED.items():
        figures.append(
            _against_costs(title, title, how_to_read, [(run, _quality_points(run.history, what)) for run in runs])
        )
    return [figure for figure in figures if figure is not None]


def selection_figure(arms: Sequence[Arm]) -> Figure | None:
    """Return final quality over |S|, or None if no runs differ in it."""
    families = [family for family in _families(arms) if len({_size(arm) for arm in family}) > 1]
    measures = {"held-out loss": "loss", "held-out bound": "vlb"}
    panels = [Panel(Axis("|S|"), Axis(title), _over_selected(families, measure)) for title, measure in measures.items()]
    fids = _over_selected(families, "fid")
    panels += [Panel(Axis("|S|"), Axis("FID"), fids)] if fids else []
    panels = [panel for panel in panels if panel.curves]
    how_to_read = (
        "Each point is the end of a run whose reward looks at |S| timesteps, the line their mean: where it is flat, "
        "fewer do as well."
    )
    return Figure("How many timesteps the reward needs", how_to_read, panels) if panels else None


def _against_costs(
    title: str, axis: str, how_to_read: str, found: Sequence[tuple[ShownRun, list[Point]]]
) -> Figure | None:
    found = [(run, points) for run, points in found if points]
    if not found:
        return None
    values = [point.value for _, points in found for point in points]
    log = min(values) > 0 and max(values) > 10 * min(values)
    panels = []
    for cost, costs in COSTS.items():
        curves = [_curve(run, points, cost) for run, points in found]
        panels.append(
            Panel(costs, Axis(axis, log=log), [curve for curve in curves if curve.x], title=f"by {costs.title}")
        )
    return Figure(title, how_to_read, [panel for panel in panels if panel.curves])


def _curve(run: ShownRun, points: Sequence[Point], cost: str) -> Curve:
    known = [point for point in points if getattr(point, cost) is not None]
    x = [float(getattr(point, cost)) for point in known]
    return Curve(run.name, x, [p.value for p in known], [p.error for p in known], run.key)


def _held_out(history: RunHistory, name: str) -> list[Point]:
    points = [
        Point(p.step, p.seconds, p.evaluations, getattr(p, name), getattr(p, f"{name}_error"))
        for p in history.held_out
        if getattr(p, name) is not None
    ]
    kept = select_points(array("d", (point.value for point in points)))
    return [points[i] for i in kept]


def _quality_points(history: RunHistory, what: str) -> list[Point]:
    """Return the latest measurement of each checkpoint."""
    points: dict[float, Point] = {}
    for line in history.evaluations:
        step, value = number(line.get("checkpoint")), number(line.get("value"))
        if line.get("what") == what and step is not None and value is not None:
            spent = history.metrics.get("seconds").at(step), evaluations_at(history.metrics, step)
            points[step] = Point(step, *spent, value, number(line.get("standard_error")))
    return [points[step] for step in sorted(points)]


def _families(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Return groups of arms that differ only in |S|."""
    grouped: dict[str, list[Arm]] = {}
    for arm in arms:
        settings = arm_settings(arm.first)
        if number(settings.get(NUM_SELECTED)) is not None:
            rest = [(key, repr(value)) for key, value in sorted(settings.items()) if key != NUM_SELECTED]
            grouped.setdefault(repr(rest), []).append(arm)
    return list(grouped.values())


def _over_selected(families: Sequence[Sequence[Arm]], measure: str) -> list[Curve]:
    curves = []
    for family in families:
        means: dict[float, float] = {}
        for arm in family:
            size = _size(arm)
            ends = [(run, value) for run in arm.runs if (value := _end(run.history, measure)) is not None]
            curves += [Curve(run.name, [size], [value], group=run.key, style="points") for run, value in ends]
            if ends:
                means[size] = sum(value for _, value in ends) / len(ends)
        if len(means) > 1:
            curves.append(Curve("mean", sorted(means), [means[size] for size in sorted(means)]))
    return curves


def _size(arm: Arm) -> float:
    return number(arm.first.option("sampler", "num_selected")) or 0.0


def _end(history: RunHistory, measure: str) -> float | None:
    if measure in ("loss", "vlb"):
        values: list[Any] = [getattr(point, measure) for point in history.held_out]
        return next((value for value in reversed(values) if value is not None), None)
    return number((history.measured(measure) or {}).get("value"))
