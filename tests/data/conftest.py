"""Lets the tests of this folder import each other's small sets."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
