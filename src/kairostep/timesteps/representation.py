"""How samplers, processes and objectives print: the call that makes them, in one line."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

MISSING = object()


def represent(thing: Any) -> str:
    """Return `Name(argument=value, ...)`, as in `RootLoss(num_bins=20, decay=0.99, floor=0.1)`.

    Arguments that can be given by position are always there, the others where they differ from their default. The value
    of an argument is the attribute of the same name, of the thing itself or of a part that it is made of; what it did
    not keep is left out, and so is the seed.
    """
    shown = []
    for parameter in constructor_parameters(type(thing)):
        value = argument_value(thing, parameter.name)
        is_default = value is parameter.default or (not isinstance(value, Tensor) and value == parameter.default)
        is_optional = parameter.kind is parameter.KEYWORD_ONLY or parameter.default is None
        if value is not MISSING and not (is_default and is_optional):
            shown.append(f"{parameter.name}={represent_value(value)}")
    return f"{type(thing).__name__}({', '.join(shown)})"


def constructor_parameters(kind: type) -> list[inspect.Parameter]:
    """Return the parameters of a class, those of its base where it hands on `**options` among them."""
    found: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]  # of this class
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != "seed"]
        found |= {p.name: p for p in named if p.name not in found and (base is kind or p.kind is p.KEYWORD_ONLY)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(found.values())


def argument_value(thing: Any, name: str) -> Any:
    """Return the attribute of this name, of the object or of a module inside it."""
    if callable(getattr(type(thing), name, None)):
        return MISSING  # a method
    parts = thing.children() if isinstance(thing, nn.Module) else ()
    own_parts = [part for part in parts if not hasattr(part, "sample")]  # a sampler within has arguments of its own
    value: Any = next((vars_of(owner)[name] for owner in (thing, *own_parts) if name in vars_of(owner)), MISSING)
    return value.value if hasattr(value, "left_behind") else value  # borrowed: see `probes.py`


def vars_of(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object, the tensors and modules of a Module among them."""
    slots = getattr(type(owner), "__slots__", ())
    own: dict[str, Any] = {name: getattr(owner, name) for name in slots} if slots else dict(vars(owner))
    for tensors_or_modules in ("_buffers", "_modules"):
        own |= own.get(tensors_or_modules, {})
    return own


def represent_value(value: Any) -> str:
    """Return a short form of a value."""
    if isinstance(value, Tensor):
        span = f" from {float(value.min()):.4g} to {float(value.max()):.4g}" if value.numel() else ""
        return f"<{value.numel()} values{span}>"
    value = value.func if isinstance(value, partial) else value
    if inspect.isroutine(value):
        return function_name(value)
    printed_by: Any = type(value).__repr__
    is_plain = printed_by in (object.__repr__, nn.Module.__repr__, Optimizer.__repr__)
    return f"{type(value).__name__}(...)" if is_plain else repr(value)


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, with the class of what a method belongs to."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "function")
    is_bound = owner is not None and not inspect.ismodule(owner) and not isinstance(owner, type)
    return f"{type(owner).__name__}.{name}" if is_bound else name
