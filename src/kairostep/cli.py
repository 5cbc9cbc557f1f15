"""kairostep train | presets | data: what a person types."""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

import kairostep

USAGE_ERROR, RUN_ERROR = 2, 1

TRAIN_TEXT = """\
Settings are --key=value, options of a part --part.option=value, as in

  kairostep train digits --sampler=adaptive --sampler.floor=0.2
  kairostep train images --data.folder=photos --data.size=64 --process=flow
  kairostep train --config runs/digits/config.yaml

The same command goes on where a run was stopped. Several GPUs: accelerate launch --multi_gpu -m kairostep train ...
"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all commands do."""

    def error(self, message: str) -> NoReturn:
        """Leave with the exit code of wrong usage."""
        fail(f"{message}: see {self.prog} --help", USAGE_ERROR)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; wrong usage ends with exit code 2, a run that cannot go on with 1, both without a traceback."""
    logging.basicConfig(format="kairostep: %(message)s", level=logging.WARNING)
    parser = make_parser()
    known, settings = parser.parse_known_args(arguments)
    if settings and known.command != "train":
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    try:
        known.run(known, settings)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        fail(f"this command needs {package}: pip install 'kairostep[train]'", RUN_ERROR)
    except ValueError as error:
        fail(str(error), USAGE_ERROR)
    except OSError as error:
        fail(str(error), RUN_ERROR)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = Parser("kairostep", description=kairostep.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    train = commands.add_parser(
        "train", help="train a model", description=TRAIN_TEXT, formatter_class=raw, add_help=False, allow_abbrev=False
    )
    train.add_argument("preset", nargs="?", help="an experiment that `kairostep presets` lists")
    train.add_argument("--config", type=Path, help="a YAML file instead of a preset, for instance config.yaml of a run")
    train.add_argument("-h", "--help", action="store_true", help="show all settings")
    train.set_defaults(run=run_train, parser=train)
    presets = commands.add_parser("presets", help="list the presets")
    presets.set_defaults(run=run_presets)
    data = commands.add_parser("data", help="obtain and convert a data set")
    data.add_argument("name", choices=["cifar10"])
    data.add_argument("folder", type=Path, help="where it is, or shall be")
    data.set_defaults(run=run_data)
    return parser


def run_train(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Train, or go on with a run."""
    if known.help:
        print(known.parser.format_help() + "\n" + settings_help())
        return
    from kairostep.training import Run, RunError

    config = configure(known.preset, known.config, settings)
    run = Run(config)  # ValueError: what the user asked for cannot be
    if run.accelerator.is_main_process:
        print(run.description, flush=True)
    was_finished = run.finished
    try:
        run.train()
    except RunError as error:
        fail(str(error), RUN_ERROR)
    if was_finished and run.accelerator.is_main_process:
        print("nothing to do, all steps were taken before: raise --steps to go on, or pass another --output")


def configure(name: str | None, path: Path | None, settings: Sequence[str]) -> Any:
    """Return the config of a preset or a file with the settings applied, and an output directory."""
    from kairostep.experiments.config import load, with_overrides
    from kairostep.experiments.presets import preset

    if (name is None) == (path is None):
        raise ValueError("train takes a preset or --config FILE: `kairostep presets` lists the presets")
    if path is not None:
        config = with_overrides(load(path), settings)
        return config if config.output else replace(config, output=f"runs/{path.stem}")
    assert name is not None
    plain = preset(name)
    config = with_overrides(plain, settings)
    return config if config.output else replace(config, output=f"runs/{run_name(name, plain, config)}")


def run_name(name: str, plain: Any, config: Any) -> str:
    """Return the preset's name and, after it, what was chosen otherwise."""
    parts = [name]
    for key in ("process", "prediction", "weighting", "sampler", "network"):
        chosen = getattr(config, key)
        if chosen != getattr(plain, key):
            parts.append(str(getattr(chosen, "name", chosen)))
    return "-".join(parts + ([f"seed{config.seed}"] if config.seed != plain.seed else []))


def run_presets(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """List the presets."""
    from kairostep.experiments.presets import PRESETS

    width = max(map(len, PRESETS))
    for name, preset in PRESETS.items():
        print(f"{name:{width}}  {preset.text}")


def run_data(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Obtain CIFAR-10."""
    from kairostep.data import obtain_cifar10

    print(obtain_cifar10(known.folder))


def settings_help() -> str:
    """Return one line for each setting, and the names that parts can have."""
    from kairostep import experiments

    plain = experiments.Config()
    lines = []
    for field in fields(plain):
        value = getattr(plain, field.name)
        lines.append(f"  --{field.name}={getattr(value, 'name', value)}".ljust(32) + f" {field.metadata['help']}")
    tables = {"data": "DATASETS", "network": "NETWORKS", "process": "PROCESSES", "weighting": "WEIGHTINGS"}
    names = {key: getattr(experiments, table) for key, table in (tables | {"sampler": "SAMPLERS"}).items()}
    named = [f"  --{key}: {', '.join(table)}" for key, table in names.items()]
    return "\n".join(["settings and their defaults:", *lines, "", "names:", *named])


def fail(message: str, code: int) -> NoReturn:
    """Say what is wrong and leave."""
    print(f"kairostep: error: {message}", file=sys.stderr)
    raise SystemExit(code)
