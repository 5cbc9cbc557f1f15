"""Names of a package that are imported at their first use, where what they bring takes seconds."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def import_at_first_use(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, given the module below it that has each name: {"Run": "run"}."""

    def __getattr__(name: str) -> Any:  # what the package calls it
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{places[name]}"), name)

    return __getattr__
