"""Sets of image files: decoded once into memory, or read again and again while training."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from kairostep.counters import RowRandom
from kairostep.data.dataset import Dataset, InMemory, pixels_to_x0
from kairostep.data.image_file import read_image, why_unfit
from kairostep.progress_meter import ProgressMeter

_CHUNK = 64  # images that a thread takes at a time
_NUM_NAMED = 10  # bad images that a message names
_logger = logging.getLogger("kairostep")


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Which files make a set, and how they are read."""

    folder: Path
    names: tuple[str, ...]  # relative to the folder, with forward slashes, sorted
    labels: tuple[int, ...] | None  # one per name
    num_classes: int
    size: int
    channels: int
    refuse_bad: bool
    num_found: int  # in the folder, of which these are a part

    def path(self, row: int) -> Path:
        """Return where the image `row` lies."""
        return self.folder / self.names[row]

    def subset(self, rows: Sequence[int]) -> "ImageFiles":
        """Return the set of these rows alone."""
        labels = None if self.labels is None else tuple(self.labels[row] for row in rows)
        return replace(self, names=tuple(self.names[row] for row in rows), labels=labels)


def _visit_all(files: ImageFiles, visit: Callable[[int], str | None], what: str) -> dict[int, str]:
    """Call `visit` for every row in threads, and return the rows that it gave a reason to leave out."""

    def visit_chunk(rows: range) -> dict[int, str]:
        return {row: reason for row in rows if (reason := visit(row)) is not None}

    bad: dict[int, str] = {}
    chunks = [range(start, min(start + _CHUNK, len(files.names))) for start in range(0, len(files.names), _CHUNK)]
    with ThreadPoolExecutor() as pool, ProgressMeter(len(files.names), what, unit="image") as meter:
        for rows, found in zip(chunks, pool.map(visit_chunk, chunks), strict=True):
            bad |= found
            meter.update(len(rows))
    return bad


def find_unfit(files: ImageFiles) -> dict[int, str]:
    """Return the rows of images that cannot be used by their headers alone, and why."""
    return _visit_all(files, lambda row: why_unfit(files.path(row), files.size), "checking images")


def decode(files: ImageFiles, *, flip: bool) -> InMemory:
    """Return all images, decoded once."""
    pixels = torch.empty(len(files.names), files.channels, files.size, files.size, dtype=torch.uint8)
    target = pixels.numpy()

    def fill(row: int) -> str | None:
        image = read_image(files.path(row), files.size, files.channels)
        if isinstance(image, str):
            return image
        target[row] = image
        return None

    bad = _visit_all(files, fill, "reading images")
    fit = _without_bad(files, bad)
    if bad:
        pixels = pixels[[row for row in range(len(pixels)) if row not in bad]]
    labels = None if fit.labels is None else torch.tensor(fit.labels)
    return InMemory(pixels, labels, num_classes=fit.num_classes, flip=flip)


class StreamedImages(Dataset):
    """Images read from their files at every use, for sets that do not fit into memory.

    The headers are checked at the start. An image that fails later is logged and replaced by the next readable
    one, or refused.
    """

    def __init__(self, files: ImageFiles, *, flip: bool) -> None:
        self.files = _without_bad(files, find_unfit(files))
        self.shape = (files.channels, files.size, files.size)
        self.num_classes = files.num_classes
        self.flip = flip
        self._replaced: set[int] = set()

    def __len__(self) -> int:
        return len(self.files.names)

    def read(self, row: int) -> tuple[Tensor, int]:
        """Return the image `row` (C, size, size), uint8, and its label; the next readable one's if it fails."""
        for candidate in chain(range(row, len(self)), range(row)):
            image = read_image(self.files.path(candidate), self.files.size, self.files.channels)
            if not isinstance(image, str):
                return torch.from_numpy(image), 0 if self.files.labels is None else self.files.labels[candidate]
            self._report(candidate, image)
        raise ValueError(f"at least one image must be readable, got none in {self.files.folder}: check the files")

    def _report(self, row: int, reason: str) -> None:
        if self.files.refuse_bad:
            raise ValueError(
                f"images must be readable, got {self.files.path(row)} ({reason}): remove it, or pass bad_images='skip'"
            )
        if row not in self._replaced:
            self._replaced.add(row)
            _logger.warning(
                "cannot read %s (%s): the next image stands in for it; number %d of this process",
                self.files.path(row),
                reason,
                len(self._replaced),
            )

    def to_x0(self, stored: Tensor, random: RowRandom | None) -> Tensor:
        """Return pixels (B, C, size, size) in [-1, 1]; if `flip`, random numbers mirror half of them."""
        return pixels_to_x0(stored, random if self.flip else None)

    def fingerprint(self) -> str:
        """Return a SHA-256 of names, labels, sizes and times of change of the files, and how they are read."""
        digest = hashlib.sha256(f"{self.shape} {self.num_classes} {self.files.labels}".encode())
        for row, name in enumerate(self.files.names):
            status = self.files.path(row).stat()
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int:
        """Size of the whole set when decoded."""
        return len(self) * self.shape[0] * self.shape[1] * self.shape[2]


def _without_bad(files: ImageFiles, bad: dict[int, str]) -> ImageFiles:
    """Return the usable files; log or refuse the others."""
    if not bad:
        return files
    named = "; ".join(f"{files.names[row]} ({reason})" for row, reason in sorted(bad.items())[:_NUM_NAMED])
    more = f"; and {len(bad) - _NUM_NAMED} more" if len(bad) > _NUM_NAMED else ""
    found = f"{len(bad)} of {files.num_found} in {files.folder}: {named}{more}"
    if files.refuse_bad:
        raise ValueError(
            f"images must be readable and at least {files.size} pixels wide and high, which {found} are not: "
            "remove them, or pass bad_images='skip'"
        )
    if len(bad) == len(files.names):
        raise ValueError(
            f"at least one image must be readable and {files.size} pixels wide and high, got none: {found}: "
            "pass a smaller size or another folder"
        )
    _logger.warning("left out images that cannot be read or are too small, %s", found)
    return files.subset([row for row in range(len(files.names)) if row not in bad])
