"""The contract of a set of samples, and a set in memory."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from kairostep.checks import count
from kairostep.counters import RowRandom


class Dataset(ABC):
    """Samples as they are stored: pixels as bytes, latents as moments.

    A training loop reads one through `Batches`; without it:

        random = RowRandom(key_tensor(seed, step), torch.arange(len(rows)))  # of kairostep.counters
        x0 = dataset.to_x0(torch.stack([dataset.read(row)[0] for row in rows]), random)
    """

    shape: tuple[int, ...]  # of one x0
    num_classes: int  # 0 without labels
    flip: bool  # whether training mirrors samples at random

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, row: int) -> tuple[Tensor, int]:
        """Return one sample as it is stored and its label, 0 in a set without classes."""

    @abstractmethod
    def to_x0(self, stored: Tensor, random: RowRandom | None) -> Tensor:
        """Return x0 (B, *shape), float32, of a batch as it is stored, on the batch's device.

        Args:
            stored: Samples as `read` returns them, stacked.
            random: Where all randomness of training comes from: `random.uniform()` gives (B,) numbers in [0, 1),
                `random.normal(shape)` (B, *shape) normal ones. Those of a row depend on its place in the batch over all
                processes, not on their number. None means no randomness.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a SHA-256, in hex, of the content."""

    def read_all(self) -> tuple[Tensor, Tensor]:
        """Return the whole set as it is stored (N, ...) and its labels (N,), int64."""
        samples, labels = zip(*(self.read(row) for row in range(len(self))), strict=True)
        return torch.stack(samples), torch.tensor(labels)

    def read_some(self, num: int) -> tuple[Tensor, Tensor]:
        """Return this many stored samples, or all if there are fewer, and their labels.

        They are spread evenly over the set, which may be sorted by class.
        """
        num = min(num, len(self))
        samples, labels = zip(*(self.read(row * len(self) // num) for row in range(num)), strict=True)
        return torch.stack(samples), torch.tensor(labels)

    @property
    def num_bytes(self) -> int:
        """Size of the whole set as it is stored."""
        return len(self) * self.read(0)[0].nbytes


class InMemory(Dataset):
    """Images and labels as two tensors.

    Args:
        pixels: (N, C, H, W) uint8.
        labels: (N,) int64 in [0, num_classes), or None.
        num_classes: The number of classes, whether or not all occur in this part of the set.
        flip: Mirror half of the images in training.
    """

    def __init__(
        self, pixels: Tensor, labels: Tensor | None = None, *, num_classes: int = 0, flip: bool = False
    ) -> None:
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.numel() == 0:
            raise ValueError(
                "pixels must be uint8 of shape (N, C, H, W) with at least one image, got "
                f"{pixels.dtype} {tuple(pixels.shape)}: scale them to 0..255 and call .to(torch.uint8)"
            )
        self.stored = pixels.contiguous()
        self.labels = _checked_labels(labels, len(pixels), count("num_classes", num_classes, at_least=0))
        self.shape = tuple(pixels.shape[1:])
        self.num_classes = num_classes
        self.flip = flip

    def only(self, classes: Sequence[int] | None) -> "InMemory":
        """Return the images of these classes, all for None. Labels keep their numbers."""
        if classes is None:
            return self
        for number in classes:
            count("only_classes", number, at_least=0, at_most=self.num_classes - 1)
        labels = self.read_all()[1]
        rows = torch.isin(labels, torch.tensor(classes, dtype=labels.dtype))
        if not rows.any():
            raise ValueError(
                f"only_classes must have an image, got none of {', '.join(map(str, classes)) or 'no class'}: "
                f"the classes here are {', '.join(map(str, sorted(set(labels.tolist()))))}"
            )
        return InMemory(self.stored[rows], labels[rows], num_classes=self.num_classes, flip=self.flip)

    def __len__(self) -> int:
        return len(self.stored)

    def read(self, row: int) -> tuple[Tensor, int]:
        """Return the image `row` (C, H, W), uint8, and its label."""
        return self.stored[row], 0 if self.labels is None else int(self.labels[row])

    def read_all(self) -> tuple[Tensor, Tensor]:
        """Return all images (N, C, H, W), uint8, and labels (N,), without a copy."""
        labels = torch.zeros(len(self), dtype=torch.int64) if self.labels is None else self.labels
        return self.stored, labels

    def to_x0(self, stored: Tensor, random: RowRandom | None) -> Tensor:
        """Return pixels (B, C, H, W) in [-1, 1]; if the set has `flip`, random numbers mirror half of them."""
        return pixels_to_x0(stored, random if self.flip else None)

    def fingerprint(self) -> str:
        """Return a SHA-256 of pixels, labels and their shapes."""
        digest = hashlib.sha256(f"{tuple(self.stored.shape)} {self.num_classes}".encode())
        digest.update(self.stored.numpy().data)
        if self.labels is not None:
            digest.update(self.labels.numpy().data)
        return digest.hexdigest()


def pixels_to_x0(stored: Tensor, random: RowRandom | None) -> Tensor:
    """Return uint8 images (B, C, H, W) as float32 in [-1, 1]; random numbers mirror each with probability 1/2."""
    if random is not None:
        mirrored = random.uniform() < 0.5  # (B,)
        stored = torch.where(mirrored.view(-1, 1, 1, 1), stored.flip(-1), stored)
    return stored.to(torch.float32).div_(127.5).sub_(1).contiguous()


def _checked_labels(labels: Tensor | None, num_rows: int, num_classes: int) -> Tensor | None:
    """Return the labels if each row has one in [0, num_classes), or None if the set has no classes."""
    if (labels is None) != (num_classes == 0):
        raise ValueError(
            f"labels and num_classes must be given together, got num_classes={num_classes} and labels "
            f"{'missing' if labels is None else 'present'}: pass both or neither"
        )
    if labels is None:
        return None
    if labels.shape != (num_rows,) or labels.is_floating_point():
        raise ValueError(
            f"labels must be whole numbers of shape ({num_rows},), one per image, got {labels.dtype} "
            f"{tuple(labels.shape)}: pass class indices, not one-hot rows"
        )
    labels = labels.to(torch.int64).contiguous()
    if not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(
            f"labels must lie in [0, num_classes = {num_classes}), got {int(labels.min())}..{int(labels.max())}: "
            f"pass num_classes={int(labels.max()) + 1} or number the classes from 0"
        )
    return labels
