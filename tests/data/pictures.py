"""Small image files, and folders of them, for the tests of this folder."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from kairostep.data import InMemory, load_folder
from kairostep.data.image_set import StreamedImages

LEFT, RIGHT = (200, 30, 60), (20, 180, 220)


def picture(width: int = 24, height: int = 20, mode: str = "RGB") -> Image.Image:
    """Return a picture whose left half has one colour and whose right half another."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:, : width // 2], pixels[:, width // 2 :] = LEFT, RIGHT
    return Image.fromarray(pixels).convert(mode)


def write(path: Path, image: Image.Image | None = None, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or picture()).save(path, **options)
    return path


def write_many(folder: Path, num: int, *, size: int = 8) -> Path:
    """Write `num` grey pictures, the i-th of brightness i, in two subfolders."""
    for number in range(num):
        image = Image.new("L", (size, size), number)
        write(folder / ("even" if number % 2 == 0 else "odd") / f"{number:03}.png", image)
    return folder


def streamed(folder: Path, size: int, **options: object) -> StreamedImages:
    dataset = load_folder(folder, size, in_memory_bytes=0, **options)  # type: ignore[arg-type]
    assert isinstance(dataset, StreamedImages)
    return dataset


def in_memory(folder: Path, size: int, **options: object) -> InMemory:
    dataset = load_folder(folder, size, **options)  # type: ignore[arg-type]
    assert isinstance(dataset, InMemory)
    return dataset


def halves(image: torch.Tensor) -> list[list[int]]:
    """Return the colours in the middle of the left and of the right half of (C, H, W)."""
    side = image.shape[-1]
    return [image[:, side // 2, column].tolist() for column in (side // 4, side - 1 - side // 4)]
