"""Writes results of `preview` and `analyse`: JSON in a run directory, and the file of --output."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kairostep.analysis.picture import write_picture
from kairostep.analysis.result_file import write_result
from kairostep.data.extras import require
from kairostep.plots import Figure, Panel
from kairostep.reports import write_figures

SUFFIXES = (".html", ".png", ".json")


def check_output(path: Path | None, option: str = "--output", suffixes: Sequence[str] = SUFFIXES) -> None:
    """Raise ValueError for a file that could not be written after the analysis."""
    if path is None:
        return
    if path.suffix not in suffixes:
        fix = f"pass for instance {option}={path.stem}{suffixes[0]}"
        raise ValueError(f"{option} must end in {', '.join(suffixes)}, got {path}: {fix}")
    if not path.parent.is_dir():
        raise ValueError(f"{option} must be in a folder that exists, got {path}: mkdir -p {path.parent}")
    if path.suffix == ".png":
        require("matplotlib", "a picture", "report")  # before the analysis, which takes minutes


def write_in_run(directory: Path, analysis: str, facts: Mapping[str, Any], result: Any) -> None:
    """Write RUN/analysis/NAME.json and print its path."""
    path = directory / "analysis" / f"{analysis}.json"
    write_result(path, analysis, facts, result)
    print(f"\nresult in {path}")


def write_output(
    path: Path | None,
    analysis: str,
    facts: Mapping[str, Any],
    result: Any,
    *,
    title: str,
    how_to_read: str,
    panels: Sequence[Panel],
) -> None:
    """Write the file that --output names, if any. Its suffix selects the format."""
    if path is None:
        return
    if path.suffix == ".json":
        write_result(path, analysis, facts, result)
    elif path.suffix == ".png":
        write_picture(title, how_to_read, panels, path)
    else:
        write_figures(title, str(facts["command"]), [page_figure(title, how_to_read, panels)], path)
    print(f"\nalso in {path}")


def page_figure(title: str, how_to_read: str, panels: Sequence[Panel]) -> Figure:
    """Return panels as a figure of an HTML page."""
    marks = "; ".join(f"{word} from t = {place:.3f}" for place, word in panels[0].marks)
    return Figure(title, how_to_read, panels, note=marks)
