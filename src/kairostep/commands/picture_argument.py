"""The option --output of `preview` and `analyse`."""

import argparse
from pathlib import Path


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add --output."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="also a picture or data: .html, .png or .json")
