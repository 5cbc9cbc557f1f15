"""Imports names of a package at their first use, since their modules take seconds to import."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def import_at_first_use(
    package: str, places: Mapping[str, str], moved: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Return a package's `__getattr__`.

    Args:
        package: Its `__name__`.
        places: Name -> the module below the package that has it, such as {"Run": "run"}.
        moved: Old name -> new place. An old name raises with the new place.
    """

    def __getattr__(name: str) -> Any:
        if moved and name in moved:
            raise AttributeError(f"{package}.{name} has another name now: {moved[name]}")
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{places[name]}"), name)

    return __getattr__
