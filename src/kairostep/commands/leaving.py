"""Ends the process of a command cleanly."""

import sys


def leave_process_group() -> None:
    """Leave a gloo group before the interpreter shuts down.

    Otherwise its threads outlive the interpreter and sometimes abort the process (SIGABRT). That happens mostly in a
    process that waited for a failed rank, and the abort then hides the error.
    """
    distributed = sys.modules.get("torch.distributed")  # not imported for this: most commands have one process
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_backend() == "gloo":  # to leave an NCCL group may wait for a rank that is gone
        distributed.destroy_process_group()
