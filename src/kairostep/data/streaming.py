"""Reads sets that do not fit into memory, in a given order, by worker processes that read ahead."""

import os
import signal
import warnings
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from kairostep.data.dataset import Dataset
from kairostep.stopping import stopping_signals

AHEAD = 4  # batches that each worker reads in advance

StoredBatch = tuple[Tensor, Tensor]  # samples as stored (B, ...), labels (B,) int64


class _Rows(TorchDataset[StoredBatch]):
    """Whole batches by their rows, so that workers send one tensor instead of many."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, rows: list[int]) -> StoredBatch:
        samples, labels = zip(*(self.dataset.read(row) for row in rows), strict=True)
        return torch.stack(samples), torch.tensor(labels)


def _unchanged(batch: Any) -> Any:
    return batch


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ignore signals in workers: a signal to the process group must not end them while the parent still saves."""
    for number in stopping_signals():
        signal.signal(number, signal.SIG_IGN)


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stream(
    dataset: Dataset, row_lists: Iterable[list[int]], *, device: torch.device, num_workers: int
) -> Generator[StoredBatch, None, None]:
    """Yield the batches of these rows, in order, on the device; closing the iterator ends the workers."""
    num_workers = min(num_workers, num_cores())
    loader = DataLoader(
        _Rows(dataset),
        sampler=row_lists,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=num_workers,
        worker_init_fn=_leave_signals_to_the_parent,
        prefetch_factor=AHEAD if num_workers else None,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # without it, starting workers would draw from the global stream
    )
    with warnings.catch_warnings():  # of Python 3.12 and later about any fork beside threads; workers use none of ours
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        batches = iter(loader)
    try:
        for samples, labels in batches:
            yield samples.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    finally:  # after an error the garbage collector would come late, and then wait 5 seconds for each worker
        getattr(batches, "_shutdown_workers", lambda: None)()
