"""`kairostep data`: obtains a data set in the form that training reads."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

PARSER = {"help": "obtain and convert a data set"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", choices=["cifar10"])
    parser.add_argument("folder", type=Path, help="where it is, or shall be")
    parser.set_defaults(run=run)


def run(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Obtain CIFAR-10."""
    from kairostep.data import obtain_cifar10

    logging.getLogger("kairostep").setLevel(logging.INFO)  # show where it comes from
    try:
        known.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"folder must be one that can be written, got {known.folder}: {error.strerror}") from error
    print(f"train on it with: kairostep train cifar10-small --data.path={obtain_cifar10(known.folder)}")
