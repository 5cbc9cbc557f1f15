"""The arguments of `preview` and `analyse`; nothing heavy is imported before a command runs."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Train = Callable[[Any], None]
"""Trains a `Config`."""

PREVIEW_TEXT = """\
Shows where draws go and what is optimised, before any training and without data, as in

  kairostep preview --sampler=logit_normal --process=linear --weighting=min_snr --prediction=epsilon
  kairostep preview cifar10-ddpm --sampler=speed --output speed.png

Settings are those of `kairostep train`. A sampler that learns is shown as it starts.
"""

ANALYSE_TEXT = """\
Measures what the papers' figures show, as in

  kairostep analyse gradient-variance digits --sampler=uniform --output variance.html
  kairostep analyse gradient-variance runs/digits
  kairostep analyse interdependence runs/digits --ranges 5
  kairostep analyse increments --process=cosine

Of a run: its checkpoints (gradient-variance: all that were kept), with results in RUN/analysis as JSON. Of a preset:
the settings of `kairostep train` may follow, and it is trained in ./analysis-NAME first; increments need no training.
"""


def add_preview(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `preview`."""
    parser.add_argument("--parts", type=int, default=20, help="rows of each table (20)")
    add_output(parser)
    parser.set_defaults(run=run_preview)


def add_analyse(parser: argparse.ArgumentParser, train: Train) -> None:
    """Add the analyses."""
    analyses = parser.add_subparsers(dest="analysis", required=True, metavar="ANALYSIS")
    parse = partial(analyses.add_parser, allow_abbrev=False)
    subject = "RUN | PRESET [--key=value ...]"
    variance = parse("gradient-variance", help="per time and checkpoint: Figures 2 and 6 of Kim et al. (CVPR 2025)")
    variance.usage = f"kairostep analyse gradient-variance {subject} [--timesteps 20] [--repeats 32] [--rows 16] ..."
    variance.add_argument("--timesteps", type=int, default=20, help="times, evenly spaced (20)")
    variance.add_argument("--repeats", type=int, default=32, help="pairs of gradients at each time (32)")
    variance.add_argument("--rows", type=int, default=16, help="rows of a gradient (16)")
    variance.add_argument("--checkpoint", help="last, best or a step (all that were kept)")
    variance.set_defaults(run=partial(run_gradient_variance, train=train))
    effects = parse("interdependence", help="what training on a range of times does elsewhere: their Figure 4")
    effects.usage = f"kairostep analyse interdependence {subject} [--ranges 5] [--parts 20] [--range_steps 100] ..."
    effects.add_argument("--ranges", type=int, default=5, help="equal ranges of t, each trained on alone (5)")
    effects.add_argument("--parts", type=int, default=20, help="equal parts of t in which the loss is measured (20)")
    effects.add_argument("--range_steps", type=int, default=100, help="optimizer steps on each range (100)")
    effects.add_argument("--checkpoint", default="last", help="last, best or a step (last)")
    effects.set_defaults(run=partial(run_interdependence, train=train))
    for analysis in (variance, effects):
        analysis.add_argument("--weights", choices=["ema", "model"], default="model", help="averaged or not (model)")
        analysis.add_argument("--measure_seed", type=int, default=0, help="of rows and noise (0)")
        analysis.add_argument("--directory", type=Path, help="where a preset is trained (./analysis-NAME)")
        add_output(analysis)
    increments = parse("increments", help="SpeeD's process increments and three areas, of any schedule")
    increments.usage = "kairostep analyse increments [RUN | PRESET] [--process=NAME ...] [--output FILE]"
    add_output(increments)
    increments.set_defaults(run=run_increments)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the file that a result also goes to."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="also a picture or data: .html, .png or .json")


def run_preview(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Show density, weight and product."""
    from kairostep.commands.without_data import show_preview

    show_preview(known, settings)


def run_increments(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Show SpeeD's areas."""
    from kairostep.commands.without_data import show_increments

    show_increments(known, settings)


def run_gradient_variance(known: argparse.Namespace, settings: Sequence[str], train: Train) -> None:
    """Measure the variance of gradients at the checkpoints of a run."""
    from kairostep.commands.of_runs import analyse_gradient_variance

    analyse_gradient_variance(known, settings, train)


def run_interdependence(known: argparse.Namespace, settings: Sequence[str], train: Train) -> None:
    """Train on each range of times alone and measure everywhere."""
    from kairostep.commands.of_runs import analyse_interdependence

    analyse_interdependence(known, settings, train)
