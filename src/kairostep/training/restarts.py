"""Lets `torchrun --max-restarts` start a run again after a process was lost."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


def join_after_restart(timeout: timedelta) -> None:
    """Join the process group of a restart on one machine. Do nothing at a first start.

    torchrun keeps its key-value store between restarts, and in it the addresses of processes that have ended: the next
    ones connect to those, and fail or wait for ever (pytorch/pytorch#135712). So each restart gets keys of its own. The
    number of restarts is the same for all processes of one machine, but not for those of several.

    Args:
        timeout: Of the collectives of the group.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    on_one_machine = os.environ.get("GROUP_WORLD_SIZE") == "1"
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restart == "0" or not on_one_machine or not shares_store or dist.is_initialized():
        return
    both = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"  # as accelerate chooses
    backend = ("cuda:nccl,cpu:gloo" if both else "nccl") if torch.cuda.is_available() else "gloo"
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    own = PrefixStore(f"restart {restart}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)
