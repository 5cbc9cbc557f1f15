"""Makes one self-contained page from run directories."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kairostep.plots import Figure
from kairostep.reports.arms import Arm, arms_of
from kairostep.reports.configurations import differences, warnings
from kairostep.reports.page import Group, import_extra, whole_page, write_page
from kairostep.reports.quality_figures import quality_figures, selection_figure
from kairostep.reports.results_table import results_table
from kairostep.reports.rounding import MISSING
from kairostep.reports.sample_grids import sample_grids
from kairostep.reports.training_figures import (
    cost_figures,
    density_figures,
    lines_without_panels,
    loss_figures,
    noise_figures,
    policy_figures,
)
from kairostep.reports.verdict import Verdict, verdict
from kairostep.runs.history import RunHistory
from kairostep.version import __version__

DEPTH = 5  # of run directories in a folder of runs
RUN_FILES = ("config.yaml", "metrics.jsonl")


@dataclass(frozen=True)
class Comparison:
    """What `kairostep compare`, which planned the runs, adds to their page."""

    names: Mapping[Path, str] = field(default_factory=dict)  # of runs, by their directories
    baseline: str | None = None  # an arm
    verdict: Verdict | None = None
    title: str | None = None


class Report(NamedTuple):
    """The data of a page, for the templates."""

    context: dict[str, Any]
    groups: list[Group]
    figures: list[Figure]


def write_report(directories: Sequence[Path], output: Path, comparison: Comparison | None = None) -> Path:
    """Write the page of some runs, or of all runs in some folders, and return its path.

    Args:
        directories: Runs, or folders of runs.
        output: The page.
        comparison: Names, baseline and verdict, if `kairostep compare` made the runs.

    Raises:
        ValueError: A directory does not exist or holds no run, or the page cannot be written.
    """
    for package in ("jinja2", "plotly"):
        import_extra(package)
    runs = find_runs(directories)
    return write_page(Path(output), whole_page(*make_report(runs, comparison=comparison)))


def find_runs(directories: Sequence[Path]) -> list[Path]:
    """Return run directories: those named, and those inside other folders."""
    found: dict[Path, None] = {}
    for directory in map(Path, directories):
        runs = runs_in(directory)
        if not runs:
            raise ValueError(
                f"a report needs run directories with a config.yaml, or folders of them, got {directory}: "
                "name what `train` made"
            )
        found |= dict.fromkeys(runs)
    if not found:
        raise ValueError("a report needs at least one run directory, got none: name what `train` made")
    return list(found)


def runs_in(directory: Path) -> list[Path]:
    """Return a directory if it is a run, otherwise the runs in it. Raise ValueError if it does not exist."""
    if not directory.is_dir():
        raise ValueError(f"a report needs directories that exist, got {directory}: name what `train` made")
    directory = directory.absolute()
    if _is_run(directory):
        return [directory]
    patterns = ["*/" * depth + name for depth in range(1, DEPTH + 1) for name in RUN_FILES]
    found = {path.parent for pattern in patterns for path in directory.glob(pattern) if path.is_file()}
    return sorted(found, key=_natural)


def make_report(
    directories: Sequence[Path],
    read: Callable[[Path], RunHistory] = RunHistory.read,
    comparison: Comparison | None = None,
) -> Report:
    """Return everything that the page of some runs shows."""
    known = comparison or Comparison()
    arms = arms_of([read(directory) for directory in directories], known.names, known.baseline)
    runs = [run for arm in arms for run in arm.runs]
    draws = density_figures(runs)
    context: dict[str, Any] = {"title": known.title or _title(directories), "intro": _intro(arms), "footer": _footer()}
    if runs:
        samples = sample_grids(runs)
        context |= {
            "arms": arms,
            "missing": MISSING,
            "verdict": known.verdict or verdict(arms),
            "warnings": warnings(runs),
            "table": results_table(arms),
            "uniform": [] if draws else lines_without_panels(runs, ["density", "product"]),
            "samples": samples,
            "num_grids": max((len(of_run.grids) for of_run in samples), default=0),
            "differences": differences(arms),
            "runs": [_run_entry(run) for run in runs],
        }
    ablation = selection_figure(arms)
    figures = [
        *quality_figures(runs),
        *([ablation] if ablation else []),
        *draws,
        *loss_figures(runs),
        *noise_figures(runs),
        *policy_figures(runs),
        *cost_figures(runs),
    ]
    return Report(context, [Group(run.key, run.name, run.arm, run.short, run.settings) for run in runs], figures)


def _is_run(directory: Path) -> bool:
    return any((directory / name).is_file() for name in RUN_FILES)


def _natural(path: Path) -> list[Any]:
    """Return a sort key that puts run-2 before run-10."""
    return [(part.isdigit(), int(part) if part.isdecimal() else part) for part in re.split(r"(\d+)", str(path))]


def _title(directories: Sequence[Path]) -> str:
    if len(directories) == 1:
        return directories[0].name
    parents = {directory.parent for directory in directories}
    return parents.pop().name or "Runs" if len(parents) == 1 else "Runs"


def _intro(arms: Sequence[Arm]) -> str:
    num_runs = sum(len(arm.runs) for arm in arms)
    if not arms:
        return "No run has begun here yet: this page shows it as soon as it does."
    first = arms[0].first
    facts = [f"{name} {first.part(name)}" for name in ("data", "network", "process", "prediction") if first.part(name)]
    devices = dict.fromkeys(run.history.devices for arm in arms for run in arm.runs)
    trained = f" Trained on {' and '.join(devices)}." if "unknown" not in devices else ""
    counts = f"{num_runs} run{'s' * (num_runs > 1)}" + (f" in {len(arms)} arms" if num_runs > len(arms) > 1 else "")
    return (f"{counts}. {', '.join(facts)}." if facts else f"{counts}.") + trained


def _footer() -> str:
    return f"Made by kairostep {__version__} at {time.strftime('%Y-%m-%d %H:%M:%S %Z')}. This page needs no network."


def _run_entry(run: Any) -> dict[str, Any]:
    history = run.history
    return {
        "key": run.key,
        "name": run.name,
        "arm": run.arm,
        "settings": run.settings,
        "state": "problem" if history.problems or history.state in ("stopped", "empty") else history.state,
        "state_text": history.state_text,
        "problems": history.problems,
        "directory": str(history.directory),
        "config_text": history.config_text,
    }
