"""Fashion-MNIST (Xiao et al. 2017) from its idx files, plain or gzipped."""

import gzip
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from kairostep.checks import choice
from kairostep.data.dataset import InMemory
from kairostep.registry import datasets

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # where the package dataset-fashion-mnist puts it
_UNSIGNED_BYTE = 0x08
_STEMS = {"train": "train", "test": "t10k"}
_HOW_TO_GET_IT = (
    "download the four idx files from https://github.com/zalandoresearch/fashion-mnist into a folder and pass it, "
    "or on Debian and Ubuntu: apt-get install dataset-fashion-mnist"
)


@datasets.register("fashion_mnist")
def load_fashion_mnist(
    folder: Path | str | None = None,
    split: str = "train",
    *,
    flip: bool = False,
    only_classes: tuple[int, ...] | None = None,
) -> InMemory:
    """Return 60000 ("train") or 10000 ("test") images (1, 28, 28) of ten classes.

    Args:
        folder: Of the four idx files; None: that of Debian's package dataset-fashion-mnist.
        split: "train" or "test".
        flip: Mirror half of the images in training.
        only_classes: Those of the images to take, from 0 to 9; None: all. Labels keep their numbers.
    """
    stem = _STEMS[choice("split", split, _STEMS)]
    folder = DEBIAN_FOLDER if folder is None else Path(folder)
    pixels = read_idx(_find(folder, f"{stem}-images-idx3-ubyte"), num_dims=3)  # (N, 28, 28)
    labels = read_idx(_find(folder, f"{stem}-labels-idx1-ubyte"), num_dims=1)  # (N,)
    if pixels.shape[1:] != (28, 28) or len(pixels) != len(labels):
        raise ValueError(
            "Fashion-MNIST must have images of 28x28 and a label for each, got images "
            f"{tuple(pixels.shape)} and {len(labels)} labels in {folder}: {_HOW_TO_GET_IT}"
        )
    return InMemory(pixels.unsqueeze(1), labels.to(torch.int64), num_classes=10, flip=flip).only(only_classes)


def read_idx(path: Path, *, num_dims: int) -> Tensor:
    """Return the array of an idx file of unsigned bytes, checked against its header, uint8."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise ValueError(f"an idx file must be readable, got {path} ({error}): get a fresh copy") from error
    expected = bytes([0, 0, _UNSIGNED_BYTE, num_dims])
    if content[:4] != expected:
        raise ValueError(
            f"an idx file of unsigned bytes in {num_dims} dimensions must start with {expected.hex(' ')}, "
            f"got {content[:4].hex(' ')} in {path}: get a fresh copy"
        )
    header = 4 + 4 * num_dims
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4)]
    if len(content) != header + prod(shape):
        raise ValueError(
            f"an idx file of shape {tuple(shape)} must have {header + prod(shape)} bytes, got {len(content)} "
            f"in {path}: get a fresh copy"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header).view(shape)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ValueError(f"the folder of Fashion-MNIST must hold {name} or {name}.gz, got {folder}: {_HOW_TO_GET_IT}")
