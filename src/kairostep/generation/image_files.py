"""Images on disk, as PNG files or as one npz that grows in shards. A file is complete or absent."""

import logging
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from kairostep.files import whole_file

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]
PNG_END = b"IEND\xaeB`\x82"  # the last bytes of every whole PNG file
NUM_WRITERS = 8  # threads: files that wait for the disk together wait no longer than one
DAMAGES = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, MemoryError)  # what NumPy raises
DAMAGES_BELOW = (zipfile.BadZipFile, zlib.error)

log = logging.getLogger("kairostep")


class DamagedShard(Exception):
    """A part of an npz file that cannot be read."""


def is_whole_png(path: Path) -> bool:
    """Whether a file ends as a PNG does. After a power cut a file may be empty or short."""
    try:
        with path.open("rb") as file:
            file.seek(-len(PNG_END), os.SEEK_END)
            return file.read() == PNG_END
    except OSError:  # shorter than that, no file, or not readable
        return False


class GeneratedFiles(Protocol):
    """The images 0 .. num - 1 of a folder, made by several processes that share no image."""

    def missing(self) -> Iterator[int]:
        """Yield the images that are not there."""
        ...

    def write(self, images: Sequence[int], pixels: Pixels) -> None:
        """Write these images, (N, H, W, C)."""
        ...

    def finish(self, labels: Sequence[int]) -> None:
        """Write the final form of all images. Image i has label i modulo the number of labels, if there are any."""
        ...


class PngFiles:
    """000000.png and so on, grey or colour."""

    def __init__(self, folder: Path, num: int) -> None:
        self.folder, self.num = folder, num

    def path(self, image: int) -> Path:
        """Return where an image is, or will be."""
        return self.folder / f"{image:06d}.png"

    def missing(self) -> Iterator[int]:
        """Yield the images that are not there."""
        there = {path.name for path in self.folder.glob("[0-9]*.png") if is_whole_png(path)}
        return (image for image in range(self.num) if self.path(image).name not in there)

    def write(self, images: Sequence[int], pixels: Pixels) -> None:
        """Write these images, (N, H, W, C)."""
        if pixels.shape[-1] not in (1, 3):
            raise ValueError(f"PNG files have 1 or 3 channels, got {pixels.shape[-1]}: pass --format npz")
        with ThreadPoolExecutor(NUM_WRITERS) as threads:
            list(threads.map(self._write_one, images, pixels))

    def _write_one(self, image: int, values: Pixels) -> None:
        picture = Image.fromarray(values.squeeze(-1) if values.shape[-1] == 1 else values)
        with whole_file(self.path(image)) as temporary:
            picture.save(temporary, format="PNG")

    def finish(self, labels: Sequence[int]) -> None:
        """Do nothing: PNG files are final."""


class NpzFile:
    """images.npz with `images` (N, H, W, C), uint8, and `labels` (N,) if there are classes; at first in shards."""

    def __init__(self, folder: Path, num: int) -> None:
        self.path, self.shards, self.num = folder / "images.npz", folder / "shards", num

    def missing(self) -> Iterator[int]:
        """Yield the images that are not there."""
        if zipfile.is_zipfile(self.path):
            return iter(())
        there = np.zeros(self.num, bool)
        for shard in self.shards.glob("[0-9]*.npz"):
            try:
                there[self._read(shard, "numbers")] = True
            except DamagedShard as error:
                log.warning("%s: its images are made again", error)
        return (image for image in range(self.num) if not there[image])

    def write(self, images: Sequence[int], pixels: Pixels) -> None:
        """Write these images, (N, H, W, C), as a shard."""
        self.shards.mkdir(exist_ok=True)
        path = self.shards / f"{images[0]:06d}.npz"
        with whole_file(path) as temporary, temporary.open("wb") as file:
            np.savez(file, numbers=np.array(images), images=pixels)

    def finish(self, labels: Sequence[int]) -> None:
        """Merge the shards, one in memory at a time."""
        if zipfile.is_zipfile(self.path):
            return
        merged = self.shards / ".images.npy"
        self._merge(merged)
        # As np.savez writes it, but without the array in memory
        with whole_file(self.path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
            archive.write(merged, "images.npy")
            if len(labels):
                with archive.open("labels.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.resize(np.array(labels, np.int64), self.num))
        shutil.rmtree(self.shards)

    def _merge(self, merged: Path) -> None:
        images, there = None, np.zeros(self.num, bool)
        for shard in self.shards.glob("[0-9]*.npz"):
            try:
                numbers, pixels = self._read(shard, "numbers"), self._read(shard, "images")
            except DamagedShard:
                shard.unlink(missing_ok=True)
                continue
            if images is None:
                shape = (self.num, *pixels.shape[1:])
                images = np.lib.format.open_memmap(merged, mode="w+", dtype=np.uint8, shape=shape)
            images[numbers], there[numbers] = pixels, True
        if images is None or not there.all():
            raise OSError(
                f"the files in {self.shards} must hold all {self.num} images, got {there.sum()}, the others being "
                "damaged: the same command makes them again"
            )
        images.flush()

    def _read(self, shard: Path, name: str) -> Numbers:
        """Return an array of a shard, its `numbers` checked; DamagedShard if there is none."""
        try:
            with shard.open("rb") as file, np.load(file) as arrays:
                array: Numbers = arrays[name]
        except (*DAMAGES, *DAMAGES_BELOW) as error:
            raise DamagedShard(f"{shard} is damaged ({error})") from error
        if name == "numbers" and (
            array.dtype.kind not in "iu" or array.size == 0 or not 0 <= array.min() <= array.max() < self.num
        ):
            raise DamagedShard(f"{shard} is damaged (numbers that are not 0 to {self.num - 1})")
        return array


FORMATS: dict[str, type[PngFiles] | type[NpzFile]] = {"png": PngFiles, "npz": NpzFile}
