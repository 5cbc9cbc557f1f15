"""How a command fails: one line that says why, and an exit code."""

import os
import sys
import time
from contextlib import suppress
from typing import NoReturn

from kairostep.installation import install_command, package_of
from kairostep.ranks import is_lost_rank, rank, world_size

USAGE_ERROR, RUN_ERROR = 2, 1
SECONDS_FOR_FIRST_PROCESS = 15.0  # longer than its watch takes to end it
EXTRAS = {"evaluate": "eval", "report": "report"}  # other commands need the extra `train`
NO_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")  # from torch, on CPU and GPU


def words_for(error: BaseException) -> str | None:
    """Return one line on an error, None if only its traceback helps."""
    if is_lost_rank(error):
        return (
            f"process {rank()} of {world_size()} stops, since another has ended or cannot be reached: "
            "the output of that one says why; the same command goes on where it was"
        )
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        reason = str(error).splitlines()[0] if str(error) else "of Python"
        return f"memory ran out ({reason}): lower --batch_size, raise --accumulate, or take a smaller network"
    return None


def missing_for(command: str, error: ModuleNotFoundError) -> str:
    """Return which package a command lacks, and the line that installs it."""
    package = package_of(error.name)
    extra = "report" if package in ("jinja2", "markupsafe", "matplotlib", "plotly") else EXTRAS.get(command, "train")
    return f"kairostep {command} needs {package}, which is not installed: {install_command(extra)}"


def wait_for_first_process() -> None:
    """Wait under torchrun if this is not the first process of its machine. The first then prints what is wrong.

    It fails in the same way, or its watch was told. When it has ended, torchrun ends this process. If it has not ended
    after a while, this process goes on and speaks.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        with suppress(KeyboardInterrupt):
            time.sleep(SECONDS_FOR_FIRST_PROCESS)


def fail(message: str, code: int, *, speak: bool = True) -> NoReturn:
    """Print what is wrong, unless another process does, and exit."""
    if speak:
        print(f"kairostep: error: {message}", file=sys.stderr)
    raise SystemExit(code)
