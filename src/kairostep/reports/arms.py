"""Groups runs into arms: runs that differ only in their seed. Both are named after their folders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairostep.reports.run_names import arm_name, run_names
from kairostep.runs.history import RunHistory

# Settings that do not influence the weights, and places: runs of one arm may differ in them
IGNORED = {"seed", "output", "resume", "workers", "cache", "trackers", "keep_checkpoints", "checkpoint_every"}
IGNORED |= {"log_every", "density_every", "evaluate_every", "sample_every", "sample_steps", "data.path", "provenance"}
IGNORED |= {"fid_every", "fid_images", "inception", "inception_sha256", "features", "keep_every"}
PARTS = ("sampler", "weighting", "data", "network", "process", "prediction")
NUMBERS = ("steps", "batch_size", "learning_rate", "seed")
MAX_LINE = 120  # letters of a line in a tooltip
# Held-out losses of two runs can be compared if these agree
SAME_TASK = ("data", "autoencoder", "process", "prediction", "held_out_images")


@dataclass(frozen=True)
class ShownRun:
    """A run with its names on the page."""

    key: str  # in scripts
    name: str
    short: str  # within its arm
    arm: str
    settings: str  # a few lines
    history: RunHistory


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seeds."""

    name: str
    settings: str  # in which it differs from the other arms
    runs: list[ShownRun]
    baseline: bool

    @property
    def first(self) -> RunHistory:
        """The first run, for settings that all runs share."""
        return self.runs[0].history


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted names: `part.option` for options, and `part` for the name of a part."""
    settings: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            settings |= flat(value, f"{name}.")
        else:
            settings[name] = value
    return settings


def arms_of(
    histories: Sequence[RunHistory], called: Mapping[Path, str] | None = None, baseline_arm: str | None = None
) -> list[Arm]:
    """Return the arms: first the baseline, then the others in the order of their first runs.

    Args:
        histories: The runs.
        called: Names of runs by directory. Default: as few folder names as make them unique.
        baseline_arm: Name of the baseline. Default: uniform draws without a weighting.
    """
    grouped: dict[str, list[RunHistory]] = {}
    for history in histories:
        grouped.setdefault(_identity(history), []).append(history)
    members = list(grouped.values())
    settings = _describe([arm_settings(group[0]) for group in members])
    found = run_names([history.directory for history in histories])
    names = {id(run): (called or {}).get(run.directory, name) for run, name in zip(histories, found, strict=True)}
    arm_names = _arm_names(members, names)
    baseline = (
        arm_names.index(baseline_arm) if baseline_arm in arm_names else _baseline([group[0] for group in members])
    )
    keys = {id(history): f"r{i}" for i, history in enumerate(histories)}
    arms = []
    for i, (name, group) in enumerate(zip(arm_names, members, strict=True)):
        runs = [
            ShownRun(keys[id(run)], names[id(run)], short, name, _settings_text(run, settings[i]), run)
            for run, short in zip(group, _short(group, names), strict=True)
        ]
        arms.append(Arm(name, settings[i], runs, i == baseline))
    return sorted(arms, key=lambda arm: not arm.baseline)


def same_task(one: RunHistory, other: RunHistory) -> bool:
    """Whether the held-out losses of two runs can be compared."""
    return all(_task(one, key) == _task(other, key) for key in SAME_TASK)


def text_of(value: Any) -> str:
    """Return a setting as one would type it."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def _task(history: RunHistory, key: str) -> Any:
    value = history.config.get(key)
    return {k: v for k, v in value.items() if k != "path"} if isinstance(value, Mapping) else value


def arm_settings(history: RunHistory) -> dict[str, Any]:
    """Return the settings that all runs of an arm share."""
    settings = {key: value for key, value in history.config.items() if key not in IGNORED}
    return {key: value for key, value in flat(settings).items() if key not in IGNORED}


def _identity(history: RunHistory) -> str:
    settings = arm_settings(history)
    return repr(sorted(settings.items(), key=lambda item: item[0])) if settings else str(history.directory)


def _describe(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return, for each arm, the settings in which it differs from the others."""
    keys = list(dict.fromkeys(key for settings in arms for key in settings))
    return [_description(settings, [key for key in keys if _differs(key, settings, arms)]) for settings in arms]


def _differs(key: str, settings: Mapping[str, Any], arms: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a setting differs between arms. Options of a part are compared only among arms that have this part."""
    part, dot, option = key.partition(".")
    if dot and option != "name":
        part_name = settings.get(f"{part}.name")
        arms = [other for other in arms if other.get(f"{part}.name") == part_name]
    return key in settings and any(repr(other.get(key)) != repr(settings[key]) for other in arms)


def _description(settings: Mapping[str, Any], keys: Sequence[str]) -> str:
    if not keys:
        return text_of(settings.get("sampler.name", "run"))
    pieces = []
    if "sampler.name" in keys or any(key.startswith("sampler.") for key in keys):
        pieces.append(text_of(settings.get("sampler.name")))
    for key in keys:
        part, _, option = key.partition(".")
        if key == "sampler.name" or (key == "weighting.name" and settings[key] == "constant" and pieces):
            continue
        pieces.append(text_of(settings[key]) if option == "name" else f"{option or part} {text_of(settings[key])}")
    return " · ".join(pieces)


def _arm_names(members: Sequence[Sequence[RunHistory]], names: Mapping[int, str]) -> list[str]:
    """Return a unique name for each arm."""
    found = []
    for group in members:
        of_runs = [names[id(run)] for run in group]
        found.append(arm_name(of_runs, [run.seed for run in group], [run.directory for run in group]))
    return [name if found.count(name) == 1 else f"{name} #{i + 1}" for i, name in enumerate(found)]


def _short(group: Sequence[RunHistory], names: Mapping[int, str]) -> list[str]:
    """Return short names of the runs of an arm: their seeds, if these are unique."""
    seeds = [text_of(run.seed) for run in group]
    known = all(run.seed is not None for run in group) and len(set(seeds)) == len(seeds)
    return seeds if known else [names[id(run)] for run in group]


def _settings_text(history: RunHistory, difference: str) -> str:
    """Return the most important settings of a run, one per line, for a tooltip."""
    lines = [difference]
    for part in PARTS:
        value = history.config.get(part)
        options = flat(value) if isinstance(value, Mapping) else {}
        told = [f"{name} {text_of(option)}" for name, option in options.items() if name != "name"]
        lines += [f"{part}: {', '.join([history.part(part), *told])}"] if history.part(part) else []
    lines += [f"{name}: {text_of(history.config[name])}" for name in NUMBERS if name in history.config]
    return "\n".join([*(line[:MAX_LINE] for line in lines), str(history.directory)])


def _baseline(firsts: Sequence[RunHistory]) -> int:
    """Return the baseline: the arm with uniform draws and no weighting, else the first."""
    plain = [
        i for i, run in enumerate(firsts) if (run.part("sampler"), run.part("weighting")) == ("uniform", "constant")
    ]
    plainest = [i for i in plain if not (firsts[i].config.get("pairs") or firsts[i].config.get("stable_target"))]
    return [*plainest, *plain, 0][0]
