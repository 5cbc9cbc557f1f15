"""Measurements, as a table for people and as lines of `evaluations.jsonl`."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kairostep.evaluation.estimate import Estimate

MAX_DIGITS = 7  # after the point


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    what: str
    estimate: Estimate
    n: int  # images
    facts: Mapping[str, Any] = field(default_factory=dict)  # what else it depends on

    def line(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """Return the line to write: its own settings, then common ones, with None for numbers that are not finite."""
        measured = {"value": self.estimate.value, "standard_error": self.estimate.error, "n": self.n}
        line = {"what": self.what, **measured, **common, **self.facts}
        return {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in line.items()}


def append(path: Path, figures: Iterable[Figure], common: Mapping[str, Any]) -> None:
    """Append one line per measurement, all or none. If the file ends in a torn line, begin a new one."""
    text = "".join(json.dumps(figure.line(common), allow_nan=False) + "\n" for figure in figures)
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = end > 0 and file.read(1) != b"\n"
        file.write((("\n" if torn else "") + text).encode())
        file.flush()
        os.fsync(file.fileno())


def table(figures: Sequence[Figure]) -> str:
    """Return the measurements in columns, rounded to the digits that their errors allow."""
    names = [_name(figure) for figure in figures]
    values = [rounded(figure.estimate) for figure in figures]
    widths = [max(map(len, column), default=0) for column in (names, values)]
    return "\n".join(
        f"{name:{widths[0]}}  {value:>{widths[1]}}  n = {figure.n}"
        for name, value, figure in zip(names, values, figures, strict=True)
    )


def rounded(estimate: Estimate) -> str:
    """Return a value and its error with two digits of the error, `0.1234 ± 0.0056`."""
    if not math.isfinite(estimate.error):
        return f"{estimate.value:.6g} ± ?"
    digits = 6 if estimate.error == 0 else max(0, 1 - math.floor(math.log10(estimate.error)))
    if digits > MAX_DIGITS:
        return f"{estimate.value:.2e} ± {estimate.error:.1e}"
    return f"{estimate.value:.{digits}f} ± {estimate.error:.{digits}f}"


def _name(figure: Figure) -> str:
    if "t" not in figure.facts:
        return figure.what
    start, end = figure.facts["t"]
    return f"{figure.what} t {start:.2f}..{end:.2f}"
