"""CIFAR-10 (Krizhevsky 2009), checked byte by byte."""

from pathlib import Path

import numpy as np
import torch

from kairostep.checks import choice
from kairostep.data import cifar10_files as files
from kairostep.data.dataset import InMemory
from kairostep.registry import datasets


@datasets.register("cifar10")
def load_cifar10(
    path: Path | str,
    split: str = "train",
    *,
    check: bool = True,
    flip: bool = True,
    only_classes: tuple[int, ...] | None = None,
) -> InMemory:
    """Return 50000 ("train") or 10000 ("test") images (3, 32, 32) of ten classes.

    Args:
        path: The official python or binary batches, unpacked in a folder or still in their .tar.gz. Or an npz with
            uint8 arrays train (N, 32, 32, 3), train_y, test and test_y, as `obtain_cifar10` makes it, or a folder with
            one.
        split: "train" or "test".
        check: Refuse content that is not CIFAR-10's own. False allows a subset or a changed copy.
        flip: Mirror half of the images in training.
        only_classes: Those of the images to take, from 0 to 9; None: all. Labels keep their numbers.
    """
    choice("split", split, ("train", "test"))
    path = Path(path)
    source = files.find(path) if path.is_dir() else path
    if source is None or not source.exists():
        raise ValueError(
            f"path must be a file or a folder of CIFAR-10, got {path}: "
            "make one with `kairostep data cifar10 FOLDER` and pass FOLDER/cifar10.npz"
        )
    content = files.read(source, complete=check)
    if check:
        content.check(source)
    pixels, labels = (content.train, content.train_y) if split == "train" else (content.test, content.test_y)
    if len(pixels) == 0:
        raise ValueError(f"the part {split!r} must have at least one image, got none in {source}: get a fresh copy")
    images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))  # (N, 3, 32, 32)
    whole = InMemory(images, torch.from_numpy(labels.astype(np.int64)), num_classes=10, flip=flip)
    return whole.only(only_classes)
