"""Lets the tests of this folder import `exact` and `small_network`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
