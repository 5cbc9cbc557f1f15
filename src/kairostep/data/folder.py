"""Any folder of images: squares of one size, classes by subfolder, and a fixed held-out part."""

import hashlib
import logging
import os
from collections.abc import Sequence
from itertools import islice, takewhile
from pathlib import Path

from kairostep.checks import below_one, choice, count
from kairostep.data.dataset import Dataset
from kairostep.data.image_file import ENDINGS, read_image, why_unfit
from kairostep.data.image_set import ImageFiles, StreamedImages, decode, find_unfit
from kairostep.registry import datasets

IN_MEMORY_BYTES = 2 * 2**30  # a larger set is read from its files again and again
MIN_TO_HOLD_OUT = 50  # usable images; a smaller folder is for training alone
_TRIED_FIRST = 256  # headers read to find that many, before all are read in threads
_logger = logging.getLogger("kairostep")


class NothingHeldOut(ValueError):
    """A part of the data that was asked for is empty."""


@datasets.register("images")
def load_folder(
    folder: Path | str,
    size: int,
    split: str = "train",
    *,
    channels: int = 3,
    classes: str = "auto",
    flip: bool = True,
    held_out: float = 0.02,
    bad_images: str = "skip",
    in_memory_bytes: int = IN_MEMORY_BYTES,
) -> Dataset:
    """Return the images below a folder as squares (channels, size, size), in memory where they fit.

    Args:
        folder: Searched at any depth.
        size: Pixels of the square that the middle of each image is resized to. Smaller images count as bad.
        split: "train", or "test" for the part that is held out.
        channels: 3 for colour, 1 for grey.
        classes: "auto" takes the subfolders as classes, sorted by name, if every image lies in one of several. "none"
            takes none.
        flip: Mirror half of the images in training.
        held_out: Share of the images in "test", chosen by a hash of their names: at least one that can be read, but
            none if fewer than 50 are usable by their headers.
        bad_images: "skip" leaves out and logs images that cannot be read or are too small. "refuse" raises.
        in_memory_bytes: A set that is larger when decoded streams from its files.
    """
    count("size", size, at_most=2**16, example=64)
    choice("split", split, ("train", "test"))
    choice("classes", classes, ("auto", "none"))
    choice("bad_images", bad_images, ("skip", "refuse"))
    below_one("held_out", held_out, example=0.02)
    check_channels(channels)
    folder = Path(folder)
    names = find_images(folder)
    labels, num_classes = label_by_subfolder(names) if classes == "auto" else (None, 0)
    every = ImageFiles(folder, names, labels, num_classes, size, channels, bad_images == "refuse", len(names))
    part = every.subset(_rows_of_split(every, split, held_out))
    fits = len(part.names) * channels * size * size <= in_memory_bytes
    return decode(part, flip=flip) if fits else StreamedImages(part, flip=flip)


def check_channels(channels: int) -> None:
    """Raise ValueError unless images are grey or in colour."""
    if channels not in (1, 3):
        raise ValueError(f"channels must be 3 (colour) or 1 (grey), got {channels}: pass channels=3")


def find_images(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of all images below the folder. Hidden files are left out, links are followed."""
    if not folder.is_dir():
        raise ValueError(f"folder must be an existing folder of images, got {folder}: check the path")
    names, visited = [], set()
    for place, subfolders, files in os.walk(folder, followlinks=True):
        visited.add(Path(place).resolve())
        subfolders[:] = [
            name for name in subfolders if name[0] != "." and (Path(place) / name).resolve() not in visited
        ]
        relative = Path(place).relative_to(folder)
        names += [
            (relative / name).as_posix() for name in files if name[0] != "." and Path(name).suffix.lower() in ENDINGS
        ]
    if not names:
        raise ValueError(
            f"folder must hold at least one image ({', '.join(sorted(ENDINGS))}), got none in {folder}: check the path"
        )
    return tuple(sorted(names))


def label_by_subfolder(names: Sequence[str]) -> tuple[tuple[int, ...] | None, int]:
    """Return a label for each name and the number of classes.

    It returns None and 0 unless every image lies in a subfolder and there are at least two of them.
    """
    parents = [name.split("/")[0] if "/" in name else "" for name in names]
    index = {parent: number for number, parent in enumerate(sorted(set(parents)))}
    if "" in index or len(index) < 2:
        return None, 0
    return tuple(index[parent] for parent in parents), len(index)


def is_held_out(name: str, share: float) -> bool:
    """Return whether an image belongs to the held-out share: a function of its name alone."""
    return _hash(name) < share * 2**64


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _rows_of_split(files: ImageFiles, split: str, share: float) -> list[int]:
    """Return the rows of "train" or "test". Both are chosen alike, whether or not the set fits into memory."""
    num = len(files.names)
    by_hash = sorted(range(num), key=lambda row: _hash(files.names[row]))
    num_usable = _num_usable(files, by_hash) if share else num
    held = _held_out(files, by_hash, share) if share and num_usable >= MIN_TO_HOLD_OUT else set()
    rows = sorted(held) if split == "test" else [row for row in range(num) if row not in held]
    if rows:
        return rows
    rule = f"split {split!r} must have at least one image, got none of the {num} in {files.folder}"
    if not share or num_usable >= MIN_TO_HOLD_OUT:
        raise NothingHeldOut(f"{rule} at held_out={share}: choose another share, such as 0.1")
    if num_usable < num:
        rule += f", of which {num_usable} are usable"
        few = f"{num_usable} of {num} in {files.folder} are usable at size={files.size}"
        _logger.warning("no images are held out: %s, and it takes at least %d", few, MIN_TO_HOLD_OUT)
    raise NothingHeldOut(f"{rule}: add images, at least {MIN_TO_HOLD_OUT}")


def _num_usable(files: ImageFiles, by_hash: Sequence[int]) -> int:
    """Return how many images are usable by their headers; `MIN_TO_HOLD_OUT` stands for more.

    Few headers are read where most images are usable, and none of a folder that is too small anyway.
    """
    if len(by_hash) < MIN_TO_HOLD_OUT:
        return len(by_hash)
    usable = (1 for row in by_hash[:_TRIED_FIRST] if why_unfit(files.path(row), files.size) is None)
    if sum(islice(usable, MIN_TO_HOLD_OUT)) == MIN_TO_HOLD_OUT:
        return MIN_TO_HOLD_OUT
    return min(MIN_TO_HOLD_OUT, len(by_hash) - len(find_unfit(files)))


def _held_out(files: ImageFiles, by_hash: Sequence[int], share: float) -> set[int]:
    """Return the rows of the held-out share, and the first readable one in the order of hashes: one at least."""
    held = set(takewhile(lambda row: is_held_out(files.names[row], share), by_hash))
    for row in by_hash:  # the first one as a rule
        if not isinstance(read_image(files.path(row), files.size, files.channels), str):
            return held | {row}
    return held
