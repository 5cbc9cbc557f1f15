"""Images that cannot be read or are too small: left out or replaced, named and counted, or refused."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import in_memory, picture, streamed, write, write_many
from PIL import Image

from kairostep.data import Batches, load_folder

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a single core


def spoil(folder: Path) -> dict[str, str]:
    """Put four bad files among the good and return a word of what is wrong with each."""
    (folder / "odd" / "text.png").write_text("no image at all")
    (folder / "odd" / "empty.jpg").write_bytes(b"")
    write(folder / "odd" / "small.png", picture(30, 7))
    Image.fromarray(np.zeros((9, 9), np.float32)).save(folder / "odd" / "float.tif")
    return {
        "text.png": "not an image",
        "empty.jpg": "unknown format",
        "small.png": "7 pixels",
        "float.tif": "mode F",
    }


def cut(path: Path) -> None:
    """Leave the header of an image whole and cut its pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    write(path, Image.fromarray(pixels))
    path.write_bytes(path.read_bytes()[:-80])


def test_bad_images_are_left_out_of_memory_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_many(tmp_path, 10)
    bad = {**spoil(tmp_path), "cut.png": "OSError"}
    cut(tmp_path / "odd" / "cut.png")
    dataset = in_memory(tmp_path, 8, channels=1)
    assert sorted(dataset.stored[:, 0, 0, 0].tolist()) == list(range(10))
    assert dataset.labels is not None
    assert torch.equal(dataset.stored[:, 0, 0, 0] % 2, dataset.labels)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("kairostep", logging.WARNING)
    assert f"5 of 15 in {tmp_path}" in record.message
    assert all(f"odd/{name} (" in record.message and reason in record.message for name, reason in bad.items())


def test_bad_images_are_counted_among_all_of_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_many(tmp_path, 60)
    bad = spoil(tmp_path)
    assert len(load_folder(tmp_path, 8, held_out=0.2)) < 60 - len(bad)  # a part of the folder
    assert f" of 64 in {tmp_path}" in caplog.records[0].message


def test_bad_headers_are_left_out_of_a_stream_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_many(tmp_path, 10)
    bad = spoil(tmp_path)
    assert len(streamed(tmp_path, 8)) == 10
    (record,) = caplog.records
    assert "4 of 14" in record.message
    assert all(f"odd/{name} (" in record.message and reason in record.message for name, reason in bad.items())


def test_a_long_list_of_bad_images_is_cut_after_ten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_many(tmp_path, 1)
    for number in range(13):
        (tmp_path / "even" / f"bad{number:02}.png").write_text("no image")
    in_memory(tmp_path, 8)
    assert caplog.text.count("even/bad") == 10
    assert "; and 3 more" in caplog.text


@pytest.mark.parametrize("in_memory_bytes", [0, 2**31])
def test_bad_images_are_refused_on_demand(tmp_path: Path, in_memory_bytes: int) -> None:
    write_many(tmp_path, 3)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=r"which 4 of 7 in .*odd/small.png \(.*below size=8\).*bad_images='skip'"):
        load_folder(tmp_path, 8, bad_images="refuse", in_memory_bytes=in_memory_bytes)


def test_the_next_readable_image_stands_in_for_one_that_fails_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_many(tmp_path, 6)  # even: 0 2 4, odd: 1 3 5
    for name in ("odd/001.png", "odd/005.png"):
        cut(tmp_path / name)
    dataset = streamed(tmp_path, 8)
    assert caplog.records == []  # headers are whole
    for _ in range(2):
        read = [dataset.read(row) for row in range(6)]
        assert [int(pixels[0, 0, 0]) for pixels, _ in read] == [0, 2, 4, 3, 3, 0]
        assert [label for _, label in read] == [0, 0, 0, 1, 1, 0]  # each image keeps its own label
    assert [str(name) in caplog.text for name in ("001.png", "005.png")] == [True, True]
    assert len(caplog.records) == 2
    assert "number 2 of this process" in caplog.records[1].message


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_image_that_fails_later_is_refused_on_demand(tmp_path: Path, num_workers: int) -> None:
    cut(write_many(tmp_path, 6) / "odd" / "001.png")
    dataset = streamed(tmp_path, 8, bad_images="refuse")
    batches = Batches(dataset, 6, resident=False, num_workers=num_workers).from_step()
    with pytest.raises(ValueError, match=r"images must be readable, got .*001.png \(OSError"):
        next(batches)


def test_a_stream_whose_images_all_fail_ends(tmp_path: Path) -> None:
    cut(tmp_path / "a.png")
    with pytest.raises(ValueError, match="at least one image must be readable, got none in"):
        streamed(tmp_path, 8).read(0)


def test_a_folder_of_bad_images_alone_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.png", picture(7, 7))
    with pytest.raises(ValueError, match=r"at least one image must be readable.*got none: 1 of 1.*smaller size"):
        load_folder(tmp_path, 8)
