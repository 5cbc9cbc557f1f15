"""Ranks as threads of one process, with the few functions of torch.distributed that kairostep uses."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from kairostep import ranks

T = TypeVar("T")


class ThreadGroup:
    """Stands for the module torch.distributed in `kairostep.ranks`: each thread is a rank."""

    ReduceOp = torch.distributed.ReduceOp
    DistError = torch.distributed.DistError

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.local = threading.local()
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.sent: list[Any] = [None] * world_size
        self.calls: Counter[str] = Counter()  # of the first rank
        self.sizes: list[int] = []  # of what it sent, in numbers

    def is_available(self) -> bool:
        """Return True."""
        return True

    def is_initialized(self) -> bool:
        """Return whether this thread is a rank."""
        return hasattr(self.local, "rank")

    def get_rank(self) -> int:
        """Return the number of this thread."""
        rank: int = self.local.rank
        return rank

    def get_world_size(self) -> int:
        """Return the number of threads."""
        return self.world_size

    def exchange(self, name: str, value: Tensor) -> list[Tensor]:
        """Return what all ranks sent in the same call, in the order of ranks; raise if their calls do not match."""
        if self.local.rank == 0:
            self.calls[name] += 1
            self.sizes.append(value.numel())
        self.sent[self.local.rank] = name, value.shape, value.dtype, value.clone()
        self.barrier.wait()
        sent = list(self.sent)
        self.barrier.wait()
        assert len({(name, shape, dtype) for name, shape, dtype, _ in sent}) == 1, [entry[:3] for entry in sent]
        return [value for *_, value in sent]

    def all_reduce(self, value: Tensor, operation: Any = torch.distributed.ReduceOp.SUM) -> None:
        """Replace the value by the sum or the largest over ranks."""
        values = torch.stack(self.exchange("all_reduce", value))
        value.copy_(values.amax(0) if operation == torch.distributed.ReduceOp.MAX else values.sum(0))

    def all_gather(self, gathered: list[Tensor], value: Tensor) -> None:
        """Fill the list with the values of all ranks."""
        for own, other in zip(gathered, self.exchange("all_gather", value), strict=True):
            own.copy_(other)


def run_ranks(
    monkeypatch: pytest.MonkeyPatch, world_size: int, work: Callable[[int], T]
) -> tuple[list[T], Counter[str]]:
    """Return what the ranks return, and how often the first of them called which function."""
    group = ThreadGroup(world_size)
    monkeypatch.setattr(ranks, "dist", group)

    def be_rank(rank: int) -> T:
        group.local.rank = rank
        try:
            return work(rank)
        except BaseException:
            group.barrier.abort()  # or the others would wait
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(be_rank, rank) for rank in range(world_size)]
    monkeypatch.undo()
    errors = [future.exception() for future in futures if future.exception() is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures], group.calls
