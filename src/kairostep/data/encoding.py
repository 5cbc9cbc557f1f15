"""Encodes images into files of latents: each process a share, which the first process of a disk joins."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairostep.data.autoencoder import Autoencoder
from kairostep.data.dataset import Dataset
from kairostep.data.streaming import stream
from kairostep.progress_meter import ProgressMeter
from kairostep.shares import Share


@dataclass(frozen=True)
class Encoding:
    """Which images are encoded, and how.

    Args:
        dataset: The images. If it has `flip`, their mirror images follow them.
        autoencoder: Encodes them.
        device: Where it does so.
        batch_size: Images at once.
        num_workers: Processes that read images.
    """

    dataset: Dataset
    autoencoder: Autoencoder
    device: torch.device
    batch_size: int
    num_workers: int

    @property
    def num_copies(self) -> int:
        """Latents of each image."""
        return 2 if self.dataset.flip else 1

    def batches(self, share: Share) -> list[range]:
        """Return the rows of a share."""
        return list(share.batches(len(self.dataset), self.batch_size))

    def create_files(self, folder: Path, num_rows: int) -> "_Files":
        """Create the files of so many images and their mirror images."""
        channels, *sides = self.autoencoder.latent_shape(self.dataset.shape)
        shape = (num_rows * self.num_copies, channels * (2 if self.autoencoder.has_std else 1), *sides)
        moments = np.lib.format.open_memmap(folder / "moments.npy", mode="w+", dtype=np.float16, shape=shape)
        labels = np.lib.format.open_memmap(folder / "labels.npy", mode="w+", dtype=np.int64, shape=shape[:1])
        return _Files(moments, labels)


@dataclass(frozen=True)
class _Files:
    moments: Any  # (N, c or 2c, h, w) float16
    labels: Any  # (N,) int64

    def flush(self) -> None:
        self.moments.flush()
        self.labels.flush()


@dataclass(frozen=True)
class _Layout:
    """Where batches lie in files of `num_rows` images: each from its start on, mirror images `num_rows` later."""

    batches: Sequence[range]
    starts: Sequence[int]
    num_rows: int

    @classmethod
    def of_all(cls, batches: Sequence[range], num_rows: int) -> "_Layout":
        """Batches lie where they lie in the set."""
        return cls(batches, [rows.start for rows in batches], num_rows)

    @classmethod
    def packed(cls, batches: Sequence[range]) -> "_Layout":
        """Batches lie one after the other."""
        starts = list(accumulate(map(len, batches), initial=0))
        return cls(batches, starts, starts[-1])

    def place(self, number: int, copy: int) -> slice:
        start = copy * self.num_rows + self.starts[number]
        return slice(start, start + len(self.batches[number]))


def ranks_on_this_disk(folder: Path, share: Share) -> list[int]:
    """Return the processes that see the same files in a folder that each of them has made."""
    (folder / f"process-{share.rank}").touch()
    share.wait()
    seen = [rank for rank in range(share.num_processes) if (folder / f"process-{rank}").exists()]
    views = share.gather(seen)
    return seen if all(views[rank] == seen for rank in seen) else [share.rank]


@torch.no_grad()
def encode_share(folder: Path, encoding: Encoding, share: Share) -> None:
    """Encode a share: the first one into the files of all rows, the others into files of their own rows.

    Args:
        folder: Where the files go. It exists.
        encoding: What is encoded.
        share: The share of this process among those of its disk.
    """
    dataset, autoencoder, batches = encoding.dataset, encoding.autoencoder, encoding.batches(share)
    if not batches and not share.is_first:  # a file of no rows cannot be mapped into memory
        return
    layout = _Layout.of_all(batches, len(dataset)) if share.is_first else _Layout.packed(batches)
    files = encoding.create_files(folder, layout.num_rows)
    model = autoencoder.load(encoding.device)
    stored = stream(dataset, map(list, batches), device=encoding.device, num_workers=encoding.num_workers)
    with ProgressMeter(len(dataset), "encoding", unit="image", shown=share.is_first) as meter:
        for number, (images, labels) in enumerate(stored):
            x0 = dataset.to_x0(images, None)
            for copy, seen in enumerate((x0, x0.flip(-1))[: encoding.num_copies]):
                files.moments[layout.place(number, copy)] = _to_half(autoencoder.encode(model, seen))
                files.labels[layout.place(number, copy)] = labels.cpu().numpy()
            meter.update(len(x0) * share.num_processes)
    files.flush()


def join_shares(folder: Path, others: Sequence[Path], encoding: Encoding) -> None:
    """Copy what other processes encoded into the files of the first one.

    Args:
        folder: The files of the first process.
        others: Folders of the second process and so on.
        encoding: What was encoded.
    """
    into = _Files(*(np.load(folder / f"{name}.npy", mmap_mode="r+") for name in ("moments", "labels")))
    for rank, other in enumerate(others, start=1):
        batches = encoding.batches(Share(rank, len(others) + 1))
        if not batches:
            break
        whole, packed = _Layout.of_all(batches, len(encoding.dataset)), _Layout.packed(batches)
        part = _Files(*(np.load(other / f"{name}.npy", mmap_mode="r") for name in ("moments", "labels")))
        for number in range(len(batches)):
            for copy in range(encoding.num_copies):
                into.moments[whole.place(number, copy)] = part.moments[packed.place(number, copy)]
                into.labels[whole.place(number, copy)] = part.labels[packed.place(number, copy)]
    into.flush()


def _to_half(moments: Tensor) -> Any:
    """Return moments as float16 on the host; raise if they do not fit."""
    half = moments.to(torch.float16).cpu()
    if not bool(half.isfinite().all()):
        raise ValueError(
            "moments of latents must be finite and below 65504, the largest float16, got others: "
            "check the autoencoder's weights"
        )
    return half.numpy()
