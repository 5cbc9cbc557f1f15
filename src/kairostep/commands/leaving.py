"""How a process of a command ends."""

import sys


def leave_process_group() -> None:
    """Leave a gloo group while the interpreter is whole.

    Its threads would outlive the interpreter else, and now and then abort the process (SIGABRT), above all one that
    waited for a rank that failed: the abort then hides the error.
    """
    distributed = sys.modules.get("torch.distributed")  # not imported for this: most commands have one process
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_backend() == "gloo":  # NCCL's end may wait for a rank that is gone
        distributed.destroy_process_group()
