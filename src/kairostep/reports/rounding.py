"""Formats numbers for people."""

import math

MAX_DIGITS = 7  # after the point
MISSING = "\u2013"


def with_error(value: float | None, error: float | None) -> str:
    """Return `0.1234 ± 0.0056`, with two digits of the error; without an error, the value with five digits."""
    if value is None:
        return MISSING
    if error is None or not error > 1e-12 * abs(value):  # smaller errors are those of the arithmetic
        return f"{value:.5g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    if digits > MAX_DIGITS:
        return f"{value:.{MAX_DIGITS}g} ± {error:.1e}"
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def count_text(value: float | None) -> str:
    """Return a count with thousands separators."""
    return MISSING if value is None else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """Return a duration in seconds."""
    return MISSING if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def significant(value: float, digits: int = 6) -> float:
    """Return a number with this many digits, to keep pages small."""
    return float(f"{value:.{digits}g}")
