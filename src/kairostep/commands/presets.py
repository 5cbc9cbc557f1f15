"""`kairostep presets`: lists the presets."""

import argparse
from collections.abc import Sequence

PARSER = {"help": "list the presets"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""
    parser.set_defaults(run=run)


def run(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """List the presets."""
    from kairostep.experiments.presets import PRESETS

    width = max(map(len, PRESETS))
    for name, preset in PRESETS.items():
        print(f"{name:{width}}  {preset.text}")
