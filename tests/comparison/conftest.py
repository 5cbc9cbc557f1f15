"""Runs of a second or two, as the tests of training make them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
sys.path.insert(0, str(Path(__file__).parent))
