"""Which learning rate: short runs at rates in geometric steps, and the held-out loss at the end of each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kairostep.comparison.arms import Arm
from kairostep.comparison.conduct import mark_diverged, train_run
from kairostep.comparison.plan import UNWEIGHTED, WEIGHTED, Plan, PlannedRun, is_weighted
from kairostep.comparison.records import LABELS, read_record
from kairostep.experiments import Config, build
from kairostep.experiments.config import differences, load, with_overrides
from kairostep.experiments.experiment import fill_defaults
from kairostep.progress_meter import duration
from kairostep.runs.metrics import parse_line

ARM = "sweep"
SHARE_OF_RUN, LEAST_STEPS, MOST_STEPS = 10, 100, 3000  # a run takes a tenth of the steps of a full one, in these bounds
NUM_LOG_LINES = 20  # of a run; a loss that is no longer finite is noticed at the next one
MEASURED = ("steps", "held_out_images")  # losses of other steps or images do not compare
CLOSE = 0.005  # of the lowest loss: rates that end within it are as good
MAX_FURTHER = 3  # rates beyond the largest of a sweep


@dataclass(frozen=True)
class RateSweep:
    """The held-out loss at the end of a run at each rate, weighted as the run weights it; None where it diverged."""

    losses: Mapping[float, float | None]
    steps: int
    loss_name: str = LABELS[UNWEIGHTED]  # in words

    @property
    def best(self) -> float:
        """The rate with the lowest loss."""
        known = {rate: loss for rate, loss in self.losses.items() if loss is not None}
        if not known:
            raise ValueError(
                f"a rate must train to the end, got none of {', '.join(f'{rate:g}' for rate in self.losses)}: "
                "pass a smaller --from"
            )
        return min(known, key=known.__getitem__)

    @property
    def suggested(self) -> float:
        """The smallest rate that ends about as low: rates that suit a short run may be too large for a long one."""
        lowest = self.losses[self.best]
        assert lowest is not None
        return min(rate for rate, loss in self.losses.items() if loss is not None and loss <= lowest * (1 + CLOSE))

    def verdict(self) -> str:
        """Return the suggestion in a sentence, and what keeps it from being final."""
        lowest = self.losses[self.best]
        choice = f"--learning_rate={self.suggested:g}: "
        if len(self.losses) == 1:
            return (
                f"{choice}the {self.loss_name} after {self.steps} steps is {lowest:.5g}; it is the only rate tried: "
                "pass --from and --to to try others"
            )
        ending = f"the lowest {self.loss_name} after {self.steps} steps, {lowest:.5g}"
        if self.suggested == self.best:
            text = choice + ending
        else:
            text = f"{choice}the smallest rate within {100 * CLOSE:g} % of {ending} at {self.best:g}"
        if self.best == max(self.losses):
            text += f"; {self.best:g} is the largest rate tried: pass a larger --to"
        elif self.suggested == min(self.losses):
            text += f"; {self.suggested:g} is the smallest rate tried: pass a smaller --from"
        return text


def geometric_rates(low: float, high: float, factor: float = 2.0) -> tuple[float, ...]:
    """Return rates from `low` to `high`, each `factor` times the one before."""
    if not (0 < low <= high < 1e3 and factor > 1):
        raise ValueError(
            f"rates must rise from above 0 by a factor above 1, got {low:g} to {high:g} by {factor:g}: "
            "pass for instance --from 1e-4 --to 1e-2 --factor 2"
        )
    num = math.floor(math.log(high / low) / math.log(factor) + 1e-9) + 1
    return tuple(float(f"{low * factor**k:.6g}") for k in range(num))


def further_rates(rates: Sequence[float], factor: float) -> tuple[float, ...]:
    """Return the rates that follow the largest, for a sweep in which that one ends best."""
    return tuple(float(f"{rates[-1] * factor**k:.6g}") for k in range(1, MAX_FURTHER + 1))


def plan_sweep(output: Path, base: Config, settings: Sequence[str], rates: Sequence[float]) -> Plan:
    """Return the runs of a sweep: one for each rate, with one seed, in the folders of a comparison of one arm.

    Args:
        output: The folder of the sweep.
        base: A preset, or the config of a file. Unless the settings say otherwise, runs take fewer steps, have no
            warm-up, and measure no more than the held-out loss at the end.
        settings: As on the command line.
        rates: To try.

    Raises:
        ValueError: A run could not be trained, or would measure no held-out loss. Nothing has been written then.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    experiment = build(short_run(base, settings), device)
    config = experiment.config  # with all defaults, also those that depend on the data
    if experiment.held_out is None:
        needed = "data with a test part, or a folder of 50 images or more with --data.held_out=0.02"
        fix = needed if config.held_out_images else "--held_out_images=1024"
        raise ValueError(f"rates are compared by the loss of held-out images, got none: pass {fix}")
    return Plan(output, [Arm(ARM, ())], ARM, (config.seed,), tuple(rates), {ARM: config})


def short_run(base: Config, settings: Sequence[str]) -> Config:
    """Return the config of a run of the sweep, before its rate."""
    steps = min(MOST_STEPS, max(LEAST_STEPS, base.steps // SHARE_OF_RUN))
    short = replace(base, steps=steps, warmup_steps=0, keep_checkpoints=1, sample_every=0, fid_every=0, keep_every=0)
    steps = with_overrides(short, settings).steps
    return with_overrides(replace(short, evaluate_every=steps, log_every=-(-steps // NUM_LOG_LINES)), settings)


def check_folder(plan: Plan) -> None:
    """Raise ValueError, with what differs, if the folder of a sweep holds runs with other settings than its own."""
    for path in sorted((plan.output / "runs" / ARM).glob("rate-*/seed-*/config.yaml")):
        stored = fill_defaults(load(path))  # options newer than the file get their default
        asked = plan.run(ARM, stored.seed, stored.learning_rate).config
        measured = [(key, getattr(stored, key), getattr(asked, key)) for key in MEASURED]
        changed = [*differences(stored, asked), *(f"{key}: {old} -> {new}" for key, old, new in measured if old != new)]
        if changed:
            raise ValueError(
                f"{plan.output} holds another sweep ({'; '.join(dict.fromkeys(changed))}): pass the same settings to "
                "go on with it, or another --output"
            )


def sweep_rates(plan: Plan, further: Sequence[float] = ()) -> RateSweep:
    """Train the runs that are not there yet, and return how each ended.

    Args:
        plan: With the rates to try.
        further: Rates to try after them, one by one, while the largest so far ends best.
    """
    config = plan.configs[ARM]
    losses = {run.rate: train_for_loss(run) for run in plan.runs(ARM, plan.seeds[0])}
    for rate in further:
        if RateSweep(losses, config.steps).best != max(losses):
            break
        losses[rate] = train_for_loss(plan.run(ARM, plan.seeds[0], rate))
    return RateSweep(losses, config.steps, loss_name(config))


def train_for_loss(run: PlannedRun) -> float | None:
    """Train a run unless it is there, print a line, and return its final held-out loss, None if it diverged."""
    loss = final_loss(run)
    if loss is not None or run.diverged:
        return loss
    took = duration(train_run(run, measure_only=True))
    loss = final_loss(run)
    if loss is None and not run.diverged:
        metrics, steps = run.directory / "metrics.jsonl", run.config.steps
        lines = filter(None, map(parse_line, metrics.read_text().splitlines()))
        measured = [line["held_out"] for line in lines if line.get("step") == steps and "held_out" in line]
        if not any(metric_of(run.config) in held_out for held_out in measured):
            raise ValueError(
                f"a run must hold the {loss_name(run.config)} of its last step, got none in {metrics}: "
                f"remove {run.directory} to train it again"
            )
        mark_diverged(run, steps, f"the {loss_name(run.config)} is no longer finite at step {steps}")
    ended = "diverged" if loss is None else f"{loss_name(run.config)} {loss:.5g}"
    print(f"learning rate {run.rate:g}: {ended}, {took}", flush=True)
    return loss


def final_loss(run: PlannedRun) -> float | None:
    """Return the held-out loss of a run at its last step, None if it did not get there or is not finite."""
    record = None if run.diverged else read_record(run)
    return None if record is None else record.values.get(metric_of(run.config), {}).get(run.config.steps)


def metric_of(config: Config) -> str:
    """Return the metric that rates are compared by: what is trained."""
    return WEIGHTED if is_weighted(config) else UNWEIGHTED


def loss_name(config: Config) -> str:
    """Return that metric in words."""
    return LABELS[metric_of(config)]
