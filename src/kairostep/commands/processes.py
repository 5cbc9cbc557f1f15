"""The processes of a command that `accelerate launch` or `torchrun` has started."""

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import PartialState

LONGEST_WAIT = timedelta(hours=24)  # for another process, which may write many files while the others wait


def open_processes() -> "PartialState":
    """Return the state of this process, whose device is set. Without a launcher there is one process."""
    import torch
    from accelerate import PartialState

    from kairostep.parallelism import check_parallelism

    check_parallelism()
    cpu = not torch.accelerator.is_available()  # else accelerate ignores torchrun's other processes
    return PartialState(cpu=cpu, timeout=LONGEST_WAIT)
