"""Generated images on disk: read in order and in pieces, or refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from kairostep.evaluation.images import generated_in, open_images


def pixels(num: int, channels: int = 3, size: int = 6) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num, size, size, channels), np.uint8)


def as_npz(path: Path, images: np.ndarray, name: str = "images", *, compressed: bool = False) -> Path:
    (np.savez_compressed if compressed else np.savez)(path, **{"labels": np.zeros(3), name: images})
    return path


def as_folder(path: Path, images: np.ndarray) -> Path:
    path.mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(path / f"{number:06d}.png")
    return path


def expected(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images.transpose(0, 3, 1, 2).copy())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["npz", "compressed", "arr_0", "folder", "npz in a folder"])
def test_images_come_in_order_and_in_batches(kind: str, channels: int, tmp_path: Path) -> None:
    images = pixels(11, channels)
    if kind == "folder":
        path = as_folder(tmp_path / "set", images)
    else:
        name = "arr_0" if kind == "arr_0" else "images"
        path = as_npz(tmp_path / "images.npz", images, name, compressed=kind == "compressed")
        path = tmp_path if kind == "npz in a folder" else path
    source = open_images(path, channels)
    assert (source.num, source.shape) == (11, (channels, 6, 6))
    source.check(11, (channels, 6, 6))
    batches = list(source.batches(10, 4))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert torch.equal(torch.cat(batches), expected(images[:10]))
    assert source.generation() == {}


def test_what_was_said_of_the_generation_is_read(tmp_path: Path) -> None:
    (tmp_path / "generation.json").write_text(json.dumps({"solver": "heun", "complete": True}))
    source = open_images(as_npz(tmp_path / "images.npz", pixels(3)), 3)
    assert source.generation()["solver"] == "heun"
    (tmp_path / "generation.json").write_text("{torn")
    with pytest.raises(ValueError, match=r"generation.json must be what `kairostep generate` wrote"):
        source.generation()


@pytest.mark.parametrize("kind", ["png", "npz"])
def test_an_interrupted_generation_is_refused(kind: str, tmp_path: Path) -> None:
    folder = as_folder(tmp_path / "set", pixels(3))
    if kind == "npz":
        (folder / "shards").mkdir()
    (folder / "generation.json").write_text(json.dumps({"complete": False}))
    with pytest.raises(ValueError, match=r"images must be complete, got an interrupted generation in .*set"):
        open_images(folder, 3)


@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_fewer_images_and_other_sizes_are_refused(kind: str, tmp_path: Path) -> None:
    path = as_npz(tmp_path / "a.npz", pixels(5)) if kind == "npz" else as_folder(tmp_path / "a", pixels(5))
    source = open_images(path, 3)
    with pytest.raises(ValueError, match=r"states, 6, got 5 in .*: generate more, or state fewer by --num_images=5"):
        source.check(6, (3, 6, 6))
    with pytest.raises(ValueError, match=r"must have the shape of the data, \(3, 8, 8\), got \(3, 6, 6\) in"):
        source.check(5, (3, 8, 8))


def test_one_image_of_another_size_is_found(tmp_path: Path) -> None:
    folder = as_folder(tmp_path / "set", pixels(5))
    Image.fromarray(pixels(1, size=7)[0]).save(folder / "000003.png")
    source = open_images(folder, 3)
    source.check(3, (3, 6, 6))
    with pytest.raises(ValueError, match=r"size of the data, \(6, 6\), got \(7, 7\) in .*000003.png"):
        source.check(5, (3, 6, 6))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (pixels(3).astype(np.float32), r"images must be uint8 of shape \(N, H, W, 1 or 3\), got float32"),
        (pixels(3).transpose(0, 3, 1, 2).copy(), r"got uint8 \(3, 3, 6, 6\)"),
        (pixels(3)[0], r"got uint8 \(6, 6, 3\)"),
        (np.asfortranarray(pixels(3)), "got uint8"),
    ],
)
def test_arrays_that_are_no_images_are_refused(images: np.ndarray, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        open_images(as_npz(tmp_path / "a.npz", images), 3)


def test_files_that_hold_no_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an npz of images must hold an array `images`"):
        open_images(as_npz(tmp_path / "a.npz", pixels(3), "pictures"), 3)
    (tmp_path / "b.npz").write_text("no archive")
    for name in ("b.npz", "missing"):
        with pytest.raises(ValueError, match=f"images must be an npz file or a folder, got .*{name}"):
            open_images(tmp_path / name, 3)
    with pytest.raises(ValueError, match="got /dev/full: it is no file of a known length"):
        open_images("/dev/full", 3)  # which would be read until memory is full
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="folder must hold at least one image"):
        open_images(tmp_path / "empty", 3)


def test_sets_in_a_run_are_found(tmp_path: Path) -> None:
    assert generated_in(tmp_path) == []
    (tmp_path / "generated").mkdir()
    as_npz(tmp_path / "generated" / "b.npz", pixels(2))
    as_folder(tmp_path / "generated" / "a", pixels(2))
    (tmp_path / "generated" / ".hidden").mkdir()
    (tmp_path / "generated" / "notes.txt").touch()
    assert [path.name for path in generated_in(tmp_path)] == ["a", "b.npz"]
