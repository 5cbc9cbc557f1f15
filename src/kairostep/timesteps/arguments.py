"""Checks of constructor arguments: the rule, the value and the fix in one sentence."""

from collections.abc import Callable, Iterable
from typing import Any


def positive(name: str, value: float) -> float:
    """Return `value` if it is a finite number above 0."""
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a finite number above 0, got {value}: pass for instance {name}=1.0")
    return value


def finite(name: str, value: float) -> float:
    """Return `value` if it is a finite number."""
    if not float("-inf") < value < float("inf"):
        raise ValueError(f"{name} must be a finite number, got {value}: pass for instance {name}=0.0")
    return value


def nonnegative(name: str, value: float) -> float:
    """Return `value` if it is a finite number of at least 0."""
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}: pass for instance {name}=0.01")
    return value


def share(name: str, value: float) -> float:
    """Return `value` if it is in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a share in [0, 1], got {value}: pass for instance {name}=0.1")
    return value


def positive_share(name: str, value: float) -> float:
    """Return `value` if it is in (0, 1]."""
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be a share in (0, 1], got {value}: pass for instance {name}=0.1")
    return value


def below_one(name: str, value: float) -> float:
    """Return `value` if it is in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}: pass for instance {name}=0.9")
    return value


def count(name: str, value: int, *, at_least: int = 1) -> int:
    """Return `value` if it is a whole number of at least `at_least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < at_least:
        raise ValueError(
            f"{name} must be a whole number of at least {at_least}, got {value!r}: pass for instance {name}={at_least}"
        )
    return int(value)


def function(name: str, value: Callable[..., Any], example: str) -> Callable[..., Any]:
    """Return `value` if it can be called."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {value!r}: pass for instance {name}={example}")
    return value


def choice(name: str, value: str, valid: Iterable[str]) -> str:
    """Return `value` if it is one of the `valid` names."""
    valid = tuple(valid)
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}")
    return value
