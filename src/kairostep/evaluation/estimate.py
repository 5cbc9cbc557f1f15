"""A number and how far it can be trusted."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its standard error, NaN where none can be had."""

    value: float
    error: float


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Return the mean of values (N,) and its standard error, as if the values were independent."""
    return float(values.mean()), float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan
