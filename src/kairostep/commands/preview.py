"""`kairostep preview`: shows the density of draws and the effective loss weight, before any training."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from kairostep.commands.picture_argument import add_output

TEXT = """\
Shows where draws go and what is optimised, before any training and without data, as in

  kairostep preview --sampler=logit_normal --process=linear --weighting=min_snr --prediction=epsilon
  kairostep preview cifar10-ddpm --sampler=speed --output speed.png

Settings are those that `kairostep train --help` lists. A sampler that learns is shown as it starts.
"""
PARSER = {"help": "show what would be trained", "description": TEXT, "allow_abbrev": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments other than settings."""
    parser.add_argument("--parts", type=int, default=20, help="rows of each table (20)")
    add_output(parser)
    parser.set_defaults(run=run)


def run(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Show the density, the weight and their product."""
    import torch

    from kairostep.analysis.panels import preview_panels
    from kairostep.analysis.table import preview_table
    from kairostep.analysis.untrained import untrained_parts
    from kairostep.commands.output import check_output, write_output
    from kairostep.commands.run_or_preset import find_run_or_preset

    check_output(known.output)
    chosen = find_run_or_preset(settings)
    parts = untrained_parts(chosen.config)
    seen, config = parts.preview(), parts.config
    table, predicted = preview_table(seen, known.parts), config.prediction
    title = f"sampler {config.sampler.name}, weighting {config.weighting.name}, process {config.process.name}"
    print(f"{title}, prediction {predicted}")
    print(f"weight: on the squared error of {predicted}; product: draws x weight, what is optimised;")
    print("on eps, on x0: the same objective, as shares of its weight on the error of the noise and of x0\n")
    print(table)
    if seen.learns:
        note = f"sampler {config.sampler.name} changes its density in training: this is how it starts"
        print(f"kairostep: note: {note}", file=sys.stderr)
    write_output(
        known.output,
        "preview",
        replace(chosen, config=config).facts(known.typed, torch.device("cpu")),
        {"over_t": seen.over_t(known.parts), "over_log_snr": seen.over_log_snr(known.parts), "curves": seen},
        title=f"{title}, {predicted}",
        how_to_read=f"What is optimised is the product of the density of draws and the weight on {predicted}.",
        panels=preview_panels(seen),
    )
