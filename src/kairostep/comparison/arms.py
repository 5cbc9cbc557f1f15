"""Reads arms from the command line or from a YAML file."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kairostep.bounded_files import Unreadable, read_yaml
from kairostep.registry import unknown

KEYS = ("preset", "settings", "seeds", "baseline", "learning_rates", "targets", "tasks", "arms")
FILE_ENDS = (".yaml", ".yml")
OPEN, CLOSE = "([{", ")]}"
EXAMPLE = '--arms uniform,root_loss,"logit_normal --weighting=min_snr"'


@dataclass(frozen=True)
class Arm:
    """One configuration in a comparison: a name, and the settings that differ from the shared ones."""

    name: str
    settings: tuple[str, ...]  # --key=value


@dataclass(frozen=True)
class ComparisonFile:
    """The content of a YAML file of arms. What it leaves out is None or empty."""

    arms: list[Arm]
    preset: str | None = None
    settings: tuple[str, ...] = ()  # of all arms
    seeds: str | None = None
    baseline: str | None = None
    learning_rates: tuple[float, ...] = ()
    targets: tuple[str, ...] = ()
    tasks: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name -> settings; each task is a comparison


def read_arms(text: str) -> ComparisonFile:
    """Return the arms of a command line, or of the YAML file that it names."""
    if text.endswith(FILE_ENDS):
        return read_file(Path(text))
    return ComparisonFile([parse_arm(piece) for piece in split_arms(text)])


def split_arms(text: str) -> list[str]:
    """Split a text at its commas, except those within quotes and brackets."""
    pieces, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += (letter in OPEN) - (letter in CLOSE) if not quote else 0
        if letter == "," and not quote and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces


def parse_arm(text: str, name: str | None = None) -> Arm:
    """Return the arm of a line such as `logit_normal --weighting=min_snr`: a sampler, then settings.

    Args:
        text: The line. It may start with a setting instead of a sampler.
        name: Of the arm. Default: made from the line, without characters that folder names cannot have.
    """
    try:
        words = shlex.split(text)
        if len(words) == 1 and " " in words[0]:
            words = shlex.split(words[0])  # the whole arm was quoted because of its commas
    except ValueError as error:
        raise ValueError(f"an arm must have whole quotes, got {text!r} ({error}): write {EXAMPLE}") from error
    return arm_of(words, text, name)


def arm_of(words: Sequence[str], text: str, name: str | None = None) -> Arm:
    """Return the arm of a sampler and settings, one word each."""
    if not words:
        raise ValueError(f"an arm must name a sampler or settings, got {text!r}: write {EXAMPLE}")
    settings = list(words) if words[0].startswith("--") else [f"--sampler={words[0]}", *words[1:]]
    for word in settings:
        key, equals, value = word.partition("=")
        if not (key.startswith("--") and len(key) > 2 and equals and value):
            raise ValueError(f"settings of an arm must be written --key=value, got {word!r} in {text!r}: {EXAMPLE}")
    arm = Arm(name or name_of(words), tuple(settings))
    check_name(arm.name)
    return arm


def name_of(words: Sequence[str]) -> str:
    """Return a name for an arm, such as `logit_normal-min_snr` or `uniform-batch_size=256`."""
    parts = []
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        option = f"{key.rpartition('.')[2]}{equals}{value}" if equals else key
        parts.append(value if key in ("sampler", "weighting") else option)
    return re.sub(r"[^\w.=+-]+", "_", "-".join(parts)).strip("._-")


def check_name(name: str) -> None:
    """Raise ValueError if a folder cannot have this name."""
    if not re.fullmatch(r"[\w+][\w.=+-]*", name) or len(name) > 100:
        raise ValueError(
            f"the name of an arm must be one of a folder, letters, digits and _.=+- (100 at most), got {name!r}: "
            "rename it"
        )


def read_file(path: Path) -> ComparisonFile:
    """Return the comparison of a YAML file. Raise ValueError if something is wrong with it."""
    try:
        raw = read_yaml(path)
    except (OSError, Unreadable) as error:
        raise ValueError(f"--arms must be a readable YAML file, got {str(path)!r}: {error}") from error
    try:
        return _from_mapping(raw)
    except ValueError as error:
        raise ValueError(f"{error} (in {path})") from error


def _from_mapping(raw: Any) -> ComparisonFile:
    if not isinstance(raw, Mapping):
        raise ValueError(f"a comparison must be `key: value` lines, got {type(raw).__name__}: write arms: and below it")
    for key in raw:
        if key not in KEYS:
            raise ValueError(unknown("key", str(key), KEYS))
    arms = raw.get("arms")
    if not isinstance(arms, Mapping) or not arms:
        raise ValueError(f"arms must be names with settings, got {arms!r}: write for instance `uniform: uniform`")
    targets = _mapping("targets", raw.get("targets"))
    return ComparisonFile(
        [_arm(str(name), value) for name, value in arms.items()],
        preset=_text("preset", raw.get("preset")),
        settings=tuple(_words("settings", raw.get("settings"))),
        seeds=_seeds(raw.get("seeds")),
        baseline=_text("baseline", raw.get("baseline")),
        learning_rates=parse_rates(_list(raw.get("learning_rates") or [])),
        targets=tuple(f"{metric}={value}" for metric, value in targets.items()),
        tasks={str(name): tuple(_words("tasks", value)) for name, value in _mapping("tasks", raw.get("tasks")).items()},
    )


def _seeds(value: Any) -> str | None:
    """Return what `--seeds` says: a number is how many, a list is which."""
    if value is None:
        return None
    return ",".join(map(str, value)) + "," * (len(value) == 1) if isinstance(value, list) else str(value)


def _arm(name: str, value: Any) -> Arm:
    words = _words(f"arm {name}", value)
    return arm_of(words, f"{name}: {value}", name)


def _words(key: str, value: Any) -> list[str]:
    """Return the settings of a list or of one line."""
    if value is None:
        return []
    if isinstance(value, str):
        return shlex.split(value)
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return list(value)
    raise ValueError(f"{key} must be settings, a line or a list of --key=value, got {value!r}: quote each of them")


def _mapping(key: str, value: Any) -> Mapping[Any, Any]:
    if value is None or isinstance(value, Mapping):
        return value or {}
    raise ValueError(f"{key} must be `name: value` lines, got {value!r}: write one below the other")


def _text(key: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"{key} must be a name, got {value!r}: quote it")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def parse_rates(given: str | Sequence[Any]) -> tuple[float, ...]:
    """Return the learning rates of `4e-4,8e-4` or of a list, sorted. Raise ValueError for anything else."""
    words = given.split(",") if isinstance(given, str) else list(given)
    rates = sorted({rate for word in words for rate in _rate(word)})
    if len(rates) != len(words):
        raise ValueError(f"learning rates must differ, got {given!r}: name each once")
    return tuple(rates)


def _rate(word: Any) -> Iterator[float]:
    try:
        rate = float(word)
    except (TypeError, ValueError):
        rate = 0.0
    if not 0 < rate < 1e3 or isinstance(word, bool):
        raise ValueError(f"a learning rate must be a number above 0, got {word!r}: pass --learning_rates 4e-4,8e-4")
    yield rate
