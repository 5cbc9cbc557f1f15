"""How processes of tests start, meet and end."""

import multiprocessing
import os
import random
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(  # what children need; our packages import nothing by themselves, so name the modules
    [
        "kairostep.commands.train",
        "kairostep.training.run",
        "kairostep.networks.unet",
        "kairostep.networks.uvit",
        "kairostep.generation.generate",
        "kairostep.integrations.accelerate",
        "sklearn.datasets",
        "pytest",
    ]
)

PORTS = range(20_000, 32_000)  # below those that the system gives to connections, which take a port at any moment


def free_port() -> int:
    """Return a port that nobody listens at."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def run_ranks(rank_does: Callable[..., None], *args: Any) -> None:
    """Call `rank_does(rank, *args)` in two processes, and raise what they raise."""
    torch.multiprocessing.start_processes(rank_does, args, nprocs=2, start_method="forkserver")


def leave_group() -> NoReturn:
    """End a process of a gloo group, after it has written what it found.

    DistributedDataParallel never lets go of its group. The threads of gloo then outlive `destroy_process_group`, and
    one that still frees a tensor while the interpreter ends aborts the process (SIGABRT). So the interpreter does not.
    """
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
