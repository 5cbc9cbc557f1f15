"""Fashion-MNIST: real idx files, plain and gzipped, and every way in which they can be wrong."""

import gzip
import struct
from pathlib import Path

import pytest
import torch

from kairostep.data import fashion_mnist, load_fashion_mnist


def idx(array: torch.Tensor) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.to(torch.uint8).numpy().tobytes()


def write(folder: Path, *, stem: str = "train", num: int = 6, packed: bool = False) -> torch.Tensor:
    """Write images and labels 0, 1, ... and return the images (N, 28, 28)."""
    images = torch.randint(256, (num, 28, 28), generator=torch.Generator().manual_seed(num))
    for name, array in ((f"{stem}-images-idx3-ubyte", images), (f"{stem}-labels-idx1-ubyte", torch.arange(num))):
        content = idx(array)
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return images.to(torch.uint8)


@pytest.mark.parametrize("packed", [False, True])
def test_both_parts_are_read_plain_and_packed(tmp_path: Path, packed: bool) -> None:
    for split, stem, num in (("train", "train", 6), ("test", "t10k", 3)):
        images = write(tmp_path, stem=stem, num=num, packed=packed)
        dataset = load_fashion_mnist(tmp_path, split)
        assert dataset.shape == (1, 28, 28)
        assert dataset.num_classes == 10
        assert torch.equal(dataset.stored[:, 0], images)
        assert dataset.labels is not None
        assert dataset.labels.tolist() == list(range(num))
        assert not dataset.flip


def test_the_folder_of_the_system_package_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = write(tmp_path)
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path)
    assert torch.equal(load_fashion_mnist().stored[:, 0], images)


def test_missing_files_say_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold train-images-idx3-ubyte.*apt-get install dataset-fashion-mnist"):
        load_fashion_mnist(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "train-images-idx3-ubyte",
            lambda content: b"\0\0\x0d\3" + content[4:],
            "must start with 00 00 08 03, got 00 00 0d",
        ),
        (
            "train-images-idx3-ubyte",
            lambda content: content[:-1],
            r"of shape \(6, 28, 28\) must have 4720 bytes, got 4719",
        ),
        ("train-images-idx3-ubyte", lambda content: content + b"\0", "got 4721"),
        ("train-images-idx3-ubyte", lambda content: content[:10], "must have"),
        ("train-images-idx3-ubyte", lambda content: b"", "must start with"),
        ("train-labels-idx1-ubyte", lambda content: idx(torch.zeros(5)), "got images .* and 5 labels"),
        ("train-labels-idx1-ubyte", lambda content: idx(torch.full((6,), 10)), r"got 10\.\.10"),
        ("train-images-idx3-ubyte", lambda content: idx(torch.zeros(6, 8, 98)), "images of 28x28"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, change: object, message: str) -> None:
    write(tmp_path)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        load_fashion_mnist(tmp_path)


def test_a_truncated_gzip_file_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"must be readable, got .*train-images-idx3-ubyte.gz"):
        load_fashion_mnist(tmp_path)


def test_classes_can_be_chosen(tmp_path: Path) -> None:
    images = write(tmp_path)
    dataset = load_fashion_mnist(tmp_path, only_classes=(4, 1))
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [1, 4]
    assert torch.equal(dataset.stored[:, 0], images[[1, 4]])
    for classes, said in (((7,), "got none of 7"), ((), "got none of no class"), ((-1,), "at least 0, got -1")):
        with pytest.raises(ValueError, match=rf"only_classes must .*{said}"):
            load_fashion_mnist(tmp_path, only_classes=classes)
