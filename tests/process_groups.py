"""How processes of tests meet, and how they end."""

import os
import random
import socket
import sys
from typing import NoReturn

import torch

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


def leave_group() -> NoReturn:
    """End a process of a gloo group, after it has written what it found.

    DistributedDataParallel never lets go of its group. The threads of gloo then outlive `destroy_process_group`, and
    one that still frees a tensor while the interpreter ends aborts the process (SIGABRT). So the interpreter does not.
    """
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
