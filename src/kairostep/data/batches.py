"""Endless training batches: seeded, resumable at any step without state, the same on any number of ranks."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from kairostep.checks import count, share
from kairostep.counters import RowRandom, key_tensor, mix_seed
from kairostep.data.dataset import Dataset
from kairostep.data.streaming import StoredBatch, stream

RESIDENT_BYTES = 2 * 2**30  # a set of up to this size is kept on the device
_ORDER, _AUGMENTATION, _LABELS = 0, 1, 2  # what a seed is for


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on."""

    x0: Tensor  # (B, ...) float32
    labels: Tensor | None  # (B,) int64; num_classes where dropped


class Order:
    """An endless sequence of random permutations of the rows. The latest one stays on the device."""

    def __init__(self, num_rows: int, seed: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self.device = device
        self._latest: tuple[int, Tensor] | None = None

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the rows at the positions [start, stop), (stop - start,) int64."""
        parts = []
        while start < stop:
            epoch, first = divmod(start, self.num_rows)
            last = min(self.num_rows, first + stop - start)
            parts.append(self._permutation(epoch)[first:last])
            start += last - first
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _permutation(self, epoch: int) -> Tensor:
        if self._latest is None or self._latest[0] != epoch:
            generator = torch.Generator().manual_seed(mix_seed(self.seed, _ORDER, epoch))
            permutation = torch.randperm(self.num_rows, generator=generator)  # on the CPU: the same on every device
            if self.device.type == "cuda":
                permutation = permutation.pin_memory()
            self._latest = epoch, permutation.to(self.device, non_blocking=True)
        return self._latest[1]


class Batches:
    """Infinite batches: batch k is a function of (seed, k), so that a run can resume at any step.

    The order is an endless sequence of permutations of the set. Batch k holds the positions
    [k * batch_size, (k + 1) * batch_size), and each rank takes a contiguous slice of them. Flips, dropped labels and
    noise are functions of (seed, k, row of the batch): the slices of all ranks are bitwise the batch of one.

    Args:
        dataset: The set to read.
        batch_size: Over all ranks together.
        seed: Of order, flips, label dropout and latent noise.
        device: Where batches are made.
        rank: The process whose slice of each batch this is.
        world_size: The number of processes.
        label_dropout: Probability that a label becomes `num_classes`, the null class of classifier-free guidance.
            None leaves labels out.
        num_workers: Processes that read a set which does not stay on the device.
        resident: Keep the whole set on the device. None does so for sets of at most 2 GiB as stored.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        label_dropout: float | None = 0.0,
        num_workers: int = 0,
        resident: bool | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = count("batch_size", batch_size, at_most=10**6, example=64)
        self.seed = count("seed", seed, at_least=0, at_most=2**63 - 1)
        self.device = torch.device(device)
        self.world_size = count("world_size", world_size)
        self.rank = count("rank", rank, at_least=0)
        self.label_dropout = None if label_dropout is None else share("label_dropout", label_dropout)
        self.num_workers = count("num_workers", num_workers, at_least=0)
        self.resident = dataset.num_bytes <= RESIDENT_BYTES if resident is None else resident
        self._whole: StoredBatch | None = None
        self._check()

    def _check(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError(f"rank must be below world_size = {self.world_size}, got {self.rank}: ranks count from 0")
        if self.batch_size % self.world_size:
            fitting = -(-self.batch_size // self.world_size) * self.world_size
            raise ValueError(
                f"batch_size, over all ranks, must be a multiple of world_size = {self.world_size}, "
                f"got {self.batch_size}: pass for instance batch_size={fitting}"
            )
        if self.label_dropout and self.dataset.num_classes == 0:
            raise ValueError(
                f"label_dropout needs a set with classes, got {self.label_dropout} for one without: "
                "pass label_dropout=0.0"
            )

    def from_step(self, step: int = 0) -> Generator[Batch, None, None]:
        """Yield this rank's batches from step `step` on, for ever; closing the iterator ends its workers."""
        return self._batches(count("step", step, at_least=0))

    def _batches(self, step: int) -> Generator[Batch, None, None]:
        read = self._read_resident(step) if self.resident else self._read_streaming(step)
        num_local = self.batch_size // self.world_size
        rows = self.rank * num_local + torch.arange(num_local, device=self.device)  # of the batch over all ranks
        with closing(read):
            for samples, labels in read:
                augmentation, dropout = (
                    RowRandom(key_tensor(self.seed, purpose, step, device=self.device), rows)
                    for purpose in (_AUGMENTATION, _LABELS)
                )
                yield Batch(self.dataset.to_x0(samples, augmentation), self._drop(labels, dropout))
                step += 1

    def _rows(self, step: int, device: torch.device) -> Iterator[Tensor]:
        order = Order(len(self.dataset), self.seed, device)
        num_local = self.batch_size // self.world_size
        while True:
            first = step * self.batch_size + self.rank * num_local
            yield order.rows(first, first + num_local)
            step += 1

    def _read_resident(self, step: int) -> Generator[StoredBatch, None, None]:
        if self._whole is None:
            samples, labels = self.dataset.read_all()
            self._whole = samples.to(self.device), labels.to(self.device)
        samples, labels = self._whole
        for rows in self._rows(step, self.device):
            yield samples.index_select(0, rows), labels.index_select(0, rows)

    def _read_streaming(self, step: int) -> Generator[StoredBatch, None, None]:
        rows = (batch.tolist() for batch in self._rows(step, torch.device("cpu")))
        return stream(self.dataset, rows, device=self.device, num_workers=self.num_workers)

    def _drop(self, labels: Tensor, random: RowRandom) -> Tensor | None:
        if self.label_dropout is None or self.dataset.num_classes == 0:
            return None
        if self.label_dropout == 0:
            return labels
        return labels.masked_fill(random.uniform() < self.label_dropout, self.dataset.num_classes)
