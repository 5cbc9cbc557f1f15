"""Which learning rate: short runs at rates in geometric steps, and the held-out loss at the end of each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kairostep.comparison.arms import Arm
from kairostep.comparison.conduct import train_run
from kairostep.comparison.plan import Plan, PlannedRun, config_of
from kairostep.comparison.records import read_record
from kairostep.progress_meter import duration

ARM = "sweep"
CLOSE = 0.005  # of the lowest loss: rates that end within it are as good
MAX_FURTHER = 3  # rates beyond the largest of a sweep


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


def further_rates(rates: Sequence[float], factor: float) -> tuple[float, ...]:
    """Return the rates that follow the largest, for a sweep in which that one ends best."""
    return tuple(float(f"{rates[-1] * factor**k:.6g}") for k in range(1, MAX_FURTHER + 1))


def plan_sweep(output: Path, name: str | Path, settings: Sequence[str], rates: Sequence[float], seed: int) -> Plan:
    """Return the runs of a sweep: one for each rate, with one seed, in the folders of a comparison of one arm."""
    arm = Arm(ARM, ())
    return Plan(output, [arm], ARM, (seed,), tuple(rates), {ARM: config_of(name, arm, settings)})


def sweep_rates(plan: Plan, further: Sequence[float] = ()) -> RateSweep:
    """Train the runs that are not there yet, and return how each ended.

    Args:
        plan: With the rates to try.
        further: Rates to try after them, one by one, while the largest so far ends best.
    """
    steps = plan.configs[ARM].steps
    losses = {run.rate: train_for_loss(run) for run in plan.runs(ARM, plan.seeds[0])}
    for rate in further:
        if RateSweep(losses, steps).best != max(losses):
            break
        losses[rate] = train_for_loss(plan.run(ARM, plan.seeds[0], rate))
    return RateSweep(losses, steps)


def train_for_loss(run: PlannedRun) -> float | None:
    """Train a run unless it is there, print a line, and return its final held-out loss, None if it diverged."""
    loss = final_loss(run)
    if loss is not None or run.diverged:
        return loss
    took = duration(train_run(run, measure_only=True))
    loss = final_loss(run)
    if loss is None and not run.diverged:
        raise ValueError(
            "rates are compared by the loss of held-out images, got none: pass --data.held_out=0.1, or data with a "
            "test part"
        )
    ended = "diverged" if loss is None else f"held-out loss {loss:.5g}"
    print(f"learning rate {run.rate:g}: {ended}, {took}", flush=True)
    return loss


def final_loss(run: PlannedRun) -> float | None:
    """Return the held-out loss of a run at its last step, None if it did not get there."""
    record = None if run.diverged else read_record(run)
    return None if record is None else record.values.get("loss", {}).get(run.config.steps)
