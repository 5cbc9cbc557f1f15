"""The option of `preview` and `analyse` that writes what they show."""

import argparse
from pathlib import Path


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the file that a result also goes to."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="also a picture or data: .html, .png or .json")
