"""Thins a long series without losing a spike."""

from array import array
from collections.abc import Sequence

NUM_BUCKETS = 200


def select_points(values: "array[float]", num_buckets: int = NUM_BUCKETS) -> list[int]:
    """Return the indices of the points to draw: first, last, and the lowest and highest of each equal bucket."""
    n = len(values)
    if n <= 2 * num_buckets:
        return list(range(n))
    kept = {0, n - 1}
    for bucket in range(num_buckets):
        start = bucket * n // num_buckets
        part = values[start : (bucket + 1) * n // num_buckets]
        kept |= {start + part.index(min(part)), start + part.index(max(part))}
    return sorted(kept)


def select_rows(rows: Sequence[Sequence[float]], num_rows: int) -> list[int]:
    """Return the indices of the histograms to draw: first, last, and one of each equal bucket.

    Of each bucket, it is the histogram that differs most from the one selected before.
    """
    n = len(rows)
    if n <= num_rows:
        return list(range(n))
    kept = [0]
    for bucket in range(num_rows - 2):
        start, end = (1 + (bucket + i) * (n - 2) // (num_rows - 2) for i in range(2))
        before = rows[kept[-1]]
        kept.append(max(range(start, end), key=lambda row: _distance(rows[row], before)))
    return [*kept, n - 1]


def _distance(row: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(row, other, strict=False))
