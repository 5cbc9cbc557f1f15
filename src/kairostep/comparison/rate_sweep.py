"""Which learning rate: short runs at rates in geometric steps, and the held-out loss at the end of each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kairostep.comparison.arms import Arm
from kairostep.comparison.conduct import Work
from kairostep.comparison.plan import Plan, config_of
from kairostep.comparison.records import read_record

ARM = "sweep"
CLOSE = 0.005  # of the lowest loss: rates that end within it are as good


@dataclass(frozen=True)
class RateSweep:
    """The held-out loss at the end of a run at each rate, None where it diverged."""

    losses: Mapping[float, float | None]
    steps: int

    @property
    def best(self) -> float:
        """The rate with the lowest loss."""
        known = {rate: loss for rate, loss in self.losses.items() if loss is not None}
        if not known:
            raise ValueError(
                f"a rate must train to the end, got none of {', '.join(f'{rate:g}' for rate in self.losses)}: "
                "pass a smaller --to"
            )
        return min(known, key=known.__getitem__)

    def verdict(self) -> str:
        """Return the suggestion in a sentence, and what keeps it from being final."""
        lowest = self.losses[self.best]
        assert lowest is not None
        alike = [rate for rate, loss in self.losses.items() if loss is not None and loss <= lowest * (1 + CLOSE)]
        text = f"--learning_rate={self.best:g}: the lowest held-out loss after {self.steps} steps, {lowest:.5g}"
        if len(alike) > 1:
            text += f"; {', '.join(f'{rate:g}' for rate in alike)} end within {100 * CLOSE:g} % of it"
        if self.best == max(self.losses):
            text += "; it is the largest rate tried: try larger ones"
        elif self.best == min(self.losses):
            text += "; it is the smallest rate tried: try smaller ones"
        return text


def geometric_rates(low: float, high: float, factor: float = 2.0) -> tuple[float, ...]:
    """Return rates from `low` to `high`, each `factor` times the one before."""
    if not (0 < low <= high < 1e3 and factor > 1):
        raise ValueError(
            f"rates must rise from above 0 by a factor above 1, got {low:g} to {high:g} by {factor:g}: "
            "pass for instance --from 1e-4 --to 1e-2"
        )
    num = math.floor(math.log(high / low) / math.log(factor) + 1e-9) + 1
    return tuple(float(f"{low * factor**k:.6g}") for k in range(num))


def plan_sweep(output: Path, name: str | Path, settings: Sequence[str], rates: Sequence[float], seed: int) -> Plan:
    """Return the runs of a sweep: one for each rate, with one seed, in the folders of a comparison of one arm."""
    arm = Arm(ARM, ())
    return Plan(output, [arm], ARM, (seed,), tuple(rates), {ARM: config_of(name, arm, settings)})


def sweep_rates(plan: Plan, work: Work) -> RateSweep:
    """Train the runs that are not there yet, and return how each ended."""
    work.train(plan.runs(ARM, plan.seeds[0]))
    losses = {}
    for run in plan.runs(ARM, plan.seeds[0]):
        record = read_record(run)
        losses[run.rate] = None if record is None else record.final("loss")
    return RateSweep(losses, plan.configs[ARM].steps)
