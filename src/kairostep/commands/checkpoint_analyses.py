"""`kairostep analyse gradient-variance | interdependence`: measurements on the checkpoints of a run."""

import argparse
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kairostep.analysis import RangeTraining, Rows, VarianceProfile, range_effects, variance_profile
from kairostep.analysis.panels import interdependence_panels, variance_panels
from kairostep.analysis.table import (
    columns,
    interdependence_table,
    interdependence_verdict,
    variance_table,
    variance_verdict,
)
from kairostep.checks import count
from kairostep.commands.output import check_output, write_in_run, write_output
from kairostep.commands.run_or_preset import RunOrPreset, Train, train_if_preset
from kairostep.data import Dataset
from kairostep.experiments import Config
from kairostep.experiments.experiment import load_data
from kairostep.plots import Panel
from kairostep.progress_meter import ProgressMeter
from kairostep.runs import Checkpoints, Trained, load_trained
from kairostep.runs.checkpoint import read
from kairostep.runs.trained import find_checkpoint

NUM_ROWS = 4096  # rows of the training set that the analyses draw from


@dataclass(frozen=True)
class Study:
    """A run under analysis and its data."""

    known: argparse.Namespace
    chosen: RunOrPreset
    directory: Path
    device: torch.device
    train: Dataset
    held_out: Dataset | None

    @classmethod
    def of(cls, known: argparse.Namespace, settings: Sequence[str], train: Train) -> "Study":
        """Return the study of a run, or of a preset, which it trains first."""
        chosen = train_if_preset(settings, known.directory, train)
        assert chosen.directory is not None
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(known, chosen, chosen.directory, device, *load_data(chosen.config, device))

    @property
    def config(self) -> Config:
        """The run's config."""
        return self.chosen.config

    @property
    def heading(self) -> str:
        """One line on what is analysed."""
        return f"{self.directory}, weights {self.known.weights}, on {self.device}"

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that were asked for: one, or all in order."""
        paths = [find_checkpoint(self.directory, self.known.checkpoint or "last")]
        if self.known.checkpoint is None:
            paths = Checkpoints(self.directory / "checkpoints", keep=1).paths()
        return [int(path.stem.removeprefix("step-")) for path in paths]

    def load(self, step: int) -> Trained:
        """Return the model of a checkpoint, with gradients."""
        trained = load_trained(self.directory, step, self.known.weights, self.device)
        trained.model.requires_grad_()
        return trained

    def rows(self, dataset: Dataset, num: int) -> Rows:
        """Return rows spread evenly over a data set."""
        return Rows.of(dataset, num, self.device, classes=self.config.label_dropout is not None)

    def write(self, analysis: str, sizes: Mapping[str, Any], result: Any, how: str, panels: Sequence[Panel]) -> None:
        """Write the result into the run directory, and to --output."""
        own = {"weights": self.known.weights, "seeds": [self.known.measure_seed], "sizes": sizes}
        facts = {**self.chosen.facts(self.known.typed, self.device), **own}
        write_in_run(self.directory, analysis, facts, result)
        self.known.kept = f"the result is in {self.directory / 'analysis'}, but not all of --output was written"
        title = f"{analysis}: {self.directory}"
        write_output(self.known.output, analysis, facts, result, title=title, how_to_read=how, panels=panels)


def analyse_gradient_variance(known: argparse.Namespace, settings: Sequence[str], train: Train) -> None:
    """Measure the variance of gradients at the checkpoints of a run."""
    check_output(known.output)
    count("timesteps", known.timesteps, at_least=5, at_most=10**6, example=20)  # one of them early, one late
    sizes = {
        "num_pairs": count("repeats", known.repeats, at_least=2, at_most=10**6, example=32),
        "rows_per_gradient": count("rows", known.rows, at_most=10**6, example=16),
    }
    count("measure_seed", known.measure_seed, at_least=0, at_most=2**63 - 1)
    study = Study.of(known, settings, train)
    rows = study.rows(study.train, NUM_ROWS)
    times = [(k + 0.5) / known.timesteps for k in range(known.timesteps)]
    profiles = {}
    for step in study.steps():
        trained, evaluations = study.load(step), len(times) * 2 * known.repeats * known.rows
        given: dict[str, Any] = {**sizes, "times": times, "seed": known.measure_seed}
        meter = ProgressMeter(evaluations, f"gradients at step {step}", unit="row")
        with meter, meter.watching(trained.model):
            profiles[step] = variance_profile(trained.model, trained.objective, rows, **given)
    print(f"{study.heading}, rows drawn from {len(rows.x0)} of the training set")
    verdicts = tell_variance(profiles)
    ratios = {step: {"simple": p.early_to_late(), "vlb": p.early_to_late(bound=True)} for step, p in profiles.items()}
    result = {"early_to_late": ratios, "verdicts": verdicts, "checkpoints": profiles}
    how = "Trace of the covariance of a single row's gradient over x0 and noise, at each checkpoint."
    study.write("gradient-variance", {**sizes, "rows": len(rows.x0)}, result, how, variance_panels(profiles))


def tell_variance(profiles: Mapping[int, VarianceProfile]) -> list[str]:
    """Print the variance at the last checkpoint, then early against late times at all; return the last's verdicts."""
    step, last = list(profiles.items())[-1]
    print(f"at step {step}: trace of the covariance of a single row's gradient over x0 and noise, ± standard error;")
    print("L_VLB is c_t L_simple, so that its variance has the factor c_t**2; rows for signal: variance / |mean|**2\n")
    print(variance_table(last))
    lines, verdicts = [], []
    for number, profile in profiles.items():
        ratios = {"L_simple": profile.early_to_late(), "L_VLB": profile.early_to_late(bound=True)}
        lines.append([str(number), *(f"{r.value:.4g} ({r.low:.4g}..{r.high:.4g})" for r in ratios.values())])
        if number == step:
            verdicts = [
                variance_verdict(f"step {step}, {name}", ratio, claimed=name == "L_simple")
                for name, ratio in ratios.items()
            ]
    print("\nvariance at t < 0.2 over that at t >= 0.8; 95 % intervals over rows and noise, for this one training\n")
    print(columns(["step", "L_simple", "L_VLB"], lines))
    print("\n" + "\n".join(verdicts))
    return verdicts


def analyse_interdependence(known: argparse.Namespace, settings: Sequence[str], train: Train) -> None:
    """Train on each range of times alone and measure the loss at all times."""
    check_output(known.output)
    count("ranges", known.ranges, at_most=10**3, example=5)
    count("parts", known.parts, at_most=10**5, example=20)
    count("range_steps", known.range_steps, example=100)
    count("measure_seed", known.measure_seed, at_least=0, at_most=2**63 - 1)
    study = Study.of(known, settings, train)
    (step,) = study.steps()
    trained, config = study.load(step), study.config
    training = RangeTraining(
        num_steps=known.range_steps,
        batch_size=config.batch_size,
        max_grad_norm=config.max_grad_norm,
        seed=known.measure_seed,
    )
    rows = study.rows(study.train, NUM_ROWS)
    held_out = rows if study.held_out is None else study.rows(study.held_out, config.held_out_images)
    sizes = {"num_ranges": known.ranges, "num_parts": known.parts}
    given: dict[str, Any] = {**sizes, "training": training}
    make_optimizer = partial(optimizer_of, config, read(trained.checkpoint)["trainer"]["optimizer"])
    trained_on = (known.ranges + 1) * known.range_steps * config.batch_size
    meter = ProgressMeter(trained_on + (known.ranges + 2) * known.parts * len(held_out.x0), "ranges", unit="row")
    with meter, meter.watching(trained.model):
        effects = range_effects(
            trained.model, trained.objective, rows, held_out, **given, make_optimizer=make_optimizer
        )
    seen = "training" if study.held_out is None else "held-out"
    print(f"{study.heading}, step {step}: change of the squared error on {len(held_out.x0)} {seen} rows, in percent,")
    print(f"by {known.range_steps} more steps on one range of t alone, the first on all of it; noise is shared,")
    print(f"and the learning rate is {config.learning_rate:g}, without warm-up or decay\n")
    print(interdependence_table(effects))
    verdicts = [interdependence_verdict(effect) for effect in effects.effects]
    print("\n" + "\n".join(verdicts) + "\n(± 95 % over rows, for this one training)")
    result = {"step": step, "training": training, "verdicts": verdicts, "effects": effects, "matrix": effects.matrix}
    how = "Each curve: what training on one range of t alone did to the loss at all times."
    study.write("interdependence", sizes, result, how, interdependence_panels(effects))


def optimizer_of(config: Config, state: dict[str, Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that a run had at a checkpoint, with its moments; at its rate before any decay."""
    made = (torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW)(parameters)
    made.load_state_dict(deepcopy(state))
    for group in made.param_groups:
        group["lr"] = config.learning_rate  # that of a cosine is about 0 at the end, which would train nothing
    return made
