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


def own_rows(values: Tensor, num_local: int) -> Tensor:
    """Return this rank's part (num_local, ...) of values for the rows of the batch over all ranks."""
    first = rank() * num_local
    return values[first : first + num_local]


def own_positions(num: int) -> range:
    """Return which of `num` positions, spread evenly over the batch of all ranks, this rank holds.

    Position i is row i * N // num of N = W * num_local: `spread_rows` returns it. Whatever the sizes of their batches,
    each position belongs to one rank.
    """
    first, stop = (-(-num * number // world_size()) for number in (rank(), rank() + 1))
    return range(first, stop)


def spread_rows(num: int, num_local: int, device: torch.device) -> Tensor:
    """Return this rank's rows, counted within its batch of `num_local`, at its `own_positions`, int64."""
    positions = own_positions(num)
    position = torch.arange(positions.start, positions.stop, device=device)
    return position * (num_local * world_size()) // num - rank() * num_local


def place_spread_rows(values: Tensor, num: int) -> Tensor:
    """Return (num, ...) with this rank's part of rows spread evenly over those of all ranks, and 0 for other ranks'.

    `values` (num_local, ...) are those of this rank's batch. The sum over ranks has all of them.
    """
    own, rows = own_positions(num), spread_rows(num, len(values), values.device)
    spread = values.new_zeros(num, *values.shape[1:])
    spread[own.start : own.stop] = values[rows]
    return spread


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error says that another process ended or cannot be reached. gloo raises a plain RuntimeError."""
    if dist.is_available() and isinstance(error, dist.DistError):
        return True
    return world_size() > 1 and isinstance(error, RuntimeError) and LOST.search(str(error)) is not None
