"""Which process of a run is lost, why, and who tells the user."""

import os
import signal
from dataclasses import dataclass
from typing import NamedTuple

from kairostep.ranks import rank, world_size
from kairostep.training.run_errors import RunError

SIGNALLED = 128  # and the number of a signal: the exit code of a process that it stopped


@dataclass(frozen=True)
class Loss:
    """Which process is lost, and what became of it."""

    rank: int
    name: str  # process id and machine
    what: str

    def __str__(self) -> str:
        return f"process {self.rank} of {world_size()}{f' ({self.name})' if self.name else ''} {self.what}"


class Silence(NamedTuple):
    """How long a process has been silent. The longer one is the greater."""

    seconds: float
    rank: int
    name: str  # process id and machine

    def __str__(self) -> str:
        return f"process {self.rank} of {world_size()} ({self.name})"


QUIET = Silence(0.0, 0, "")


def speaks(lost: int) -> bool:
    """Whether this process, if that one is lost, has the lowest rank of those on its machine and tells the user."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return local == 0 or (local == 1 and lost == rank() - 1)


def reason_of(error: BaseException) -> str:
    """Return why a process ends, in one line for the others."""
    text = next(iter(str(error).splitlines()), "")
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > SIGNALLED:
        return f"stopped by {signal.Signals(error.code - SIGNALLED).name}"
    if isinstance(error, RunError):
        return text.partition("; ")[0]  # what follows says how to go on, which they say too
    return text if isinstance(error, ValueError | OSError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
