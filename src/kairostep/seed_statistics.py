"""Statistics of arms paired by seed: ratios to a baseline with intervals, and the cost to reach a value.

These are pure functions of numbers. Both `report` and `compare` use them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

LEVEL = 0.95  # of all intervals
SAME = 1e-9  # an interval of less relative width counts as a point
PRECISION = 1e-12  # relative, of quantiles


@dataclass(frozen=True)
class Spread:
    """A mean over seeds, half the width of its 95 % interval, and the standard deviation; both None for one seed."""

    mean: float
    half_width: float | None
    deviation: float | None


@dataclass(frozen=True)
class Ratio:
    """A value or cost of one run over that of the baseline with the same seed.

    Args:
        value: The ratio.
        reached: False if the run ended before it reached the target. The true ratio is then larger.
    """

    value: float
    reached: bool = True

    def __str__(self) -> str:
        return f"{'' if self.reached else '> '}{self.value:.3f}"


@dataclass(frozen=True)
class PairedRatio:
    """The ratios of an arm to the baseline, one for each shared seed: at least one, all above 0."""

    by_seed: Mapping[int, Ratio]

    @property
    def spread(self) -> Spread:
        """Mean and interval of the logarithms."""
        return spread_of([math.log(ratio.value) for ratio in self.by_seed.values()])

    @property
    def mean(self) -> float:
        """The geometric mean over seeds."""
        return math.exp(self.spread.mean)

    @property
    def num_reached(self) -> int:
        """How many runs reached the target."""
        return sum(ratio.reached for ratio in self.by_seed.values())

    @property
    def reached(self) -> bool:
        """Whether all runs reached the target. Otherwise there is no interval."""
        return self.num_reached == len(self.by_seed)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval; None for one seed, or if a run did not reach the target."""
        spread = self.spread
        if spread.half_width is None or not self.reached:
            return None
        return math.exp(spread.mean - spread.half_width), math.exp(spread.mean + spread.half_width)

    @property
    def decided(self) -> int:
        """-1 if the whole interval is below 1, 1 if it is above 1, otherwise 0. One seed decides nothing."""
        if self.interval is None:
            return 0
        low, high = self.interval
        return -1 if high < 1 else 1 if low > 1 else 0

    def __str__(self) -> str:
        if not self.reached:
            return f"> {self.mean:.2f} ({self.num_reached} of {len(self.by_seed)})"
        if self.interval is None:
            return f"{self.mean:.3f} (one seed)"
        low, high = self.interval
        if high - low < SAME * self.mean:
            return f"{self.mean:.4g}"
        digits = _digits(high - low)
        return f"{self.mean:.{digits}f} ({low:.{digits}f}\u2013{high:.{digits}f})"


def _digits(width: float) -> int:
    """Return how many digits after the point keep the two ends of an interval of this width apart."""
    return next((digits for digits in (2, 3, 4) if width >= 2 * 10.0**-digits), 4)


def paired_ratio(values: Mapping[int, float], baseline: Mapping[int, float]) -> PairedRatio | None:
    """Return the ratios over the shared seeds, None if there are none. Values must be above 0; others are left out."""
    shared = [seed for seed in values if seed in baseline]
    usable = [seed for seed in shared if _is_positive(values[seed]) and _is_positive(baseline[seed])]
    ratios = {seed: values[seed] / baseline[seed] for seed in usable}
    found = {seed: Ratio(ratio) for seed, ratio in ratios.items() if _is_positive(ratio)}
    return PairedRatio(found) if found else None


def ratio_text(ratio: PairedRatio) -> str:
    """Return a ratio where it stands beside the number of seeds."""
    return f"{ratio.mean:.3f}" if len(ratio.by_seed) == 1 and ratio.reached else str(ratio)


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


def spread_of(values: Sequence[float]) -> Spread:
    """Return the mean of at least one value, with its interval by Student's t."""
    n, mean = len(values), math.fsum(values) / len(values)
    if n == 1:
        return Spread(mean, None, None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return Spread(mean, student_quantile(n - 1) * deviation / math.sqrt(n), deviation)


@cache
def student_quantile(degrees: int, level: float = LEVEL) -> float:
    """Return the t such that [-t, t] has probability `level` under Student's distribution."""
    low, high = 0.0, 1.0
    while student_within(high, degrees) < level:
        low, high = high, 2 * high
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_within(middle, degrees) < level else (low, middle)
    return high


def student_within(t: float, degrees: int) -> float:
    """Return the probability of [-t, t] by Abramowitz and Stegun (1964), equations 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2
    total, term = 0.0, cosine if is_odd else 1.0
    for k in range(1 + is_odd, degrees, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def cost_to_reach(costs: Sequence[float], values: Sequence[float], target: float) -> float | None:
    """Return the cost at which a falling value first reaches the target, None if it never does.

    Between two measurements, the logarithm of the value is interpolated linearly in the cost. There is no
    interpolation at the first measurement and to a value of 0 or less; the cost of that measurement is returned then.
    """
    before: tuple[float, float] | None = None
    for cost, value in zip(costs, values, strict=True):
        if value <= target:
            return cost if before is None else _between(before, (cost, value), target)
        before = (cost, value)
    return None


def _between(before: tuple[float, float], after: tuple[float, float], target: float) -> float:
    if after[1] <= 0:  # KID can be below 0
        return after[0]
    share = math.log(before[1] / target) / math.log(before[1] / after[1])
    return before[0] + share * (after[0] - before[0])


def cost_ratio(
    curve: tuple[Sequence[float], Sequence[float]], baseline: tuple[Sequence[float], Sequence[float]], target: float
) -> Ratio | None:
    """Return a run's cost to reach a target over the baseline's.

    Args:
        curve: Costs and values of the run, at its measurements.
        baseline: Costs and values of the baseline's run.
        target: The value to reach.

    Returns:
        None where the baseline never gets there, or costs are not above 0. A run that does not get there is told to
        need more than all it has spent.
    """
    own = cost_to_reach(*baseline, target)
    if not own or not curve[0]:
        return None
    found = cost_to_reach(*curve, target)
    ratio = (curve[0][-1] if found is None else found) / own
    return Ratio(ratio, found is not None) if _is_positive(ratio) else None
