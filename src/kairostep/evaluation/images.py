"""Generated images on disk, read in batches: an npz file, or a folder."""

import json
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairostep.data.extras import require
from kairostep.data.folder import find_images
from kairostep.shares import WHOLE, Share

ARRAYS = ("images", "arr_0")  # names under which an npz may hold its images


class ImageSource(ABC):
    """Images of one shape, read from disk at each use: `for batch in source.batches(50_000, 256)`."""

    path: Path
    num: int
    shape: tuple[int, int, int]  # (C, H, W)

    @abstractmethod
    def batches(self, num: int, batch_size: int, share: Share = WHOLE) -> Iterator[Tensor]:
        """Yield this process's batches of the first `num` images, as uint8 (B, C, H, W)."""

    def check(self, num: int, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless there are that many images, of this shape."""
        if self.num < num:
            raise ValueError(
                f"FID must be of the number of images that it states, {num}, got {self.num} in {self.path}: "
                f"generate more, or state fewer by --num_images={self.num}"
            )
        if self.shape != tuple(shape):
            raise ValueError(
                f"generated images must have the shape of the data, {tuple(shape)}, got {self.shape} in {self.path}: "
                "generate them with this run"
            )

    def generation(self) -> Mapping[str, Any]:
        """Return the settings of the images from `generation.json` beside them, or an empty mapping."""
        return facts_beside(self.path)


class NpzImages(ImageSource):
    """An array (N, H, W, C) uint8 in an npz file, of which only a batch is in memory at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.exists() and not path.is_file():
                raise OSError("it is no file of a known length")  # /dev/zero would be read for ever
            with zipfile.ZipFile(path) as archive:
                names = [name for name in ARRAYS if f"{name}.npy" in archive.namelist()]
                if not names:
                    raise ValueError(f"an npz of images must hold an array `images`, got {path} without it")
                self.name = names[0]
                with archive.open(f"{self.name}.npy") as file:
                    shape, fortran, dtype = _header(file)
        except (OSError, zipfile.BadZipFile) as error:
            raise ValueError(f"images must be an npz file or a folder, got {path}: {error}") from error
        if dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3) or fortran:
            raise ValueError(
                f"images must be uint8 of shape (N, H, W, 1 or 3), got {dtype} {shape} in {path}: "
                "scale them to 0..255 and put the channels last"
            )
        self.num = int(shape[0])
        self.shape = (int(shape[3]), int(shape[1]), int(shape[2]))

    def batches(self, num: int, batch_size: int, share: Share = WHOLE) -> Iterator[Tensor]:
        """Yield this process's batches of the first `num` images, as uint8 (B, C, H, W)."""
        channels, height, width = self.shape
        with zipfile.ZipFile(self.path) as archive, archive.open(f"{self.name}.npy") as file:
            _header(file)
            start, image_bytes = file.tell(), channels * height * width
            for rows in share.batches(num, batch_size):
                file.seek(start + rows.start * image_bytes)
                raw = file.read(len(rows) * image_bytes)
                pixels = np.frombuffer(raw, np.uint8).reshape(len(rows), height, width, channels)
                yield torch.from_numpy(np.array(pixels.transpose(0, 3, 1, 2), order="C"))  # bytes are read-only


class FolderImages(ImageSource):
    """A folder of image files, in the order of their names, all of them or the first `num`."""

    def __init__(self, path: Path, channels: int, num: int | None = None) -> None:
        self.path, self.names = path, find_images(path)[:num]
        self.num = len(self.names)
        self.shape = (channels, *self._size(self.names[0]))

    def check(self, num: int, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless there are that many images, all of this shape."""
        super().check(num, shape)
        for name in self.names[:num]:
            if self._size(name) != tuple(shape[1:]):
                raise ValueError(
                    f"generated images must have the size of the data, {tuple(shape[1:])}, got {self._size(name)} in "
                    f"{self.path / name}: generate them with this run"
                )

    def batches(self, num: int, batch_size: int, share: Share = WHOLE) -> Iterator[Tensor]:
        """Yield this process's batches of the first `num` images, as uint8 (B, C, H, W)."""
        pillow = require("PIL.Image", "a folder of images")
        mode = "L" if self.shape[0] == 1 else "RGB"
        for rows in share.batches(num, batch_size):
            batch = []
            for name in self.names[rows.start : rows.stop]:
                with pillow.open(self.path / name) as image:
                    batch.append(np.array(image.convert(mode)).reshape(*self.shape[1:], self.shape[0]))
            yield torch.from_numpy(np.ascontiguousarray(np.stack(batch).transpose(0, 3, 1, 2)))

    def _size(self, name: str) -> tuple[int, int]:
        pillow = require("PIL.Image", "a folder of images")
        try:
            with pillow.open(self.path / name) as image:
                return int(image.height), int(image.width)
        except OSError as error:
            raise ValueError(f"images must be readable, got {self.path / name}: {error}") from error


def open_images(path: Path | str, channels: int) -> ImageSource:
    """Return the images of an npz file, or of a folder with one, or of a folder of image files with these channels."""
    path, num = Path(path), num_complete(Path(path))
    if num == 0:
        raise ValueError(
            f"images must be complete, got an interrupted generation in {path}: run its command again, which goes on"
        )
    if not path.is_dir():
        return NpzImages(path)
    files = sorted(path.glob("*.npz"))
    return NpzImages(files[0]) if len(files) == 1 else FolderImages(path, channels, num)


def num_complete(path: Path) -> int | None:
    """Return how many images, from the first on, are certainly complete; None if `generation.json` is missing.

    An interrupted generation has none, or those of the smaller generation that it continued.
    """
    facts = facts_beside(path)
    if facts.get("complete") is False:
        return int(facts.get("num_complete", 0))
    return int(facts["num"]) if "num" in facts else None


def generated_in(run: Path) -> list[Path]:
    """Return the sets of generated images in a run directory, one for each entry of `generated`."""
    folder = run / "generated"
    return [path for path in sorted(folder.iterdir()) if _is_set(path)] if folder.is_dir() else []


def facts_beside(path: Path) -> Mapping[str, Any]:
    """Return the content of `generation.json` beside images, or an empty mapping."""
    file = (path if path.is_dir() else path.parent) / "generation.json"
    try:
        facts = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} must be what `kairostep generate` wrote, got {error}") from error
    return facts if isinstance(facts, dict) else {}


def _is_set(path: Path) -> bool:
    return not path.name.startswith(".") and (path.suffix == ".npz" or path.is_dir())


def _header(file: Any) -> tuple[tuple[int, ...], bool, Any]:
    """Read the header of an npy file; return shape, whether columns come first, and dtype."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)
