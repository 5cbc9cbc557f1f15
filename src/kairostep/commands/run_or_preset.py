"""Finds what a command is about: a run, a preset or plain settings."""

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kairostep.experiments import PRESETS, Config, preset
from kairostep.experiments.command_line import run_name, settle, take_preset
from kairostep.experiments.config import load, to_dict, with_overrides
from kairostep.registry import unknown
from kairostep.runs.directory import provenance

Train = Callable[[Config], None]
"""Trains a run, or resumes it."""

MAX_STEPS = 1000  # of a preset that is trained for an analysis, unless --steps is passed
NUM_CHECKPOINTS = 5


@dataclass(frozen=True)
class RunOrPreset:
    """A config, and the directory if it is that of a run."""

    config: Config
    directory: Path | None = None

    def facts(self, typed: str, device: torch.device) -> dict[str, Any]:
        """Return what a result depends on: command, config and provenance."""
        return {"command": typed, "config": to_dict(self.config), "provenance": provenance(device, 1)}


def find_run_or_preset(settings: Sequence[str]) -> RunOrPreset:
    """Return the named run or preset, or the defaults if none is named, with the settings applied."""
    name, others = take_preset(settings)
    if name is None:
        return RunOrPreset(with_overrides(Config(), others))
    file = Path(name) / "config.yaml"
    if file.is_file():
        return RunOrPreset(with_overrides(load(file), others), None if others else Path(name))
    if name not in PRESETS and Path(name).exists():
        raise ValueError(f"a run directory must hold config.yaml, got {name}: pass one that `kairostep train` wrote")
    if name not in PRESETS:
        raise ValueError(unknown("run or preset", name, PRESETS))
    return RunOrPreset(with_overrides(preset(name), others))


def train_if_preset(settings: Sequence[str], directory: Path | None, train: Train) -> RunOrPreset:
    """Return the named run. A named preset is trained first, in a directory of its own, unless that is done."""
    name, others = take_preset(settings)
    if name is None:
        raise ValueError("an analysis must be of a run or a preset, got none: `kairostep presets` lists the presets")
    chosen = find_run_or_preset([name])
    if chosen.directory is None:
        config = short_training(name, others)
        directory = directory or Path(f"analysis-{run_name(name, preset(name), config)}")
        with redirect_stdout(sys.stderr):  # stdout gets only the result
            train(settle(replace(config, output=str(directory)), others))
        return find_run_or_preset([str(directory)])
    if others or directory:
        given = others[0] if others else "--directory"
        raise ValueError(f"a run must be analysed as it was trained, got {given}: leave it out, or name a preset")
    return chosen


def short_training(name: str, settings: Sequence[str]) -> Config:
    """Return the config of a preset with at most `MAX_STEPS` steps and several checkpoints, unless settings differ."""
    plain = preset(name)
    steps = with_overrides(replace(plain, steps=min(MAX_STEPS, plain.steps)), settings).steps
    every = max(1, steps // NUM_CHECKPOINTS)
    return with_overrides(replace(plain, steps=steps, checkpoint_every=every, keep_checkpoints=steps), settings)
