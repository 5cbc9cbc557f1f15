"""Handwritten digits, 8x8, that come with scikit-learn: small enough for a demonstration on a CPU."""

import torch

from kairostep.checks import choice
from kairostep.counters import mix_seed
from kairostep.data.dataset import InMemory
from kairostep.data.extras import require
from kairostep.registry import datasets

NUM_TRAIN = 1500  # of 1797; the others are for testing


@datasets.register("digits")
def load_digits(split: str = "train", *, flip: bool = False) -> InMemory:
    """Return 1500 ("train") or 297 ("test") images (1, 8, 8) of ten classes."""
    choice("split", split, ("train", "test"))
    source = require("sklearn.datasets", "the digits set").load_digits()
    pixels = (torch.from_numpy(source.images) * (255 / 16)).round().to(torch.uint8)  # (1797, 8, 8), was 0..16
    labels = torch.from_numpy(source.target)
    order = torch.tensor(sorted(range(len(pixels)), key=mix_seed))  # fixed, and no writer in one part alone
    rows = order[:NUM_TRAIN] if split == "train" else order[NUM_TRAIN:]
    return InMemory(pixels[rows].unsqueeze(1), labels[rows], num_classes=10, flip=flip)
