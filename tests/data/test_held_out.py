"""The held-out part of a folder: chosen among its usable images, and the same as ever where all are usable."""

import hashlib
import logging
from pathlib import Path

import numpy as np
import pytest
from pictures import in_memory, picture, streamed, write, write_many
from PIL import Image

from kairostep.data import Dataset, NothingHeldOut, load_folder
from kairostep.data.image_set import StreamedImages

SPLITS = ("train", "test")


def names_of(dataset: Dataset) -> tuple[str, ...]:
    assert isinstance(dataset, StreamedImages)
    return dataset.files.names


def names_by_hash(folder: Path) -> list[str]:
    """Return the names of all images in the order in which they are held out."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.png")]
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def make_small(folder: Path, names: list[str]) -> None:
    for name in names:
        write(folder / name, picture(7, 7))


def cut_pixels(path: Path) -> None:
    """Leave the header of an image whole and cut its pixels."""
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    write(path, Image.fromarray(noise))
    path.write_bytes(path.read_bytes()[:-80])


def sha256(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("num", "held_out", "num_held", "names", "pixels"),
    [
        (60, 0.001, 1, "a6b66af8ca35dc95", "b7e56db6be1214f2"),
        (60, 0.02, 1, "a6b66af8ca35dc95", "b7e56db6be1214f2"),
        (60, 0.2, 10, "b7909a6aeaecaf4e", "27616f58ee7e6a4b"),
        (250, 0.001, 1, "755127e98ff0aed5", "6a669e2b0763a708"),
        (250, 0.02, 4, "e7dc6371a60aa025", "abf03c01d3719687"),
        (250, 0.2, 49, "20df754f532d8ecd", "7c2e146e319fe2ed"),
    ],
)
def test_where_all_images_are_usable_the_split_is_as_it_always_was(
    tmp_path: Path, num: int, held_out: float, num_held: int, names: str, pixels: str
) -> None:
    """The hashes are those of the code before images were checked: runs that began then can go on."""
    write_many(tmp_path, num)
    parts = [names_of(streamed(tmp_path, 8, split=split, held_out=held_out)) for split in SPLITS]
    assert len(parts[1]) == num_held
    assert sha256(parts) == names
    decoded = [in_memory(tmp_path, 8, channels=1, split=split, held_out=held_out) for split in SPLITS]
    assert sha256([part.fingerprint() for part in decoded]) == pixels


@pytest.mark.parametrize("num_small", [1, 5, 10])
@pytest.mark.parametrize("in_memory_bytes", [0, 2**31])
def test_the_next_usable_image_is_held_out_where_the_first_is_not(
    tmp_path: Path, num_small: int, in_memory_bytes: int
) -> None:
    order = names_by_hash(write_many(tmp_path, 60))
    make_small(tmp_path, order[:num_small])
    sizes = [len(load_folder(tmp_path, 8, split, in_memory_bytes=in_memory_bytes)) for split in SPLITS]
    assert sizes == [59 - num_small, 1]
    assert names_of(streamed(tmp_path, 8, split="test")) == (order[num_small],)


@pytest.mark.parametrize("in_memory_bytes", [0, 2**31])
def test_an_image_whose_pixels_are_cut_is_not_the_only_one_held_out(tmp_path: Path, in_memory_bytes: int) -> None:
    """Its header is whole: a streamed part of it alone would fail at the first evaluation."""
    order = names_by_hash(write_many(tmp_path, 60))
    cut_pixels(tmp_path / order[0])
    part = load_folder(tmp_path, 8, "test", channels=1, in_memory_bytes=in_memory_bytes)
    assert int(part.read(0)[0][0, 0, 0]) == int(Path(order[1]).stem)


def test_unusable_images_do_not_change_which_others_are_held_out(tmp_path: Path) -> None:
    order = names_by_hash(write_many(tmp_path, 250))
    before = names_of(streamed(tmp_path, 8, split="test", held_out=0.2))
    make_small(tmp_path, order[::3])
    after = names_of(streamed(tmp_path, 8, split="test", held_out=0.2))
    assert set(after) == set(before) - set(order[::3])


@pytest.mark.parametrize("in_memory_bytes", [0, 2**31])
def test_fewer_than_fifty_usable_images_are_for_training_alone(
    tmp_path: Path, in_memory_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The 50 count usable images, wherever the unusable ones fall."""
    make_small(tmp_path, names_by_hash(write_many(tmp_path, 60))[:14])
    assert len(load_folder(tmp_path, 8, in_memory_bytes=in_memory_bytes)) == 46
    assert f"14 of 60 in {tmp_path}" in caplog.text
    caplog.clear()
    with pytest.raises(NothingHeldOut, match=r"got none of the 60 in .*, of which 46 are usable: add images, at least"):
        load_folder(tmp_path, 8, "test", in_memory_bytes=in_memory_bytes)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    told = f"no images are held out: 46 of 60 in {tmp_path} are usable at size=8, and it takes at least 50"
    assert record.message == told


def test_a_folder_of_mostly_unusable_images_holds_out_usable_ones(tmp_path: Path) -> None:
    """More than the headers that are tried first are of images that are too small."""
    for number in range(400):
        write(tmp_path / f"{number:03}.png", Image.new("L", (8, 8)))
    order = names_by_hash(tmp_path)
    make_small(tmp_path, order[:340])
    assert [len(load_folder(tmp_path, 8, split)) for split in SPLITS] == [59, 1]
    assert names_of(streamed(tmp_path, 8, split="test")) == (order[340],)


def test_bad_images_are_refused_in_either_part(tmp_path: Path) -> None:
    order = names_by_hash(write_many(tmp_path, 250))
    make_small(tmp_path, [order[0], order[-1]])
    for split, name in zip(SPLITS, (order[-1], order[0]), strict=True):
        with pytest.raises(ValueError, match=f"which 1 of 250 in .*: {name} "):
            load_folder(tmp_path, 8, split, bad_images="refuse")


def test_few_usable_images_are_refused_in_the_training_part(tmp_path: Path) -> None:
    make_small(tmp_path, names_by_hash(write_many(tmp_path, 60))[:14])
    with pytest.raises(ValueError, match="images must be readable and at least 8 pixels wide and high, which 14 of 60"):
        load_folder(tmp_path, 8, bad_images="refuse")


def test_nothing_is_held_out_on_demand(tmp_path: Path) -> None:
    write_many(tmp_path, 60)
    assert len(load_folder(tmp_path, 8, held_out=0.0)) == 60
    with pytest.raises(NothingHeldOut, match=r"got none of the 60 in .* at held_out=0.0: choose another share"):
        load_folder(tmp_path, 8, "test", held_out=0.0)
