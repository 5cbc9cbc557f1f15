"""Runs side by side, as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kairostep.reports.metrics_file import number
from kairostep.reports.run_files import RunFiles

COLUMNS = ("run", "sampler", "weighting", "held-out loss", "held-out bound", "evaluations", "seconds")


def comparison_table(directories: Sequence[Path]) -> str:
    """Return one line per run: its held-out losses with standard errors, and all that was spent to get there.

    `evaluations` are network evaluations of training plus those of the sampler's probes.
    """
    rows = [COLUMNS, *(_row(RunFiles.read(directory)) for directory in directories)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _row(run: RunFiles) -> tuple[str, ...]:
    found = run.latest("held_out")
    held_out = found if isinstance(found, dict) else {}
    trained, probes, seconds = (
        number(run.latest(name)) or 0 for name in ("training_evaluations", "probe_evaluations", "seconds")
    )
    evaluations = f"{trained:,.0f}" + (f" + {probes:,.0f}" if probes else "")
    return (
        run.directory.name,
        run.name("sampler"),
        run.name("weighting"),
        _with_error(held_out.get("loss"), held_out.get("loss_error")),
        _with_error(held_out.get("vlb"), held_out.get("vlb_error")),
        evaluations,
        f"{seconds:.0f}",
    )


def _with_error(value: Any, error: Any) -> str:
    value, error = number(value), number(error)
    if value is None:
        return "-"
    return f"{value:.5f}" + ("" if error is None else f" ± {error:.5f}")
