"""Differences between runs, and warnings about comparing them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kairostep.reports.arms import Arm, ShownRun, flat, text_of
from kairostep.reports.rounding import MISSING
from kairostep.runs.history import RunHistory
from kairostep.runs.metrics import number

INCEPTION = {"inception-2015-12-05", "null"}  # as measurements and configs name it
PLACES = ("output", "cache", "resume", "seed", "data.path")


@dataclass(frozen=True)
class Difference:
    """A setting and its value in each arm."""

    key: str
    cells: list[str]


@dataclass(frozen=True)
class Differences:
    """Settings that differ, one column per arm."""

    columns: list[str]
    rows: list[Difference]


def differences(arms: Sequence[Arm]) -> Differences | None:
    """Return the settings and circumstances in which runs differ, apart from paths and seeds.

    A part whose name differs between arms has one row, together with its options.
    """
    settings = [[_settings(run.history.config, _differing_parts(arms)) for run in arm.runs] for arm in arms]
    keys = dict.fromkeys(key for arm in settings for run in arm for key in run if key not in PLACES)
    rows = []
    for key in keys:
        values = [list(dict.fromkeys(run.get(key, MISSING) for run in arm)) for arm in settings]
        if len({value for arm in values for value in arm}) > 1:
            rows.append(Difference(key, ["; ".join(arm) for arm in values]))
    return Differences([arm.name for arm in arms], rows) if rows else None


def _differing_parts(arms: Sequence[Arm]) -> set[str]:
    """Return the parts that do not have the same name in all arms."""
    configs = [arm.first.config for arm in arms]
    parts = {
        key for config in configs for key, value in config.items() if isinstance(value, Mapping) and "name" in value
    }
    return {part for part in parts if len({arm.first.part(part) for arm in arms}) > 1}


def _settings(config: Mapping[str, Any], whole: set[str]) -> dict[str, str]:
    """Return settings as text by dotted names. Each part in `whole` is one entry, with its options."""
    rest = {key: value for key, value in config.items() if key not in whole or not isinstance(value, Mapping)}
    settings = {key: text_of(value) for key, value in flat(rest).items()}
    for part in [key for key in config if key not in rest]:
        options = [f"{key} {text_of(value)}" for key, value in flat(config[part]).items() if key != "name"]
        settings[part] = ": ".join([text_of(config[part].get("name")), *([", ".join(options)] if options else [])])
    return settings


def warnings(runs: Sequence[ShownRun]) -> list[str]:
    """Return warnings for the reader: unfinished runs, and seconds and image quality that cannot be compared."""
    told = []
    for run in runs:
        unfinished = [run.history.state_text] if run.history.state != "finished" else []
        if unfinished or run.history.problems:
            told.append(f"{run.name}: {'; '.join([*unfinished, *run.history.problems])}.")
    devices = dict.fromkeys(run.history.devices for run in runs)
    if len(devices) > 1:
        told.append(f"Seconds do not compare, the runs were made on different devices: {', '.join(devices)}.")
    return [*told, *_quality_warnings([run.history for run in runs])]


def _quality_warnings(runs: Sequence[RunHistory]) -> Iterator[str]:
    """Yield warnings where FID or KID of the runs are of other numbers of images, or by other networks."""
    for what in ("fid", "kid"):
        lines = [(run, line) for run in runs if (line := run.measured(what)) is not None]
        nums = dict.fromkeys(f"{num:,.0f}" for _, line in lines if (num := number(line.get("n"))) is not None)
        networks = dict.fromkeys(text_of(line.get("features") or run.config.get("features")) for run, line in lines)
        if len(nums) > 1:
            yield f"{what.upper()}s do not compare: they use different numbers of images ({', '.join(nums)})."
        if len({*networks} - INCEPTION) + any(name in INCEPTION for name in networks) > 1:
            names = ["Inception" if name in INCEPTION else name for name in networks]
            yield f"{what.upper()}s do not compare: they use different networks ({', '.join(dict.fromkeys(names))})."
