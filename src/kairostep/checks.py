"""Checks of constructor arguments: the rule, the value and the fix in one sentence."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LARGEST_FLOAT = 1e30  # float32 ends at 3.4e38: this leaves room to multiply
LARGEST = 10**15  # of counts such as steps: exact in float64, with room to multiply


def renamed_arguments(**new_names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that refuses old names of keyword arguments with the new ones: `old="new"`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for old in new_names.keys() & kwargs.keys():
                new = new_names[old]
                raise TypeError(f"{old}= is now {new}=, got {old}={kwargs[old]!r}: pass {new}={kwargs[old]!r}")
            return function(*args, **kwargs)

        return checked

    return decorate


def positive(name: str, value: float, *, example: float = 1.0) -> float:
    """Return `value` if it is a finite number above 0; `example` is what the error suggests."""
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a finite number above 0, got {value}: pass for instance {name}={example}")
    return in_float32(name, value)


def finite(name: str, value: float, *, example: float = 0.0) -> float:
    """Return `value` if it is a finite number."""
    if not float("-inf") < value < float("inf"):
        raise ValueError(f"{name} must be a finite number, got {value}: pass for instance {name}={example}")
    return in_float32(name, value)


def nonnegative(name: str, value: float, *, example: float = 0.01) -> float:
    """Return `value` if it is a finite number of at least 0."""
    if not 0 <= value < float("inf"):
        raise ValueError(
            f"{name} must be a finite number of at least 0, got {value}: pass for instance {name}={example}"
        )
    return in_float32(name, value)


def in_float32(name: str, value: float) -> float:
    """Return `value` if float32, in which samplers compute, can hold it."""
    if abs(value) > LARGEST_FLOAT:
        shown = f"{value:.3g}" if isinstance(value, float) else f"a number of {len(str(value))} digits"
        raise ValueError(f"{name} must be at most {LARGEST_FLOAT:.3g} in size, got {shown}: pass a smaller number")
    return value


def share(name: str, value: float, *, example: float = 0.1) -> float:
    """Return `value` if it is in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a share in [0, 1], got {value}: pass for instance {name}={example}")
    return value


def positive_share(name: str, value: float, *, example: float = 0.1) -> float:
    """Return `value` if it is in (0, 1]."""
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be a share in (0, 1], got {value}: pass for instance {name}={example}")
    return value


def below_one(name: str, value: float, *, example: float = 0.9) -> float:
    """Return `value` if it is in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}: pass for instance {name}={example}")
    return value


def count(name: str, value: int, *, at_least: int = 1, at_most: int = LARGEST, example: int = 0) -> int:
    """Return `value` if it is a whole number within its bounds.

    Args:
        name: Of the argument.
        value: Of the argument.
        at_least: The smallest value.
        at_most: The largest value that anybody can mean: a larger one is refused before something of that size is made.
        example: The usual size, which the error suggests. Default: `at_least`.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < at_least:
        raise ValueError(
            f"{name} must be a whole number of at least {at_least}, got {value!r}: "
            f"pass for instance {name}={max(at_least, example)}"
        )
    if value > at_most:
        digits = str(value) if value < 10**20 else f"a number of {len(str(value))} digits"
        raise ValueError(f"{name} must be at most {at_most}, got {digits}: more cannot be meant, pass a smaller number")
    return int(value)


def function_of_t(name: str, value: Callable[..., Any], example: str) -> Callable[..., Any]:
    """Return `value` if it is a function of one argument: a weighting and an objective take more."""
    if not callable(value) or not takes(value, 1):
        raise ValueError(f"{name} must be a function of t alone, got {value!r}: pass for instance {name}={example}")
    return value


def takes(function: Callable[..., Any], num_arguments: int) -> bool:
    """Whether a function can be called with so many arguments; True if it does not say, as some written in C."""
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def choice(name: str, value: str, valid: Iterable[str]) -> str:
    """Return `value` if it is one of the `valid` names."""
    valid = tuple(valid)
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}")
    return value
