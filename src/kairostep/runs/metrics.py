"""Reads `metrics.jsonl` by columns, however long or damaged it is."""

import json
import math
import operator
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from kairostep.bounded_files import Unreadable, line_chunks
from kairostep.runs.thinning import select_points, select_rows

# Limits on what is read, since files can come from anybody
MAX_BYTES = 500_000_000  # of metrics.jsonl, about a million lines
MAX_BRACKETS = 100  # in a line, which also limits its depth; six are usual
MAX_SERIES = 500  # names of numbers
MAX_BINS = 1000  # of a histogram
SHORT = 8  # a list of at most this length is a number each, such as losses by quartile; a longer one is a histogram

HISTOGRAMS = ("density", "weights")  # over t
NUM_HISTOGRAMS = 120  # that a report draws of one training


@dataclass
class Series:
    """A number over the steps of a training."""

    steps: "array[float]" = field(default_factory=lambda: array("d"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def extend(self, steps: "array[float]", values: "array[float]") -> None:
        """Add points. A point of an earlier step comes from a run that resumed there: it replaces all later points."""
        if rising(self.steps[-1:] + steps):
            self.steps += steps
            self.values += values
            return
        for step, value in zip(steps, values, strict=True):
            while self.steps and self.steps[-1] >= step:
                self.steps.pop()
                self.values.pop()
            self.steps.append(step)
            self.values.append(value)

    def thin(self) -> "Series":
        """Return the points to draw."""
        kept = select_points(self.values)
        return Series(array("d", (self.steps[i] for i in kept)), array("d", (self.values[i] for i in kept)))

    def at(self, step: float) -> float | None:
        """Return the value at a step, interpolated linearly; None outside the steps."""
        steps, low, high = self.steps, 0, len(self.steps) - 1
        if not steps or not steps[0] <= step <= steps[-1]:
            return None
        while low < high:  # bisect for the first point at or after the step
            middle = (low + high) // 2
            low, high = (middle + 1, high) if steps[middle] < step else (low, middle)
        if steps[low] == step:
            return self.values[low]
        share = (step - steps[low - 1]) / (steps[low] - steps[low - 1])
        return self.values[low - 1] + share * (self.values[low] - self.values[low - 1])


@dataclass
class Histograms:
    """A histogram of t over the steps of a training."""

    steps: list[float] = field(default_factory=list)
    rows: list["array[float]"] = field(default_factory=list)

    def append(self, step: float, row: "array[float]") -> None:
        """Add a histogram, as `Series` adds a point. If the number of bins changes, drop the earlier ones."""
        if self.rows and len(self.rows[-1]) != len(row):
            self.steps, self.rows = [], []
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.rows.pop()
        self.steps.append(step)
        self.rows.append(row)

    def thin(self) -> "Histograms":
        """Return the histograms to draw."""
        kept = select_rows(self.rows, NUM_HISTOGRAMS)
        return Histograms([self.steps[i] for i in kept], [self.rows[i] for i in kept])


def product(density: Histograms, weights: Histograms) -> Histograms:
    """Return density times weight, scaled to sum to 1, at the steps where both were recorded."""
    found, weights_at = Histograms(), dict(zip(weights.steps, weights.rows, strict=True))
    for step, masses in zip(density.steps, density.rows, strict=True):
        values = array("d", map(operator.mul, masses, weights_at.get(step, [])))
        total = math.fsum(values)
        if len(values) == len(masses) and 0 < total < math.inf:
            found.append(step, array("d", (value / total for value in values)))
    return found


@dataclass
class Metrics:
    """What a run measured: series by name, nested names joined by a slash, and histograms."""

    series: dict[str, Series] = field(default_factory=dict)
    histograms: dict[str, Histograms] = field(default_factory=dict)
    last_step: float | None = None
    problems: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Metrics":
        """Return the metrics of a file. Unreadable lines are left out and counted in `problems`."""
        metrics, num_bad, torn = cls(), 0, False
        try:
            for texts in line_chunks(path, MAX_BYTES):
                lines = _parse_lines(texts)
                good = [line for line in lines if line is not None and number(line.get("step")) is not None]
                num_bad += sum(1 for text in texts if text.strip()) - len(good)
                torn = not good or lines[-1] is not good[-1]
                metrics.add(good)
            if path.stat().st_size > MAX_BYTES:
                metrics.problems.append(f"{path.name} is read up to {MAX_BYTES:,} bytes, the rest is left out")
        except FileNotFoundError:
            pass
        except (OSError, Unreadable) as error:
            metrics.problems.append(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}")
        if num_bad:
            what = "the last line" if num_bad == 1 and torn else f"{num_bad} line{'s' * (num_bad > 1)}"
            are = "is" if num_bad == 1 else "are"
            metrics.problems.append(f"{what} of {path.name} cannot be read and {are} left out")
        return metrics

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add lines, each with a step."""
        if not lines:
            return
        steps = array("d", [float(line["step"]) for line in lines])
        self.last_step = steps[-1]
        for name, values in _columns(lines):
            if name in HISTOGRAMS:
                self._add_histograms(name, steps, values)
            else:
                self._add_numbers(name, steps, values)

    def thin(self) -> "Metrics":
        """Return what reports plot, including the product of density and weights."""
        density, weights = (self.histograms.get(name, Histograms()) for name in HISTOGRAMS)
        drawn = {"density": density, "product": product(density, weights)}
        return Metrics(
            {name: series.thin() for name, series in self.series.items()},
            {name: histograms.thin() for name, histograms in drawn.items()},
            self.last_step,
        )

    def get(self, name: str) -> Series:
        """Return a series, empty if nothing was recorded."""
        return self.series.get(name) or Series()

    def _add_numbers(self, name: str, steps: "array[float]", values: Sequence[Any]) -> None:
        if name not in self.series and len(self.series) >= MAX_SERIES:
            return
        if all_numbers(values):
            self.series.setdefault(name, Series()).extend(steps, array("d", values))
            return
        known = [(step, value) for step, value in zip(steps, map(number, values), strict=True) if value is not None]
        if known:
            pairs = (array("d", [pair[i] for pair in known]) for i in range(2))
            self.series.setdefault(name, Series()).extend(*pairs)

    def _add_histograms(self, name: str, steps: "array[float]", values: Sequence[Any]) -> None:
        for step, value in zip(steps, values, strict=True):
            row = [number(mass) for mass in value] if isinstance(value, list) and 0 < len(value) <= MAX_BINS else [None]
            if None not in row:
                masses = array("d", [mass or 0.0 for mass in row])
                self.histograms.setdefault(name, Histograms()).append(step, masses)


def all_numbers(values: Sequence[Any]) -> bool:
    """Whether all values are finite numbers, faster than `number` of each."""
    try:
        return set(map(type, values)) <= {float, int} and all(map(math.isfinite, values))
    except OverflowError:  # an integer that no float can hold
        return False


def rising(values: "array[float]") -> bool:
    """Whether each value is greater than the one before it."""
    return all(map(operator.lt, values, values[1:]))


def parse_line(text: str) -> dict[str, Any] | None:
    """Return the mapping in a line of JSON, or None if the line is torn or holds something else."""
    if _num_brackets(text) > MAX_BRACKETS:
        return None
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if type(line) is dict else None


def number(value: Any) -> float | None:
    """Return a finite number, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that no float can hold
        return None


def _parse_lines(texts: Sequence[str]) -> list[dict[str, Any] | None]:
    """Return the content of each line, None for unreadable lines. Parses all lines at once if possible."""
    try:
        flat = max(map(_num_brackets, texts)) <= MAX_BRACKETS
        lines = json.loads(f"[{','.join(texts)}]") if flat else []
    except (ValueError, RecursionError):
        lines = []
    if len(lines) == len(texts) and set(map(type, lines)) == {dict}:  # no line is torn
        whole: list[dict[str, Any] | None] = lines
        return whole
    return [parse_line(text) for text in texts]


def _num_brackets(text: str) -> int:
    return text.count("[") + text.count("{")


def _columns(lines: Sequence[Mapping[str, Any]], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield each name with its values in all lines, None where a line lacks it."""
    for key in dict.fromkeys(chain.from_iterable(lines)):
        values = [line.get(key) for line in lines]
        kinds = set(map(type, values))
        if key in HISTOGRAMS and not prefix:
            yield key, values
        elif dict in kinds:
            if not prefix:
                parts = [value if type(value) is dict else {} for value in values]
                yield from _columns(parts, f"{key}/")
        elif list in kinds:
            rows = [value if type(value) is list and len(value) <= SHORT else [] for value in values]
            for i in range(max(map(len, rows))):
                yield f"{prefix}{key}/{i}", [row[i] if i < len(row) else None for row in rows]
        else:
            yield prefix + key, values
