"""Files are whole or not there, and what is there is not made again."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kairostep.generation.image_files import FORMATS, GeneratedFiles, NpzFile, PngFiles

every_format = pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)


def pixels_of(images: list[int], channels: int = 3) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.stack([np.random.default_rng(i).integers(0, 256, (5, 4, channels), np.uint8) for i in images])


def write(files: GeneratedFiles, *images: int) -> None:
    files.write(list(images), pixels_of(list(images)))


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


@every_format
def test_what_is_missing(kind: Any, tmp_path: Path) -> None:
    files = kind(tmp_path, 10)
    assert list(files.missing()) == list(range(10))
    write(files, 2, 3)
    write(files, 9)
    assert list(files.missing()) == [0, 1, 4, 5, 6, 7, 8]
    assert list(kind(tmp_path, 12).missing()) == [0, 1, 4, 5, 6, 7, 8, 10, 11]
    assert not [name for name in visible(tmp_path) if name.startswith(".")]


@every_format
def test_a_write_that_fails_leaves_nothing(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    files = kind(tmp_path, 10)
    write(files, 0)
    before = visible(tmp_path)
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write(files, 1)
    assert visible(tmp_path) == before
    assert 1 in files.missing()


def test_png_files_hold_the_pixels(tmp_path: Path) -> None:
    files = PngFiles(tmp_path, 2)
    write(files, 0, 1)
    files.write([7], pixels_of([7], channels=1))
    files.finish([])
    assert visible(tmp_path) == {"000000.png", "000001.png", "000007.png"}
    assert np.array_equal(np.array(Image.open(tmp_path / "000001.png")), pixels_of([1])[0])
    grey = Image.open(tmp_path / "000007.png")
    assert grey.mode == "L"
    assert np.array_equal(np.array(grey), pixels_of([7], channels=1)[0, ..., 0])
    with pytest.raises(ValueError, match="PNG files have 1 or 3 channels, got 4: pass --format npz"):
        files.write([8], pixels_of([8], channels=4))


@pytest.mark.parametrize("labels", [[], [3, 5]])
def test_shards_become_one_npz(tmp_path: Path, labels: list[int]) -> None:
    files = NpzFile(tmp_path, 7)
    for images in ([4, 6], [0, 2], [1, 3, 5]):
        write(files, *images)
    files.finish(labels)
    assert visible(tmp_path) == {"images.npz"}
    with np.load(tmp_path / "images.npz") as arrays:
        assert set(arrays) == ({"images", "labels"} if labels else {"images"})
        assert arrays["images"].dtype == np.uint8
        assert np.array_equal(arrays["images"], pixels_of(list(range(7))))
        if labels:
            assert arrays["labels"].tolist() == [3, 5, 3, 5, 3, 5, 3]
    assert list(files.missing()) == []
    content = (tmp_path / "images.npz").read_bytes()
    files.finish(labels)
    assert (tmp_path / "images.npz").read_bytes() == content


def test_a_merge_that_was_cut_off_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = NpzFile(tmp_path, 2)
    write(files, 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr("zipfile.ZipFile.write", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space left"):
            files.finish([])
    assert not files.path.exists()
    assert list(files.missing()) == []
    files.finish([])
    assert visible(tmp_path) == {"images.npz"}


DAMAGE = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-5],
    "not even an archive": lambda data: b"x" * 500,
    "an archive of nothing": lambda data: b"PK\x05\x06" + bytes(18),
}


@pytest.mark.parametrize("damage", DAMAGE)
@every_format
def test_a_damaged_file_is_made_again(kind: Any, damage: str, tmp_path: Path) -> None:
    files = kind(tmp_path, 4)
    write(files, 0)
    write(files, 1, 2)
    write(files, 3)
    (hurt,) = tmp_path.rglob("000001.*")
    hurt.write_bytes(DAMAGE[damage](hurt.read_bytes()))
    missing = list(files.missing())
    assert missing == ([1] if kind is PngFiles else [1, 2])
    for image in missing:
        write(files, image)
    files.finish([])
    assert list(files.missing()) == []
    if kind is PngFiles:
        assert np.array_equal(np.array(Image.open(tmp_path / "000001.png")), pixels_of([1])[0])
    else:
        with np.load(tmp_path / "images.npz") as arrays:
            assert np.array_equal(arrays["images"], pixels_of([0, 1, 2, 3]))


def test_a_shard_that_turns_out_damaged_in_the_end_is_left_out_and_made_the_next_time(tmp_path: Path) -> None:
    files = NpzFile(tmp_path, 3)
    write(files, 0)
    write(files, 1, 2)
    shard = tmp_path / "shards" / "000001.npz"
    data = bytearray(shard.read_bytes())
    place = data.index(pixels_of([1]).tobytes()[:20])
    data[place] ^= 1  # which its checksum tells, once the images are read
    shard.write_bytes(data)
    assert list(files.missing()) == []
    with pytest.raises(OSError, match=r"must hold all 3 images, got 1, .*: the same command makes them again"):
        files.finish([])
    assert list(files.missing()) == [1, 2]
    assert not (tmp_path / "images.npz").exists()
    write(files, 1, 2)
    files.finish([])
    with np.load(tmp_path / "images.npz") as arrays:
        assert np.array_equal(arrays["images"], pixels_of([0, 1, 2]))


@every_format
def test_files_are_on_the_disk_before_they_have_their_name(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int]] = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        events.append(("synced", os.fstat(descriptor).st_ino))
        real_sync(descriptor)

    def replace(path: Path, target: Path) -> Path:
        events.append(("renamed", path.stat().st_ino))
        return real_replace(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    files = kind(tmp_path, 3)
    write(files, 0, 1)
    write(files, 2)
    files.finish([])
    renamed = [place for place, (event, _) in enumerate(events) if event == "renamed"]
    assert len(renamed) == 3
    for place in renamed:
        assert ("synced", events[place][1]) in events[:place]
