"""Lets `torchrun --max-restarts` start a run again after a process was lost."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def join_after_restart(timeout: timedelta) -> None:
    """Join the process group of a restart on one machine. Do nothing at a first start.

    torchrun keeps its key-value store between restarts, and in it the addresses of processes that have ended: the next
    ones connect to those, and fail or wait for ever (pytorch/pytorch#135712). So each restart gets keys of its own. The
    number of restarts is the same for all processes of one machine, but not for those of several.

    Args:
        timeout: Of the collectives of the group.
    """
    restart, on_one_machine = (
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        os.environ.get("GROUP_WORLD_SIZE") == "1",
    )
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restart == "0" or not on_one_machine or not shares_store or dist.is_initialized():
        return
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=dist.PrefixStore(f"restart {restart}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
