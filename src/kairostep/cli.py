"""The command line: kairostep train | compare | generate | evaluate | preview | analyse | report | ..."""

import argparse
import atexit
import logging
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module

import kairostep
from kairostep.began import BEGAN
from kairostep.commands.failures import RUN_ERROR, USAGE_ERROR, fail, missing_for, wait_for_first_process, words_for
from kairostep.commands.leaving import leave_process_group
from kairostep.commands.parser import Parser, refuse_misspelled, refuse_unread
from kairostep.commands.streams import lossy_output, silent_without_reader

NAMES = (
    *("train", "generate", "evaluate", "preview", "compare", "find-lr"),
    *("analyse", "report", "presets", "patch", "doctor", "data"),
)
COMMANDS = {name: import_module(f"kairostep.commands.{name.replace('-', '_')}") for name in NAMES}
WITH_SETTINGS = ("train", "preview", "analyse", "compare", "find-lr")  # of training, as --key=value
LONG = ("train", "generate", "evaluate", "analyse", "compare", "find-lr")  # on disk: they go on without a reader


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Wrong usage exits with code 2, a run that cannot continue with 1, both without a traceback."""
    logging.basicConfig(format="kairostep: %(message)s", level=logging.WARNING)
    atexit.unregister(leave_process_group)  # of an earlier call
    atexit.register(leave_process_group)
    with silent_without_reader():
        read_and_run(arguments)


def read_and_run(arguments: Sequence[str] | None) -> None:
    """Parse the arguments and run the command."""
    parser = make_parser()
    known, settings = parser.parse_known_args(arguments)
    known.began = BEGAN if arguments is None else time.monotonic()  # a caller in Python has imported this before
    known.typed = shlex.join(["kairostep", *(sys.argv[1:] if arguments is None else arguments)])
    if [] in vars(known).values():  # argparse reads --option=-- as an empty list
        known.parser.error("an option must have a value, got --: leave it out, or pass one")
    refuse = refuse_misspelled if known.command in WITH_SETTINGS else refuse_unread
    refuse(known.parser, settings)
    with lossy_output(known.command in LONG):
        run_command(known, settings)


def run_command(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Run the command of parsed arguments, and turn its failures into messages."""
    try:
        known.run(known, settings)
    except ModuleNotFoundError as error:
        fail(missing_for(known.command, error), RUN_ERROR)
    except ValueError as error:
        wait_for_first_process()
        fail(str(error), USAGE_ERROR)
    except BrokenPipeError:
        raise
    except OSError as error:
        fail(str(error), RUN_ERROR)
    except (RuntimeError, MemoryError) as error:
        if (message := words_for(error)) is None:
            raise
        fail(message, RUN_ERROR)
    except KeyboardInterrupt:
        kept = getattr(known, "kept", "")  # what a command that was interrupted leaves, where it says so
        fail(f"interrupted: {kept}" if kept else "interrupted", 128 + signal.SIGINT)


def make_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser("kairostep", description=kairostep.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(
            commands.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **command.PARSER)
        )
    return parser
