"""Images on disk, each file whole or not there: PNG files, or one npz that grows in shards."""

import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class ImageFiles(Protocol):
    """The images 0 .. num - 1 of a folder, made by several processes that share no image."""

    def missing(self, first: int = 0, stride: int = 1) -> Iterator[int]:
        """Yield those of the images first, first + stride, ... that are not there."""
        ...

    def write(self, images: Sequence[int], pixels: Pixels) -> None:
        """Write these images, (N, H, W, C)."""
        ...

    def finish(self, labels: Sequence[int]) -> None:
        """Bring all images into their last form; image i has label i, modulo their number, unless there are none."""
        ...


class PngFiles:
    """000000.png and so on, grey or colour."""

    def __init__(self, folder: Path, num: int) -> None:
        self.folder, self.num = folder, num

    def path(self, image: int) -> Path:
        """Return where an image is, or will be."""
        return self.folder / f"{image:06d}.png"

    def missing(self, first: int = 0, stride: int = 1) -> Iterator[int]:
        """Yield those of the images first, first + stride, ... that are not there."""
        return (image for image in range(first, self.num, stride) if not self.path(image).exists())

    def write(self, images: Sequence[int], pixels: Pixels) -> None:
        """Write these images, (N, H, W, C)."""
        if pixels.shape[-1] not in (1, 3):
            raise ValueError(f"PNG files have 1 or 3 channels, got {pixels.shape[-1]}: pass --format npz")
        for image, values in zip(images, pixels, strict=True):
            path = self.path(image)
            temporary = path.with_name(f".{path.name}")
            try:
                Image.fromarray(values.squeeze(-1) if values.shape[-1] == 1 else values).save(temporary, format="PNG")
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def finish(self, labels: Sequence[int]) -> None:
        """Do nothing: every file has its last form."""


class NpzFile:
    """images.npz with `images` (N, H, W, C), uint8, and `labels` (N,) where there are classes; shards until then."""

    def __init__(self, folder: Path, num: int) -> None:
        self.path, self.shards, self.num = folder / "images.npz", folder / "shards", num

    def missing(self, first: int = 0, stride: int = 1) -> Iterator[int]:
        """Yield those of the images first, first + stride, ... that are not there."""
        if self.path.exists():
            return iter(())
        there = np.zeros(self.num, bool)
        for shard in self.shards.glob("[0-9]*.npz"):
            with np.load(shard) as arrays:
                there[arrays["numbers"]] = True
        return (image for image in range(first, self.num, stride) if not there[image])

    def write(self, images: Sequence[int], pixels: Pixels) -> None:
        """Write these images, (N, H, W, C), as a shard."""
        self.shards.mkdir(exist_ok=True)
        path = self.shards / f"{images[0]:06d}.npz"
        temporary = path.with_name(f".{path.name}")
        try:
            with temporary.open("wb") as file:
                np.savez(file, numbers=np.array(images), images=pixels)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def finish(self, labels: Sequence[int]) -> None:
        """Merge the shards, one in memory at a time."""
        if self.path.exists():
            return
        merged, temporary = self.shards / ".images.npy", self.path.with_name(f".{self.path.name}")
        images = None
        for shard in self.shards.glob("[0-9]*.npz"):
            with np.load(shard) as arrays:
                pixels, numbers = arrays["images"], arrays["numbers"]
            if images is None:
                shape = (self.num, *pixels.shape[1:])
                images = np.lib.format.open_memmap(merged, mode="w+", dtype=np.uint8, shape=shape)
            images[numbers] = pixels
        assert images is not None
        images.flush()
        with zipfile.ZipFile(temporary, "w") as archive:  # as np.savez writes it, but without the array in memory
            archive.write(merged, "images.npy")
            if len(labels):
                with archive.open("labels.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, np.resize(np.array(labels, np.int64), self.num))
        temporary.replace(self.path)
        shutil.rmtree(self.shards)


FORMATS: dict[str, type[PngFiles] | type[NpzFile]] = {"png": PngFiles, "npz": NpzFile}
