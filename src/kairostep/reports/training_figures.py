"""Figures of a training: losses and draws by time (Figures 5 and 6 of Kim et al. 2025), policy and cost."""

from array import array
from collections.abc import Sequence

from kairostep.plots import Axis, Curve, Figure, Heat, Panel
from kairostep.reports.arms import ShownRun
from kairostep.reports.rounding import significant
from kairostep.runs.metrics import Histograms, Metrics, number

STEPS = Axis("steps")
QUARTILES = ("t 0 to 0.25, least noise", "t 0.25 to 0.5", "t 0.5 to 0.75", "t 0.75 to 1, most noise")
NUM_SPEEDS = 60  # points of a curve of speed
NUM_SELECTED_POINTS = 240  # of one run
NOISE = {"noise_ratio": "noise over uniform's", "equivalent_batch": "batch of uniform draws with as little noise"}
# A histogram that is this close to uniform in every bin is not drawn. The bound for products is wider, since weights
# are noisy means over draws
DRAWN_UNIFORMLY, TRAINED_UNIFORMLY = 0.02, 0.1


def loss_figures(runs: Sequence[ShownRun]) -> list[Figure]:
    """Return training losses, those by quartile of t, and the profile that evaluations found."""
    minimised = Panel(STEPS, Axis("loss"), _curves(runs, "loss"), title="what is minimised")
    rate = Panel(STEPS, Axis("learning rate", start=0.0), _curves(runs, "learning_rate"), title="learning rate")
    quartiles = [
        Panel(STEPS, Axis("loss"), _curves(runs, f"loss_quartiles/{i}"), title=title)
        for i, title in enumerate(QUARTILES)
    ]
    profile = Panel(Axis("t", start=0.0, end=1.0), Axis("squared error of the noise", log=True), _profiles(runs))
    return _with_panels(
        Figure(
            "Training loss",
            "What each run minimises, at the times it draws: look for spikes and stalls, but do not compare heights "
            "between runs that draw differently.",
            [minimised, rate],
        ),
        Figure(
            "Loss by timestep over training",
            "Plain losses of the samples drawn in each quarter of t: they show at which noise a run learns, and at "
            "which it stopped.",
            quartiles,
        ),
        Figure(
            "Loss by timestep at the end",
            "Held-out error in 20 bins of t with the same noise for all runs: a curve below another is better at that "
            "noise; faint ones are earlier checkpoints.",
            [profile],
        ),
    )


def density_figures(runs: Sequence[ShownRun]) -> list[Figure]:
    """Return the density of draws over training, and its product with the weights, as probabilities."""
    drawn, trained = (
        [_heat_panel(run, name, label) for run in runs if _why_no_panel(run, name) == ""]
        for name, label in (("density", "probability of a draw"), ("product", "density times weight"))
    )
    return _with_panels(
        Figure(
            "Where the draws go",
            "Each column is the distribution of t at one step, from clean data (t = 0) below to noise above: orange "
            "times are drawn more often than uniform, blue ones less.",
            drawn,
            " ".join(lines_without_panels(runs, ["density"] if trained else ["density", "product"])),
        ),
        Figure(
            "What is trained: draws times weights",
            "As above, each draw counted by its weight and the columns scaled to probabilities: this is where a "
            "weighting and a sampler compare.",
            trained,
            " ".join(lines_without_panels(runs, ["product"] if drawn else ["density", "product"])),
        ),
    )


def lines_without_panels(runs: Sequence[ShownRun], names: Sequence[str]) -> list[str]:
    """Return a line for each reason why runs have no panel. A panel of uniform draws would be plain grey."""
    lines = []
    for name in names:
        reasons: dict[str, list[ShownRun]] = {}
        for run in runs:
            reasons.setdefault(_why_no_panel(run, name) or "", []).append(run)
        lines += [f"{why}: {', '.join(_by_arm(found, runs))}." for why, found in reasons.items() if why]
    return lines


def noise_figures(runs: Sequence[ShownRun]) -> list[Figure]:
    """Return how much gradient noise the draws save, over training, for samplers that predict it."""
    return _with_panels(
        Figure(
            "Gradient noise",
            "What the draws save, as the sampler predicts it: 1 is the noise of uniform draws, and 0.5 is half of it, "
            "which uniform draws have at twice the batch.",
            [Panel(STEPS, Axis(title), _curves(runs, f"sampler/{name}"), title=title) for name, title in NOISE.items()],
        )
    )


def policy_figures(runs: Sequence[ShownRun]) -> list[Figure]:
    """Return the diagnostics of samplers."""
    shown = {
        "a_mean": "a of Beta(a, b)",
        "b_mean": "b of Beta(a, b)",
        "entropy": "entropy",
        "reward_mean": "reward",
        "reward_std": "spread of the reward",
    }
    panels = [Panel(STEPS, Axis(title), _curves(runs, f"sampler/{name}"), title=title) for name, title in shown.items()]
    selected = Panel(STEPS, Axis("t", start=0.0, end=1.0), _selection_curves(runs), title="selected timesteps S")
    panels.insert(2, selected)
    return _with_panels(
        Figure(
            "The policy",
            "a and b shape the draws (both 1: uniform; a below b: low noise first), S is where the reward looks, and "
            "an entropy that falls without end means that the draws collapse.",
            panels,
        ),
        Figure(
            "Further diagnostics",
            "What else the samplers counted; skipped losses and rewards were not finite and should stay at 0.",
            [
                Panel(
                    STEPS, Axis(name.replace("_", " ")), _curves(runs, f"sampler/{name}"), title=name.replace("_", " ")
                )
                for name in _other_diagnostics(runs, {*shown, *NOISE, "probe_evaluations"})
            ],
        ),
    )


def cost_figures(runs: Sequence[ShownRun]) -> list[Figure]:
    """Return the cost of probes and the time of steps."""
    share = Axis("probes per 100 training evaluations", start=0.0)
    probes = [Curve(run.name, *_probe_share(run.history.metrics), group=run.key) for run in runs]
    speeds = [Curve(run.name, *_milliseconds_per_step(run.history.metrics), group=run.key) for run in runs]
    return _with_panels(
        Figure(
            "What the sampler costs",
            "Network evaluations that a sampler spends on probes, for every hundred that train, and the time of a step "
            "with all of that in it: lower is cheaper.",
            [
                Panel(STEPS, share, [curve for curve in probes if curve.x], title="probe evaluations"),
                Panel(
                    STEPS, Axis("milliseconds per step", start=0.0), [c for c in speeds if c.x], title="time per step"
                ),
            ],
        )
    )


def _with_panels(*figures: Figure) -> list[Figure]:
    """Return the figures that have something to show, without their empty panels."""
    kept = []
    for figure in figures:
        panels = [panel for panel in figure.panels if panel.heat or panel.curves]
        if panels:
            kept.append(Figure(figure.title, figure.how_to_read, panels, figure.note))
    return kept


def _curves(runs: Sequence[ShownRun], name: str) -> list[Curve]:
    found = [(run, run.history.metrics.get(name)) for run in runs]
    return [Curve(run.name, list(s.steps), list(s.values), group=run.key) for run, s in found if s.steps]


def _profiles(runs: Sequence[ShownRun]) -> list[Curve]:
    curves = []
    for run in runs:
        bins: dict[tuple[float, str], dict[float, tuple[float, float | None]]] = {}
        for line in run.history.evaluations:
            place, value, step = line.get("t"), number(line.get("value")), number(line.get("checkpoint"))
            if line.get("what") != "epsilon_mse_at" or value is None or step is None or not isinstance(place, list):
                continue
            ends = [end for end in map(number, place) if end is not None]
            if len(ends) == 2:
                bins.setdefault((step, str(line.get("weights"))), {})[sum(ends) / 2] = (
                    value,
                    number(line.get("standard_error")),
                )
        latest = max((step for step, _ in bins), default=0.0)
        for (step, weights), found in sorted(bins.items()):
            t = sorted(found)
            name = f"{run.name}, step {step:,.0f}, {weights}"
            values, errors = ([found[x][i] for x in t] for i in range(2))
            curves.append(Curve(name, t, values, errors, group=run.key, faint=step < latest))
    return curves


def _why_no_panel(run: ShownRun, name: str) -> str | None:
    """Return why a histogram has no panel: "" if it has one, None if nothing was recorded."""
    rows = _rows(run, name)
    if name == "product" and not rows and run.history.part("weighting") not in ("", "constant"):
        return "Drawn without the weighting, which was not recorded" if _rows(run, "density") else None
    if not rows:
        return None
    if name == "density":
        return "Drawn uniformly from the first step to the last" if _near(rows, None, DRAWN_UNIFORMLY) else ""
    if _near(rows[len(rows) // 2 :], None, TRAINED_UNIFORMLY):
        return "Uniform as draws times weights, within 10 % in the second half of training"
    return "Trained as drawn, all weights being equal" if _near(rows, _rows(run, "density"), DRAWN_UNIFORMLY) else ""


def _rows(run: ShownRun, name: str) -> list["array[float]"]:
    return run.history.metrics.histograms.get(name, Histograms()).rows


def _near(rows: Sequence["array[float]"], others: Sequence["array[float]"] | None, most: float) -> bool:
    """Whether all masses are near those of other rows, or near uniform if `others` is None."""
    if others is None:
        return all(abs(mass * len(row) - 1) <= most for row in rows for mass in row)
    pairs = zip(rows, others, strict=False)
    same = all(abs(a - b) * len(row) <= most for row, other in pairs for a, b in zip(row, other, strict=False))
    return same and len(rows) == len(others)


def _by_arm(chosen: Sequence[ShownRun], runs: Sequence[ShownRun]) -> list[str]:
    """Return the names of runs, with an arm's name instead of all its runs."""
    names: dict[str, None] = {}
    for run in chosen:
        whole = sum(other.arm == run.arm for other in chosen) == sum(other.arm == run.arm for other in runs)
        names[run.arm if whole else run.name] = None
    return list(names)


def _heat_panel(run: ShownRun, name: str, label: str) -> Panel:
    histograms = run.history.metrics.histograms[name]
    num_bins = len(histograms.rows[0])
    z = [[significant(row[i]) for row in histograms.rows] for i in range(num_bins)]  # (bins, steps)
    t = [significant((i + 0.5) / num_bins) for i in range(num_bins)]
    heat = Heat(run.name, histograms.steps, t, z, group=run.key, label=label, relative=True)
    return Panel(STEPS, Axis("t", start=0.0, end=1.0), heat=heat, title=run.name)


def _selection_curves(runs: Sequence[ShownRun]) -> list[Curve]:
    curves = []
    for run in runs:
        series = [s for name, s in run.history.metrics.series.items() if name.startswith("sampler/selected_t_")]
        points = sorted(pair for s in series for pair in zip(s.steps, s.values, strict=True))
        if points:
            x, y = zip(*points[:: 1 + len(points) // NUM_SELECTED_POINTS], strict=True)
            curves.append(Curve(run.name, x, y, group=run.key, style="points"))
    return curves


def _other_diagnostics(runs: Sequence[ShownRun], shown: set[str]) -> list[str]:
    names: dict[str, None] = {}
    for run in runs:
        for name, series in run.history.metrics.series.items():
            part, _, rest = name.partition("/")
            if part == "sampler" and rest not in shown and not rest.startswith("selected_t_") and any(series.values):
                names[rest] = None
    return list(names)


def _probe_share(metrics: Metrics) -> tuple[list[float], list[float]]:
    probes, training = metrics.get("probe_evaluations"), metrics.get("training_evaluations")
    pairs = [
        (step, 100 * value / spent)
        for step, value in zip(probes.steps, probes.values, strict=True)
        if (spent := training.at(step))
    ]
    return [step for step, _ in pairs], [share for _, share in pairs]


def _milliseconds_per_step(metrics: Metrics) -> tuple[list[float], list[float]]:
    seconds = metrics.get("seconds")
    steps = seconds.steps[:: max(1, len(seconds.steps) // NUM_SPEEDS)]
    times = [seconds.at(step) or 0.0 for step in steps]
    speeds = [1000 * (times[i] - times[i - 1]) / (steps[i] - steps[i - 1]) for i in range(1, len(steps))]
    return list(steps[1:]), speeds
