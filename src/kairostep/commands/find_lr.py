"""`kairostep find-lr`: which learning rate for these data, by a short sweep."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

TEXT = """\
Trains for a few steps at rates in geometric steps and tells which ends with the lowest held-out loss, as in

  kairostep find-lr digits
  kairostep find-lr images --data.folder=photos --from 1e-4 --to 3e-3 --steps=2000 --picture rates.png

Settings are --key=value, as in `kairostep train`. Runs write metrics and a checkpoint, but no samples. A sweep that was
stopped goes on. Rates that suit a short run may be too large for a long one: try the run's own length if time allows.
"""
PARSER = {
    "help": "find a learning rate by a short sweep",
    "usage": "kairostep find-lr PRESET | --config FILE [--from 1e-4] [--to 1e-2] [--factor 2] [--key=value ...]",
    "description": TEXT,
    "allow_abbrev": False,
}
HIGH = 1e-2  # largest rate at first
SHARE_OF_RUN, LEAST_STEPS = 10, 100  # a sweep takes a tenth of the steps of a run, and at least so many


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
    from kairostep.commands.output import check_output
    from kairostep.comparison.rate_sweep import further_rates, geometric_rates, plan_sweep, sweep_rates
    from kairostep.experiments import preset
    from kairostep.experiments.command_line import take_preset
    from kairostep.experiments.config import load
    from kairostep.runs.directory import alone_in

    if known.picture is not None and known.picture.suffix != ".png":
        raise ValueError(f"--picture must end in .png, got {known.picture}: pass for instance --picture rates.png")
    check_output(known.picture)
    name, settings = take_preset(settings)
    if (name is None) == (known.config is None):
        raise ValueError("find-lr takes a preset or --config FILE: `kairostep presets` lists the presets")
    rates = geometric_rates(known.low, HIGH if known.high is None else known.high, known.factor)
    further = further_rates(rates, known.factor) if known.high is None else ()
    given = {setting.lstrip("-").partition("=")[0].replace("-", "_") for setting in settings}
    if "learning_rate" in given:
        raise ValueError("find-lr tries learning rates itself, got --learning_rate: pass --from and --to")
    base = preset(name) if name is not None else load(known.config, pipes=True)
    if "steps" not in given:
        settings = [*settings, f"--steps={max(LEAST_STEPS, base.steps // SHARE_OF_RUN)}"]
    if "warmup_steps" not in given:
        settings = [*settings, "--warmup_steps=0"]  # a warm-up for the whole run would hide the rate of a short one
    output = known.output or Path(f"rates-{name or known.config.stem}")
    plan = plan_sweep(output, name or known.config, settings, rates, seed=0)
    (config,) = plan.configs.values()
    print(f"{len(rates)} learning rates from {rates[0]:g} to {rates[-1]:g}, {config.steps} steps each", flush=True)
    with alone_in(output):
        sweep = sweep_rates(plan, further)
    show(sweep.losses, sweep.verdict(), known.picture)


def show(losses: Mapping[float, float | None], verdict: str, picture: Path | None) -> None:
    """Print the losses and the suggestion, and draw them where asked."""
    from kairostep.analysis.table import columns

    rows = [[f"{rate:g}", "diverged" if loss is None else f"{loss:.5g}"] for rate, loss in losses.items()]
    print("\n" + columns(["learning rate", "held-out loss"], rows))
    print(f"\n{verdict}")
    if picture is None:
        return
    from kairostep.analysis.picture import write_picture
    from kairostep.plots import Axis, Curve, Panel

    known = {rate: loss for rate, loss in losses.items() if loss is not None}
    curve = Curve("held-out loss at the end", list(known), list(known.values()))
    panel = Panel(Axis("learning rate", log=True), Axis("held-out loss", log=True), [curve], title="rates tried")
    write_picture("Learning rates", verdict.partition(":")[0], [panel], picture)
    print(f"\nalso in {picture}")
