"""Makes `made_runs` and `browser` importable, and opens a browser for tests that need it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser import open_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield a headless Chromium of playwright's, or skip where there is none."""
    with open_browser() as found:
        yield found
