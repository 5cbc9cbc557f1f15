"""`kairostep train`: trains a model and writes a run directory."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kairostep.commands.failures import RUN_ERROR, fail

if TYPE_CHECKING:
    from kairostep.experiments import Config

TEXT = """\
Settings are --key=value, options of a part --part.option=value, as in

  kairostep train digits --sampler=adaptive --sampler.floor=0.2
  kairostep train images --data.folder=photos --data.size=64 --process=flow
  kairostep train --config runs/digits/config.yaml

The same command goes on where a run was stopped. Several GPUs: torchrun --nproc_per_node NUM -m kairostep train ...
"""
PARSER = {
    "help": "train a model",
    "usage": "kairostep train PRESET | --config FILE [--key=value ...]",
    "description": TEXT,
    "add_help": False,
    "allow_abbrev": False,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments other than settings."""
    parser.add_argument("--config", type=Path, help="a YAML file instead of a preset, such as config.yaml of a run")
    parser.add_argument("-h", "--help", action="store_true", help="show all settings")
    parser.set_defaults(run=run)


def run(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Train a run, or resume it."""
    from kairostep.experiments.command_line import configure, settings_help, take_preset

    name, settings = take_preset(settings)
    if known.help:
        config = configure(name if known.config else name or "digits", known.config, settings)
        print(known.parser.format_help() + "\n" + settings_help(config))
        return
    train_run(configure(name, known.config, settings), known.began)


def train_run(config: "Config", began: float | None = None) -> None:
    """Train a config in its output directory, or resume the run there.

    Args:
        config: Of the run.
        began: `time.monotonic()` when the command began. Default: now.
    """
    from kairostep.training import LostProcess, Run, RunError

    if config.features:
        sys.path.append("")  # find modules in the working directory, as `python -m` does
    try:
        run = Run(config, began=began)  # raises ValueError if the config is impossible
        on_main, was_finished = run.accelerator.is_main_process, run.finished
        if on_main:
            print(run.description, flush=True)
            for note in run.notes:
                print(f"kairostep: note: {note}", file=sys.stderr, flush=True)
        run.train()
    except LostProcess as error:
        fail(str(error), RUN_ERROR, speak=error.speaks)
    except RunError as error:
        fail(str(error), RUN_ERROR)
    if was_finished and on_main:
        taken = run.trainer.step_number
        more = f"{taken} steps were taken before, more than --steps={config.steps}"
        why = more if taken > config.steps else "all steps were taken before"
        print(f"nothing to do, {why}: raise --steps to go on, or pass another --output")
