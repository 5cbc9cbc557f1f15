"""Turns command-line arguments into a config, names its run directory and lists all settings."""

import hashlib
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from kairostep.experiments.config import LATER, Config, load, to_dict, with_overrides
from kairostep.experiments.presets import preset
from kairostep.experiments.settings import AUTO
from kairostep.registry import REGISTRIES

UNNAMED = ("name", "folder", "path")  # not in the name of a run: paths of data are long
MAX_NAME = 120  # characters of a run's name; a longer name is cut and gets a digest


def take_preset(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the preset and the other arguments. The preset is neither --key=value nor the value after a --key."""
    for position, argument in enumerate(arguments):
        before = arguments[position - 1] if position else ""
        if not argument.startswith("--") and ("=" in before or not before.startswith("--")):
            return argument, [*arguments[:position], *arguments[position + 1 :]]
    return None, list(arguments)


def configure(name: str | None, path: Path | None, settings: Sequence[str]) -> Config:
    """Return the config of a preset or a file, with the settings applied and an output directory."""
    if (name is None) == (path is None):
        raise ValueError("train takes a preset or --config FILE: `kairostep presets` lists the presets")
    if path is not None:
        config = with_overrides(load(path, pipes=True), settings)
        return config if config.output else replace(config, output=f"runs/{path.stem}")
    assert name is not None
    plain = preset(name)
    config = with_overrides(plain, settings)
    if not config.output:
        config = replace(config, output=f"runs/{run_name(name, plain, config)}")
    return settle(config, settings)


def settle(config: Config, settings: Sequence[str]) -> Config:
    """Return the config of a preset with the warm-up and the classes that fit its steps and its run, unless set.

    The warm-up takes at most a tenth of the steps, since that of a preset is meant for a full training. A run that is
    already in the output directory keeps its warm-up, and stays without classes if it started without.
    """
    chosen = {argument.lstrip("-").partition("=")[0].replace("-", "_") for argument in settings}
    there = Path(config.output or "") / "config.yaml"
    run = load(there) if config.output and there.is_file() else None
    if "warmup_steps" not in chosen:
        kept = run is not None and run.warmup_steps <= config.warmup_steps
        shrunk = min(config.warmup_steps, config.steps // 10)
        config = replace(config, warmup_steps=run.warmup_steps if run is not None and kept else shrunk)
    if run is not None and config.label_dropout == AUTO:
        config = replace(config, label_dropout=run.label_dropout)
    return config


def run_name(name: str, plain: Config, config: Config) -> str:
    """Return the name of a run: the preset, then the settings that differ from it and influence the weights."""
    before, after, parts = to_dict(plain), to_dict(config), [name]
    for key, value in after.items():
        if value == before[key] or key in {*LATER, "autoencoder"}:
            continue
        if not isinstance(value, dict):
            parts.append(f"{key}={value}")
            continue
        old = before[key] if before[key]["name"] == value["name"] else {}
        parts += [value["name"]] if not old else []
        changed = [option for option in value if option not in UNNAMED and old.get(option) != value[option]]
        parts += [f"{option}={value[option]}" for option in changed]
    named = "-".join(parts).replace("/", "_").replace(":", ".").replace(" ", "")
    return named if len(named) <= MAX_NAME else f"{named[:MAX_NAME]}-{hashlib.sha256(named.encode()).hexdigest()[:8]}"


def settings_help(config: Config) -> str:
    """Return the help text: a line for each setting, the names of parts, and the options of the chosen parts."""
    import kairostep.experiments.parts  # noqa: F401  # registers all names; it brings the libraries that training needs

    lines, options = [], []
    for kind, registry in REGISTRIES.items():
        chosen = getattr(config, kind)
        if chosen.name in registry:
            given, valid = chosen.options, registry.options_of(chosen.name)
            values = {name: "..." if option.required else option.default for name, option in valid.items()} | given
            shown = [f"{name}={values[name]}" for name in valid]
            options.append(f"  --{kind}={chosen.name}: {', '.join(shown) or 'none'}")
    for field in fields(config):
        value = getattr(config, field.name)
        lines.append(f"  --{field.name}={getattr(value, 'name', value)}".ljust(32) + f" {field.metadata['help']}")
    named = [f"  --{kind}: {', '.join(registry)}" for kind, registry in REGISTRIES.items()]
    return "\n".join(
        [
            "settings, as the preset or the defaults have them:",
            *lines,
            "",
            "names of the parts, each but a process also as module:Class:",
            *named,
            "",
            "options of the parts chosen here, each as --part.option=value:",
            *options,
        ]
    )
