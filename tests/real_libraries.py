"""Libraries that demand torchvision although training does not touch it, imported beside a stand-in for it.

`make test` installs them, without what they demand, into a folder beside the test environment (`LIBRARIES`).
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

LIBRARIES = Path(sys.prefix) / "libraries"


class StandIn(ModuleType):
    """A module that has every attribute, each of them a class that does nothing."""

    __path__: list[str] = []  # noqa: RUF012  # so that it passes for a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class StandInFinder:
    """Finds a stand-in for the named packages and all that is in them, if they are not installed."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = [name for name in packages if importlib.util.find_spec(name) is None]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec for what belongs to one of the packages."""
        if name.split(".")[0] not in self.packages:
            return None
        return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec: Any) -> ModuleType:
        """Return the stand-in."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


@contextmanager
def beside(*packages: str) -> Iterator[None]:
    """Import what the block imports beside stand-ins for these packages."""
    finder = StandInFinder(packages)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in [key for key in sys.modules if key.split(".")[0] in finder.packages]:
            del sys.modules[module]


def import_real(name: str, *stand_ins: str) -> Any:
    """Return the module, imported beside stand-ins, or skip the test where the library is not installed."""
    if importlib.util.find_spec(name.split(".")[0]) is None:
        pytest.skip(f"{name.split('.')[0]} is not installed: make test does it")
    try:
        with beside(*stand_ins), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} does not import here: {error}")
