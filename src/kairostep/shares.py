"""Deals work on rows to processes. What they make is what one process makes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from kairostep.ranks import rank, sum_over_ranks, world_size

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Share:
    """The part of some work that one of several processes does.

        losses = torch.zeros(len(x0), dtype=torch.float64, device=x0.device)
        for rows in share.batches(len(x0), batch_size):
            losses[rows.start : rows.stop] = ...
        losses = share.sum(losses)  # of all rows, in every process

    Batches are dealt whole, so that each has the rows that it has in one process, and its numbers the same bits.
    All processes call the same methods in the same order. With one process the methods do nothing.

    Args:
        rank: Number of this process.
        num_processes: Number of processes.
    """

    rank: int = 0
    num_processes: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def batches(self, num_rows: int, batch_size: int) -> Iterator[range]:
        """Yield the rows of this process's batches, one in `num_processes` of all batches."""
        for start in range(self.rank * batch_size, num_rows, self.num_processes * batch_size):
            yield range(start, min(start + batch_size, num_rows))

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum over processes, on the device of the group. Rows that others make are 0 in `own`."""
        return sum_over_ranks(own) if self.num_processes > 1 else own

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes in the order of ranks. Values are pickled: they should be small."""
        if self.num_processes == 1:
            return [value]
        values: list[Value | None] = [None] * self.num_processes
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def gather_batches(self, own: list[Value]) -> list[Value]:
        """Return what all processes made of their batches, in the order of batches."""
        rounds = zip_longest(*self.gather(own))
        return [made for around in rounds for made in around if made is not None]

    def from_first(self, value: Value) -> Value:
        """Return the first process's value."""
        if self.num_processes == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.gather(None)

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """Run a block in the first process, then in the others, which find what the first one wrote."""
        if not self.is_first:
            self.wait()
        try:
            yield
        finally:
            if self.is_first:
                self.wait()  # also after an error: the others run into it themselves


WHOLE = Share()
"""All of the work: one process."""


def share_of_process() -> Share:
    """Return the share of this process. It is the whole without a process group."""
    return Share(rank(), world_size())
