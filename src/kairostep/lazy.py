"""Names of a package that are imported at their first use, where what they bring takes seconds."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def import_at_first_use(
    package: str, places: Mapping[str, str], moved: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Return a package's `__getattr__`.

    Args:
        package: Its `__name__`.
        places: The module below it that has each name: {"Run": "run"}.
        moved: Names that are elsewhere or called otherwise now, and where: they raise and say so.
    """

    def __getattr__(name: str) -> Any:  # what the package calls it
        if moved and name in moved:
            raise AttributeError(f"{package}.{name} has another name now: {moved[name]}")
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{places[name]}"), name)

    return __getattr__
