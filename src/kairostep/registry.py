"""The registries: samplers, weightings, networks, data sets and processes by name.

A class or function is registered where it is defined:

    @samplers.register("root_loss")
    class RootLoss(TimestepSampler): ...

Another package adds names by entry points, one line in its pyproject.toml:

    [project.entry-points."kairostep.samplers"]
    triangle = "triangle:Triangle"

Anything else that can be imported is named `module:Class`. This file imports no class itself.
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from kairostep.arguments import Argument, arguments_of, flatten, passes_on

T = TypeVar("T")

MIN_BEGINNING = 3  # letters from which on a text can be the beginning of a name
CLOSE = 0.75  # similarity of a typo, as difflib measures it: at most one wrong letter in four


class Registry:
    """The names of one kind of part, such as samplers.

    Args:
        kind: The kind on the command line: `--kind=name`.
        group: Entry points that add names. None: only registered names, and no `module:Class`.
        given: Arguments that an experiment supplies. All others are options.
        removed: Removed name -> message that says why, and what to use instead.
    """

    def __init__(
        self,
        kind: str,
        group: str | None = None,
        *,
        given: tuple[str, ...] = (),
        removed: Mapping[str, str] | None = None,
    ) -> None:
        self.kind, self.group, self.given, self.removed = kind, group, given, dict(removed or {})
        self.base: type | None = None  # the common base class, which sets this where it is defined
        self._registered: dict[str, Any] = {}  # "module:name" until it is imported at its first use
        self._added: dict[str, list[EntryPoint]] | None = None  # of other packages, None until they are read

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that gives a class or function this name."""

        def decorate(entry: T) -> T:
            self._add(name, entry)
            return entry

        return decorate

    def register_later(self, name: str, where: str) -> None:
        """Register "module:name" under a name, and import it at its first use."""
        self._add(name, where)

    def find(self, name: str) -> Any:
        """Return the class or function of a name or of `module:Class`. Raise ValueError if there is none."""
        if ":" in name and self.group is not None:
            return self._check(name, import_outside(self.kind, name))
        added = self._entry_points().get(name, [])
        self._refuse_clash(name, added)
        if name in self._registered:
            entry = self._registered[name]
            if isinstance(entry, str):
                module, _, attribute = entry.partition(":")
                entry = getattr(importlib.import_module(module), attribute)
            return entry
        if added:
            return self._check(name, self._load(added[0]))
        raise ValueError(self.unknown(name))

    def options_of(self, name: str) -> dict[str, Argument]:
        """Return the options of a name: the arguments that YAML can set and that an experiment does not supply.

        They are the arguments of the constructor. If the class has its own `from_experiment`, they are the arguments
        of that, plus those of the constructor if it takes `**options`.
        """
        maker = self.find(name)
        arguments = arguments_of(maker)
        if hasattr(maker, "from_experiment"):
            own = arguments_of(maker.from_experiment)
            own.pop("experiment", None)
            passed_on = {key: value for key, value in arguments.items() if key not in own}
            arguments = {**passed_on, **own} if passes_on(maker.from_experiment) else own
        return {key: value for key, value in flatten(arguments).items() if key not in self.given}

    @property
    def registered(self) -> dict[str, Any]:
        """The names that kairostep registers, in alphabetical order, without those of other packages."""
        return dict(sorted(self._registered.items()))

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names, in alphabetical order."""
        return iter(sorted({*self._registered, *self._entry_points()}))

    def __contains__(self, name: object) -> bool:
        """Whether this is a known name, or has the form `module:Class`."""
        return name in self._registered or name in self._entry_points() or (self.group is not None and ":" in str(name))

    def unknown(self, name: str) -> str:
        """Return the message for an unknown name."""
        return self.removed.get(name) or unknown(self.kind, name, self)

    def _add(self, name: str, entry: Any) -> None:
        before = self._registered.get(name)
        if before is not None and origin(before) != origin(entry):
            raise ValueError(
                f"{self.kind} {name} must be one thing, got {origin(entry)} beside {origin(before)}: "
                "register it under another name"
            )
        self._registered[name] = entry

    def _entry_points(self) -> dict[str, list[EntryPoint]]:
        if self._added is None:
            self._added = {}
            for entry_point in entry_points(group=self.group) if self.group else ():
                same_name = self._added.setdefault(entry_point.name, [])
                if entry_point.value not in [other.value for other in same_name]:  # a package may be on the path twice
                    same_name.append(entry_point)
        return self._added

    def _refuse_clash(self, name: str, added: list[EntryPoint]) -> None:
        origins = [origin(self._registered[name])] if name in self._registered else []
        origins += [f"{entry_point.value} of {package_of(entry_point)}" for entry_point in added]
        if len(origins) > 1:
            raise ValueError(
                f"{self.kind} {name} must be one thing, got {' and '.join(origins)}: rename the entry point of "
                f"{package_of(added[-1])}, or write --{self.kind}={added[-1].value}"
            )

    def _load(self, entry_point: EntryPoint) -> Any:
        try:
            return entry_point.load()
        except Exception as error:
            raise ValueError(
                f"{self.kind} {entry_point.name} of {package_of(entry_point)} must be importable, got "
                f"{type(error).__name__}: {error}, from {entry_point.value}: mend or uninstall that package"
            ) from error

    def _check(self, name: str, entry: Any) -> Any:
        if self.base is not None and not (isinstance(entry, type) and issubclass(entry, self.base)):
            raise ValueError(
                f"{self.kind} {name} must be a subclass of kairostep.{self.base.__name__}, got {entry!r}: "
                f"write class {getattr(entry, '__name__', 'Mine')}(kairostep.{self.base.__name__})"
            )
        if not callable(entry):
            raise ValueError(f"{self.kind} {name} must be a class or function, got {entry!r}: name what makes it")
        return entry


def import_outside(kind: str, name: str) -> Any:
    """Import `module:name`, also from the current folder, as `python -m` does."""
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise ValueError(f"--{kind} must be a name or module:Class, got {name!r}: write for instance mine:Thing")
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and module_name.startswith(str(error.name))
        said = f"no module {error.name}" if is_missing else f"{type(error).__name__}: {error}"  # type: ignore[attr-defined]
        raise ValueError(
            f"{kind} {name} must be importable, got {said}: start in the folder that holds "
            f"{module_name.partition('.')[0]}, add that to PYTHONPATH, or install the package"
        ) from error
    if not hasattr(module, attribute):
        public = [own for own in vars(module) if not own.startswith("_")]
        raise ValueError(unknown(f"name in {module_name}:", attribute, public))
    return getattr(module, attribute)


def origin(entry: Any) -> str:
    """Return where an entry is defined, as "module:name"."""
    return entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"


def package_of(entry_point: EntryPoint) -> str:
    """Return the package of an entry point, in words."""
    return f"the package {entry_point.dist.name}" if entry_point.dist else "an unnamed package"


def nearest(name: str, valid: Iterable[str]) -> list[str]:
    """Return the valid name that is one typo away, otherwise the names that begin with this one.

    Leading dashes and case do not count: with them, any two short flags would be similar.
    """
    plain = {_plain(one): one for one in valid}
    written = _plain(name)
    if close := difflib.get_close_matches(written, list(plain), n=1, cutoff=CLOSE):
        return [plain[close[0]]]
    return [one for key, one in plain.items() if len(written) >= MIN_BEGINNING and key.startswith(written)]


def unknown(kind: str, name: str, valid: Iterable[str]) -> str:
    """Return the message for an unknown name, with the nearest valid names, or all if none is near."""
    valid = list(valid)
    if near := nearest(name, valid):
        return f"unknown {kind} {name}: did you mean {' or '.join(near)}?"
    return f"unknown {kind} {name}: valid are {', '.join(valid) or 'none'}"


def _plain(name: str) -> str:
    return str(name).lstrip("-").lower().replace("-", "_")


samplers = Registry(
    "sampler",
    "kairostep.samplers",
    given=("process", "seed"),
    removed={
        "progress": "the sampler progress was removed, since no setting of it beat uniform draws: take root_loss "
        "(ks.RootLoss()), which asks the network for nothing"
    },
)
weightings = Registry("weighting", "kairostep.weightings", given=("process",))
networks = Registry(
    "network", "kairostep.networks", given=("sample_size", "in_channels", "out_channels", "num_classes")
)
datasets = Registry("data", "kairostep.datasets", given=("split",))
processes = Registry("process")

REGISTRIES = {registry.kind: registry for registry in (datasets, networks, processes, weightings, samplers)}
