"""`kairostep find-lr`: which learning rate for these data, by a short sweep."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kairostep.comparison.plan import Plan
    from kairostep.comparison.rate_sweep import RateSweep

TEXT = """\
Trains a short run at each of several rates and says which one ends with the lowest held-out loss (weighted, if the run
has a weighting), as in

  kairostep find-lr digits
  kairostep find-lr images --data.folder=photos --from 1e-4 --to 3e-3 --steps=2000 --picture rates.png

Settings are --key=value: `kairostep train --help` lists them. Unless you set --steps, a run takes a tenth of the steps
of the preset or the file, but 100 at least and 3000 at most. Unless you set --warmup_steps, it has no warm-up. It
writes metrics and a checkpoint, but no samples. The same command goes on where it was stopped, and may try further
rates. Other settings are another sweep: they need another --output. Rates that suit a short run may be too large for a
long one: try the run's own length if time allows.
"""
PARSER = {
    "help": "find a learning rate by a short sweep",
    "usage": "kairostep find-lr PRESET | --config FILE [--from 1e-4] [--to 1e-2] [--factor 2] [--key=value ...]",
    "description": TEXT,
    "allow_abbrev": False,
}
HIGH = 1e-2  # largest rate at first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that are no settings."""
    add = parser.add_argument
    add("--config", type=Path, help="a YAML file of settings instead of a preset, such as config.yaml of a run")
    add("--from", dest="low", type=float, default=1e-4, help="smallest rate (1e-4)")
    add("--to", dest="high", type=float, help="largest rate (1e-2, and up to three more while the largest is best)")
    add("--factor", type=float, default=2.0, help="from one rate to the next (2)")
    add("--output", type=Path, help="folder of the runs (./rates-NAME)")
    add("--picture", type=Path, metavar="FILE.png", help="also draw the losses over the rates")
    parser.set_defaults(run=run)


def run(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Train at each rate and say which is best."""
    from kairostep.commands.failures import RUN_ERROR, fail
    from kairostep.comparison.rate_sweep import check_folder, further_rates, geometric_rates, plan_sweep, sweep_rates
    from kairostep.experiments import preset
    from kairostep.experiments.command_line import take_preset
    from kairostep.experiments.config import load
    from kairostep.runs.directory import alone_in
    from kairostep.training import RunError

    name, settings = take_preset(settings)
    check_arguments(known, name, settings)
    rates = geometric_rates(known.low, HIGH if known.high is None else known.high, known.factor)
    further = further_rates(rates, known.factor) if known.high is None else ()
    base = preset(name) if name is not None else load(known.config, pipes=True)
    plan = plan_sweep(known.output or default_folder(name, known.config), base, settings, rates)
    with alone_in(plan.output):
        check_folder(plan)
        print(f"{heading(rates, plan.configs[plan.baseline].steps)}{time_of(plan)}", flush=True)
        try:
            sweep = sweep_rates(plan, further)
        except RunError as error:
            fail(str(error), RUN_ERROR)
    show(sweep, known.picture)


def check_arguments(known: argparse.Namespace, name: str | None, settings: Sequence[str]) -> None:
    """Raise ValueError for arguments that a sweep cannot take."""
    from kairostep.commands.output import check_output

    check_output(known.picture, "--picture", [".png"])
    if (name is None) == (known.config is None):
        raise ValueError("find-lr takes a preset or --config FILE: `kairostep presets` lists the presets")
    if "learning_rate" in {setting.lstrip("-").partition("=")[0].replace("-", "_") for setting in settings}:
        raise ValueError("find-lr tries learning rates itself, got --learning_rate: pass --from and --to")


def default_folder(name: str | None, file: Path) -> Path:
    """Return ./rates-NAME; a pipe has a number instead of a name, which differs from call to call."""
    return Path(f"rates-{name or (file.stem if file.is_file() else 'config')}")


def heading(rates: Sequence[float], steps: int) -> str:
    """Return the first line: what is tried."""
    if len(rates) == 1:
        return f"learning rate {rates[0]:g}, {steps} steps"
    return f"{len(rates)} learning rates from {rates[0]:g} to {rates[-1]:g}, {steps} steps each"


def time_of(plan: "Plan") -> str:
    """Return how long the runs that are left take, in words."""
    from kairostep.comparison.estimate import time_steps
    from kairostep.comparison.rate_sweep import final_loss
    from kairostep.progress_meter import duration

    config = plan.configs[plan.baseline]
    left = [run for run in plan.runs(plan.baseline, config.seed) if final_loss(run) is None and not run.diverged]
    return f": about {duration(len(left) * config.steps * time_steps(config))}" if left else ""


def show(sweep: "RateSweep", picture: Path | None) -> None:
    """Print the losses and the suggestion, and draw them where asked."""
    from kairostep.analysis.table import columns

    rows = [[f"{rate:g}", "diverged" if loss is None else f"{loss:.5g}"] for rate, loss in sweep.losses.items()]
    verdict = sweep.verdict()
    print("\n" + columns(["learning rate", sweep.loss_name], rows))
    print(f"\n{verdict}")
    if picture is None:
        return
    from kairostep.analysis.picture import write_picture
    from kairostep.plots import Axis, Curve, Panel

    known = {rate: loss for rate, loss in sweep.losses.items() if loss is not None}
    curve = Curve(f"{sweep.loss_name} at the end", list(known), list(known.values()))
    panel = Panel(Axis("learning rate", log=True), Axis(sweep.loss_name, log=True), [curve], title="rates tried")
    write_picture("Learning rates", verdict.partition(":")[0], [panel], picture)
    print(f"\nalso in {picture}")
