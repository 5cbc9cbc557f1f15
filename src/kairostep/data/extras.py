"""Packages that only some sets need, imported when they are used."""

import importlib
from typing import Any

from kairostep.installation import missing


def require(module: str, what: str, extra: str = "train") -> Any:
    """Return an installed module, or raise an error that names the extra which `what` needs."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing(what, error, extra) from error
