"""The few functions of `torch.distributed` that we need. Without a process group there is one rank."""

import re

import torch
import torch.distributed as dist
from torch import Tensor

LOST = re.compile(r"gloo.*(by peer|timed out|broken pipe|refused|read error|write error)", re.IGNORECASE | re.DOTALL)


def rank() -> int:
    """Return the number of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(value: Tensor) -> Tensor:
    """Return the sum of `value` over all ranks, with the same bits on each."""
    if world_size() == 1:
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total


def gather_over_ranks(value: Tensor) -> Tensor:
    """Return every rank's `value`, stacked in the order of ranks: (...) -> (world_size, ...)."""
    if world_size() == 1:
        return value[None]
    gathered = [torch.empty_like(value) for _ in range(world_size())]
    dist.all_gather(gathered, value.contiguous())
    return torch.stack(gathered)


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error says that another process ended or cannot be reached. gloo raises a plain RuntimeError."""
    if dist.is_available() and isinstance(error, dist.DistError):
        return True
    return world_size() > 1 and isinstance(error, RuntimeError) and LOST.search(str(error)) is not None
