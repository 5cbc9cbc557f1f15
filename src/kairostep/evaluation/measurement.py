"""One number with its error, and a table of them for people."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kairostep.evaluation.estimate import Estimate

MAX_DIGITS = 7  # after the point


@dataclass(frozen=True)
class Measurement:
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


def table(measurements: Sequence[Measurement]) -> str:
    """Return the measurements in columns, values rounded to what their errors allow."""
    names = [_name(measurement) for measurement in measurements]
    values = [rounded(measurement.estimate) for measurement in measurements]
    widths = [max(map(len, column), default=0) for column in (names, values)]
    return "\n".join(
        f"{name:{widths[0]}}  {value:>{widths[1]}}  n = {measurement.n}"
        for name, value, measurement in zip(names, values, measurements, strict=True)
    )


def rounded(estimate: Estimate) -> str:
    """Return a value and its error with two digits of the error, `0.1234 ± 0.0056`."""
    if not math.isfinite(estimate.error):
        return f"{estimate.value:.6g} ± ?"
    digits = 6 if estimate.error == 0 else max(0, 1 - math.floor(math.log10(estimate.error)))
    if digits > MAX_DIGITS:
        return f"{estimate.value:.2e} ± {estimate.error:.1e}"
    return f"{estimate.value:.{digits}f} ± {estimate.error:.{digits}f}"


def _name(measurement: Measurement) -> str:
    if "t" not in measurement.facts:
        return measurement.what
    start, end = measurement.facts["t"]
    return f"{measurement.what} t {start:.2f}..{end:.2f}"
