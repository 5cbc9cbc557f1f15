"""Checks of constructor arguments: the rule, the value and the fix in one sentence."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LARGEST_FLOAT = 1e30  # float32 ends at 3.4e38: with room to multiply
LARGEST = 10**15  # of counts that nothing is made of, such as steps: exact in float64, with room to multiply
MOST = {  # of counts that something is made of: refused before it is
    "num_steps": 10**7,  # of a process
    "num_bins": 10**6,
    "history": 10**5,
    "queue_size": 10**5,
    "num_selected": 10**5,
    "sweep_x0": 10**6,
    "reward_rows": 10**6,
    "channels": 2**16,
    "multipliers": 2**10,
    "blocks": 2**8,
    "hidden_size": 2**17,
    "hidden": 2**16,
    "depth": 10**3,
    "size": 2**16,
    "batch_size": 10**6,
    "sample_steps": 10**6,
    "num": 10**7,  # images
    "fid_images": 10**7,
    "num_parts": 10**5,
    "parts": 10**5,
    "ranges": 10**3,
    "timesteps": 10**6,
    "repeats": 10**6,
    "rows": 10**6,
    "seed": 2**63 - 1,
    "measure_seed": 2**63 - 1,
}

EXAMPLES: dict[str, float] = {  # what an error suggests for arguments that have a usual size
    "batch_size": 64,
    "channels": 64,
    "checkpoint_every": 1000,
    "decay": 0.99,
    "density_every": 1000,
    "depth": 12,
    "dropout": 0.1,
    "ema_decay": 0.9999,
    "end": 10_000,
    "evaluate_every": 1000,
    "every": 40,
    "fid_every": 5000,
    "fid_images": 5000,
    "floor": 0.1,
    "gamma": 5.0,
    "guidance": 1.5,
    "held_out": 0.02,
    "held_out_images": 1024,
    "hidden": 128,
    "hidden_size": 768,
    "history": 10,
    "keep_checkpoints": 2,
    "keep_every": 10_000,
    "label_dropout": 0.1,
    "learning_rate": 2e-4,
    "log_every": 100,
    "mlp_ratio": 4.0,
    "num": 64,
    "num_bins": 20,
    "num_parts": 20,
    "num_steps": 1000,
    "offset": 0.008,
    "parts": 20,
    "patch_size": 2,
    "queue_size": 20,
    "range_steps": 100,
    "ranges": 5,
    "repeats": 32,
    "reward_rows": 64,
    "rows": 16,
    "sample_steps": 50,
    "sigma_data": 0.5,
    "sigma_max": 80.0,
    "sigma_min": 0.002,
    "size": 64,
    "steps": 1000,
    "sweep_x0": 1,
    "threshold": 0.1,
    "time_scale": 1000.0,
    "timesteps": 20,
    "warmup": 100,
    "warmup_steps": 100,
    "workers": 4,
}


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


def example(name: str, otherwise: float) -> str:
    """Return `name=value` with a value that makes sense for an argument of this name."""
    return f"{name}={EXAMPLES.get(name.rpartition('.')[2], otherwise)}"


def positive(name: str, value: float) -> float:
    """Return `value` if it is a finite number above 0."""
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a finite number above 0, got {value}: pass for instance {example(name, 1.0)}")
    return in_float32(name, value)


def finite(name: str, value: float) -> float:
    """Return `value` if it is a finite number."""
    if not float("-inf") < value < float("inf"):
        raise ValueError(f"{name} must be a finite number, got {value}: pass for instance {example(name, 0.0)}")
    return in_float32(name, value)


def nonnegative(name: str, value: float) -> float:
    """Return `value` if it is a finite number of at least 0."""
    if not 0 <= value < float("inf"):
        raise ValueError(
            f"{name} must be a finite number of at least 0, got {value}: pass for instance {example(name, 0.01)}"
        )
    return in_float32(name, value)


def in_float32(name: str, value: float) -> float:
    """Return `value` if float32, in which samplers compute, can hold it."""
    if abs(value) > LARGEST_FLOAT:
        shown = f"{value:.3g}" if isinstance(value, float) else f"a number of {len(str(value))} digits"
        raise ValueError(f"{name} must be at most {LARGEST_FLOAT:.3g} in size, got {shown}: pass a smaller number")
    return value


def share(name: str, value: float) -> float:
    """Return `value` if it is in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a share in [0, 1], got {value}: pass for instance {example(name, 0.1)}")
    return value


def positive_share(name: str, value: float) -> float:
    """Return `value` if it is in (0, 1]."""
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be a share in (0, 1], got {value}: pass for instance {example(name, 0.1)}")
    return value


def below_one(name: str, value: float) -> float:
    """Return `value` if it is in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}: pass for instance {example(name, 0.9)}")
    return value


def count(name: str, value: int, *, at_least: int = 1, at_most: int | None = None) -> int:
    """Return `value` if it is a whole number of at least `at_least`, and not beyond what anybody can mean."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < at_least:
        usual = example(name, at_least) if EXAMPLES.get(name, at_least) >= at_least else f"{name}={at_least}"
        raise ValueError(
            f"{name} must be a whole number of at least {at_least}, got {value!r}: pass for instance {usual}"
        )
    most = MOST.get(name.rpartition(".")[2], LARGEST) if at_most is None else at_most
    if value > most:
        digits = str(value) if value < 10**20 else f"a number of {len(str(value))} digits"
        raise ValueError(f"{name} must be at most {most}, got {digits}: more cannot be meant, pass a smaller number")
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
