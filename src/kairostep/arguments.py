"""Reads the arguments of a class or function, and which of them YAML and a command line can set."""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

SCALARS = (bool, int, float, str, Path)


@dataclass(frozen=True)
class Argument:
    """One argument of a function or class."""

    hint: Any
    required: bool
    default: Any = None


def arguments_of(call: Callable[..., Any]) -> dict[str, Argument]:
    """Return the arguments of a function or class, including those of `**options: Unpack[...]`."""
    hints = hints_of(call)
    arguments: dict[str, Argument] = {}
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            for unpacked in get_args(hints.get(name)):
                arguments |= {key: Argument(hint, required=False) for key, hint in get_type_hints(unpacked).items()}
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            required = parameter.default is parameter.empty
            arguments[name] = Argument(hints.get(name, Any), required, None if required else parameter.default)
    return arguments


def hints_of(call: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function or class, or none if they name something that is unknown at run time."""
    try:
        return get_type_hints(call.__init__ if inspect.isclass(call) else call)
    except (NameError, TypeError):
        return {}


def passes_on(call: Callable[..., Any]) -> bool:
    """Whether a function takes `**options`."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(call).parameters.values())


def flatten(arguments: Mapping[str, Argument]) -> dict[str, Argument]:
    """Return the arguments that YAML can set, without tensors, callables and modules.

    A dataclass argument, as in `Adaptive(probing=Probing(every=40))`, is replaced by its fields.
    """
    flat: dict[str, Argument] = {}
    for name, argument in arguments.items():
        if is_dataclass(argument.hint):
            flat |= flatten(arguments_of(argument.hint))  # type: ignore[arg-type]  # a class
        elif (hint := writable(argument.hint)) is not None:
            flat[name] = Argument(hint, argument.required, argument.default)
    return flat


def bundle(call: Callable[..., Any], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `flatten`: collect the fields of each dataclass that `call` takes into one argument."""
    options = dict(flat)
    for name, argument in arguments_of(call).items():
        if is_dataclass(argument.hint):
            fields = {key: options.pop(key) for key in arguments_of(argument.hint) if key in options}  # type: ignore[arg-type]
            if fields:
                options[name] = argument.hint(**fields)  # type: ignore[operator]
    return options


def writable(hint: Any) -> Any:
    """Return the part of a type hint that YAML can write, None if there is none.

    Of `Tensor | tuple[float, ...]` it is the tuple.
    """
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any or hint in SCALARS or kind is Literal:
        return hint
    if kind in (Union, types.UnionType):
        own = [part for part in parts if writable(part) is not None]
        optional = [types.NoneType] if types.NoneType in parts else []
        return Union[*own, *optional] if own else None
    if kind in (tuple, list, Sequence):
        return hint if all(part is ... or writable(part) is not None for part in parts) else None
    return None
