"""`kairostep doctor`: what is installed here, and what stands in the way."""

import argparse
from collections.abc import Sequence

PARSER = {"help": "what is installed here, and what stands in the way"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""
    parser.set_defaults(run=run)


def run(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Print versions, devices, extras and problems."""
    from kairostep.doctor import main as diagnose

    raise SystemExit(diagnose())
