"""A text table of runs."""

from collections.abc import Sequence
from pathlib import Path

from kairostep.runs.history import RunHistory

COLUMNS = ("run", "sampler", "weighting", "held-out loss", "held-out bound", "evaluations", "seconds")


def comparison_table(directories: Sequence[Path]) -> str:
    """Return one line per run: its last held-out losses with standard errors, and its total cost.

    `evaluations` are network evaluations of training plus those of the sampler's probes.
    """
    rows = [COLUMNS, *(_row(_read(directory)) for directory in directories)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _read(directory: Path) -> RunHistory:
    """Return the run in a directory. Raise ValueError if there is none."""
    directory = directory.absolute()  # so that "." has a name too
    run = RunHistory.read(directory)
    if not run.config:
        raise ValueError(
            f"a run directory must hold config.yaml, got {directory} ({run.problems[0]}): name one that `train` made"
        )
    return run


def _row(run: RunHistory) -> tuple[str, ...]:
    held_out = run.held_out[-1] if run.held_out else None
    trained, probes, seconds = (
        run.spent(name) or 0 for name in ("training_evaluations", "probe_evaluations", "seconds")
    )
    return (
        run.directory.name,
        run.part("sampler"),
        run.part("weighting"),
        _with_error(held_out.loss, held_out.loss_error) if held_out else "-",
        _with_error(held_out.vlb, held_out.vlb_error) if held_out else "-",
        f"{trained:,.0f}" + (f" + {probes:,.0f}" if probes else ""),
        f"{seconds:.0f}",
    )


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.5f}" + ("" if error is None else f" ± {error:.5f}")
