"""The processes of a command that `accelerate launch` or `torchrun` has started."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from kairostep.commands.failures import RUN_ERROR, fail

if TYPE_CHECKING:
    from accelerate import PartialState

LONGEST_WAIT = timedelta(hours=24)  # for another process, which may write many files; a watch ends it if one is lost
LONGEST_SILENCE = 60.0  # seconds until a process is taken for lost, as --rank_timeout of `train`


@contextmanager
def open_processes(typed: str) -> Iterator["PartialState"]:
    """Yield the state of this process, whose device is set. Without a launcher there is one process.

    If another process is lost within the block, this one says which, and ends.

    Args:
        typed: The command, which the message repeats.
    """
    import torch
    from accelerate import PartialState

    from kairostep.parallelism import check_parallelism, launched
    from kairostep.training.process_watch import watch_processes
    from kairostep.training.run_errors import LostProcess

    check_parallelism()
    cpu = not torch.accelerator.is_available()  # else accelerate ignores torchrun's other processes
    state = PartialState(cpu=cpu, timeout=LONGEST_WAIT)
    again = f"what was written stays; go on with: {launched(typed, state.num_processes)}"
    watch = watch_processes(LONGEST_SILENCE, state.device, lambda: again)
    try:
        with watch.guard():
            yield state
    except LostProcess as error:
        fail(str(error), RUN_ERROR, speak=error.speaks)
    finally:
        watch.close()
