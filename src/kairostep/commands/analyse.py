"""`kairostep analyse`: the measurements behind the papers' figures."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from kairostep.commands.picture_argument import add_output

TEXT = """\
Measures what the papers' figures show, as in

  kairostep analyse gradient-variance digits --sampler=uniform --output variance.html
  kairostep analyse gradient-variance runs/digits
  kairostep analyse interdependence runs/digits --ranges 5
  kairostep analyse noise runs/digits
  kairostep analyse increments --process=cosine

Of a run: its checkpoints (gradient-variance: all that were kept), with results in RUN/analysis as JSON. Of a preset:
settings may follow (`kairostep train --help` lists them), and it is trained in ./analysis-NAME first; increments need
no training.
"""
PARSER = {"help": "measure training", "description": TEXT, "allow_abbrev": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the analyses and their arguments."""
    analyses = parser.add_subparsers(dest="analysis", required=True, metavar="ANALYSIS")
    parse = partial(analyses.add_parser, allow_abbrev=False)
    what = "RUN | PRESET [--key=value ...]"
    variance = parse("gradient-variance", help="per time and checkpoint: Figures 2 and 6 of Kim et al. (CVPR 2025)")
    variance.usage = f"kairostep analyse gradient-variance {what} [--timesteps 20] [--repeats 32] [--rows 16] ..."
    variance.add_argument("--timesteps", type=int, default=20, help="times, evenly spaced (20)")
    variance.add_argument("--repeats", type=int, default=32, help="pairs of gradients at each time (32)")
    variance.add_argument("--rows", type=int, default=16, help="rows of a gradient (16)")
    variance.add_argument("--checkpoint", help="last, best or a step (all that were kept)")
    variance.set_defaults(run=run_gradient_variance)
    effects = parse("interdependence", help="what training on a range of times does elsewhere: their Figure 4")
    effects.usage = f"kairostep analyse interdependence {what} [--ranges 5] [--parts 20] [--range_steps 100] ..."
    effects.add_argument("--ranges", type=int, default=5, help="equal ranges of t, each trained on alone (5)")
    effects.add_argument("--parts", type=int, default=20, help="equal parts of t in which the loss is measured (20)")
    effects.add_argument("--range_steps", type=int, default=100, help="optimizer steps on each range (100)")
    effects.add_argument("--checkpoint", default="last", help="last, best or a step (last)")
    effects.set_defaults(run=run_interdependence)
    noise = parse("noise", help="gradient noise of a step under every sampler's density, in the optimizer's metric")
    noise.usage = f"kairostep analyse noise {what} [--bins 20] [--rows 64] ..."
    noise.add_argument("--bins", type=int, default=20, help="equal bins of t (20)")
    noise.add_argument("--rows", type=int, default=64, help="single-row gradients in each bin (64)")
    noise.add_argument("--checkpoint", default="last", help="last, best or a step (last)")
    noise.set_defaults(run=run_noise)
    for analysis in (variance, effects, noise):
        analysis.add_argument("--weights", choices=["ema", "model"], default="model", help="averaged or not (model)")
        analysis.add_argument("--measure_seed", type=int, default=0, help="of rows and noise (0)")
        analysis.add_argument("--directory", type=Path, help="where a preset is trained (./analysis-NAME)")
        analysis.set_defaults(kept="nothing was written; the same command measures from the start")
        add_output(analysis)
    increments = parse("increments", help="SpeeD's process increments and three areas, of any schedule")
    increments.usage = "kairostep analyse increments [RUN | PRESET] [--process=NAME ...] [--output FILE]"
    add_output(increments)
    increments.set_defaults(run=run_increments)


def run_gradient_variance(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Measure the variance of gradients at the checkpoints of a run."""
    from kairostep.commands.checkpoint_analyses import analyse_gradient_variance
    from kairostep.commands.train import train_run

    analyse_gradient_variance(known, settings, train_run)


def run_interdependence(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Train on each range of times alone and measure the loss at all times."""
    from kairostep.commands.checkpoint_analyses import analyse_interdependence
    from kairostep.commands.train import train_run

    analyse_interdependence(known, settings, train_run)


def run_noise(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Measure the gradient noise of a step under each density."""
    from kairostep.commands.noise_analysis import analyse_noise
    from kairostep.commands.train import train_run

    analyse_noise(known, settings, train_run)


def run_increments(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Show SpeeD's process increments and three areas."""
    import torch

    from kairostep.analysis import process_increments
    from kairostep.analysis.panels import increments_panels
    from kairostep.analysis.table import increments_table
    from kairostep.commands.output import check_output, write_in_run, write_output
    from kairostep.commands.run_or_preset import find_run_or_preset
    from kairostep.experiments.experiment import make_objective

    check_output(known.output)
    chosen = find_run_or_preset(settings)
    config, objective = make_objective(chosen.config)
    increments = process_increments(objective.process)
    share = 1 - increments.speed_convergence_start / increments.num_steps
    print(f"process {config.process.name}, {increments.num_steps} steps: x(t+1) - x(t) given x0\n")
    print(increments_table(increments))
    print(f"\nconvergence in SpeeD's released sampler: the last {100 * share:.0f} % of steps, whatever the schedule")
    facts = replace(chosen, config=config).facts(known.typed, torch.device("cpu"))
    if chosen.directory is not None:
        write_in_run(chosen.directory, "increments", facts, increments)
    write_output(
        known.output,
        "increments",
        facts,
        increments,
        title=f"process increments, {config.process.name}",
        how_to_read="A process accelerates until its noise grows fastest, and has converged where sigma hardly rises.",
        panels=increments_panels(increments),
    )
