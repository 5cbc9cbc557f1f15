"""CIFAR-10: the official formats, made small, and the refusal of everything that is not the set itself."""

import hashlib
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kairostep.data import InMemory, load_cifar10
from kairostep.data.cifar10_files import Cifar10

PER_BATCH = 2
NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
Bytes = NDArray[np.uint8]


def small_set() -> Cifar10:
    generator = np.random.default_rng(0)
    train, test = (generator.integers(0, 256, (num, 32, 32, 3), np.uint8) for num in (5 * PER_BATCH, PER_BATCH))
    return Cifar10(train, np.arange(10, dtype=np.uint8), test, np.array([3, 7], np.uint8))


def batches() -> dict[str, tuple[Bytes, Bytes]]:
    """Return planes (N, 3072) and labels (N,) of each official batch."""
    content = small_set()
    pixels = np.concatenate([content.train, content.test]).transpose(0, 3, 1, 2).reshape(-1, 3072)
    labels = np.concatenate([content.train_y, content.test_y])
    parts = [slice(start, start + PER_BATCH) for start in range(0, len(pixels), PER_BATCH)]
    return {name: (pixels[part], labels[part]) for name, part in zip(NAMES, parts, strict=True)}


def python2_pickle(pixels: Bytes, labels: Bytes) -> bytes:
    """Return the opcodes that Python 2 wrote for {"data": array, "labels": list}, as in the official files."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    shape = b"".join(b"M" + struct.pack("<H", side) for side in pixels.shape) + b"\x86"
    dtype = (
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\x00K\x01\x87R(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
    )
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R(K\x01"
    array += shape + dtype + b"K\x00tb\x89T" + struct.pack("<I", pixels.nbytes) + pixels.tobytes() + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def python3_pickle(protocol: int) -> Callable[[Bytes, Bytes], bytes]:
    return lambda pixels, labels: pickle.dumps({"data": pixels, "labels": labels.tolist()}, protocol)


def binary(pixels: Bytes, labels: Bytes) -> bytes:
    return np.concatenate([labels[:, None], pixels], 1).tobytes()


FORMATS: dict[str, tuple[Callable[[Bytes, Bytes], bytes], str, str]] = {
    "python 2": (python2_pickle, "", "cifar-10-batches-py"),
    "python 3, protocol 2": (python3_pickle(2), "", "cifar-10-batches-py"),
    "python 3, protocol 4": (python3_pickle(4), "", "cifar-10-batches-py"),
    "binary": (binary, ".bin", "cifar-10-batches-bin"),
}
every_format = pytest.mark.parametrize("name", FORMATS)


def write_batches(folder: Path, name: str) -> Path:
    """Write the official folder in this format and return it."""
    encode, ending, place = FORMATS[name]
    target = folder / place
    target.mkdir(parents=True)
    for batch, (pixels, labels) in batches().items():
        (target / f"{batch}{ending}").write_bytes(encode(pixels, labels))
    (target / "readme.html").write_text("not a batch")
    return target


def write_npz(path: Path, content: Cifar10) -> Path:
    np.savez(path, train=content.train, train_y=content.train_y, test=content.test, test_y=content.test_y)
    return path


def assert_is_small_set(path: Path) -> None:
    content = small_set()
    for split, pixels, labels in (
        ("train", content.train, content.train_y),
        ("test", content.test, content.test_y),
    ):
        dataset = load_cifar10(path, split, check=False)
        assert isinstance(dataset, InMemory)
        assert dataset.shape == (3, 32, 32)
        assert dataset.flip
        assert dataset.labels is not None
        assert torch.equal(dataset.stored, torch.from_numpy(pixels).permute(0, 3, 1, 2))
        assert dataset.labels.tolist() == labels.tolist()


@every_format
def test_official_batches_are_read_from_their_folder_and_from_the_one_above(tmp_path: Path, name: str) -> None:
    folder = write_batches(tmp_path, name)
    assert_is_small_set(folder)
    assert_is_small_set(tmp_path)


@every_format
def test_official_batches_are_read_from_their_archive(tmp_path: Path, name: str) -> None:
    folder = write_batches(tmp_path / "unpacked", name)
    archive = tmp_path / ("cifar-10-binary.tar.gz" if name == "binary" else "cifar-10-python.tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    assert_is_small_set(archive)
    assert_is_small_set(tmp_path)


def test_an_npz_is_read_by_name_and_from_its_folder(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "cifar10.npz", small_set())
    assert_is_small_set(path)
    assert_is_small_set(tmp_path)


def test_saving_and_reading_are_inverse_and_leave_no_other_file(tmp_path: Path) -> None:
    small_set().save(tmp_path / "cifar10.npz")
    assert_is_small_set(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar10.npz"]


@every_format
def test_pixels_that_are_not_cifar10_are_refused_with_both_digests(tmp_path: Path, name: str) -> None:
    content = small_set()
    digest = hashlib.sha256(content.train.tobytes() + content.test.tobytes()).hexdigest()
    folder = write_batches(tmp_path, name)
    with pytest.raises(
        ValueError, match=f"pixels of CIFAR-10 must have the SHA-256 0ac3ab5c.*got {digest} in {folder}"
    ):
        load_cifar10(folder)


def test_right_pixels_with_wrong_labels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = small_set()
    pixels = hashlib.sha256(content.train.tobytes() + content.test.tobytes()).hexdigest()
    monkeypatch.setattr("kairostep.data.cifar10_files.PIXELS_SHA256", pixels)
    with pytest.raises(ValueError, match=r"the labels of CIFAR-10 must have the SHA-256 3edb4565.*check=False"):
        load_cifar10(write_npz(tmp_path / "cifar10.npz", content))


def test_missing_batches_are_named_and_a_subset_is_allowed_on_purpose(tmp_path: Path) -> None:
    folder = write_batches(tmp_path, "binary")
    for name in ("data_batch_2.bin", "test_batch.bin"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match="without data_batch_2, test_batch"):
        load_cifar10(folder)
    assert len(load_cifar10(folder, check=False)) == 4 * PER_BATCH
    with pytest.raises(ValueError, match="the part 'test' must have at least one image"):
        load_cifar10(folder, "test", check=False)


class Runs:
    """Unpickled without care, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_that_runs_code_is_refused_before_it_runs(tmp_path: Path, protocol: int) -> None:
    folder = write_batches(tmp_path, "python 2")
    pixels, labels = batches()["data_batch_3"]
    content = {"trap": Runs(tmp_path / "ran"), "data": pixels, "labels": labels.tolist()}
    (folder / "data_batch_3").write_bytes(pickle.dumps(content, protocol))
    with pytest.raises(ValueError, match=r"got data_batch_3 in .*it asks for (posix|nt)\.mkdir, which may run code"):
        load_cifar10(folder, check=False)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x80\x02cnumpy.core.multiarray\nscalar\n.",
        b"\x80\x02cnumpy\nload\n.",
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\nK\x00\x85U\x01b\x87R.",
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00zip\x86R.",
        b"\x80\x02c__builtin__\neval\n.",
    ],
)
def test_only_the_rebuilding_of_arrays_is_allowed(tmp_path: Path, opcodes: bytes) -> None:
    (tmp_path / "data_batch_1").write_bytes(opcodes)
    with pytest.raises(ValueError, match=r"it asks for .*, which may run code"):
        load_cifar10(tmp_path, check=False)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_1", b"", "must be a pickled dictionary"),
        ("data_batch_1", python2_pickle(*batches()["data_batch_1"])[:-500], "must be a pickled dictionary"),
        ("data_batch_1", pickle.dumps([1, 2]), "must be a pickled dictionary"),
        (
            "data_batch_1",
            pickle.dumps({"data": np.zeros((2, 5), np.uint8), "labels": [1, 2]}),
            r"uint8 data \(N, 3072\)",
        ),
        ("data_batch_1", pickle.dumps({"data": np.zeros((2, 3072)), "labels": [1, 2]}), r"uint8 data \(N, 3072\)"),
        ("data_batch_1", pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}), "N labels"),
        ("data_batch_1", pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}), r"labels in 0\.\.9"),
        ("data_batch_1", pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [-1]}), r"labels in 0\.\.9"),
        ("data_batch_1.bin", bytes(3072), "multiple of 3073 bytes, got 3072"),
        ("data_batch_1.bin", bytes([10]) + bytes(3072), r"labels in 0\.\.9"),
        ("cifar-10-python.tar.gz", b"no archive", "must be readable, got .*cifar-10-python.tar.gz"),
        ("cifar10.npz", b"no zip", "must be readable, got .*cifar10.npz"),
        ("cifar10.npz", b"PK\x03\x04 broken", "must be readable, got .*cifar10.npz"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_cifar10(tmp_path, check=False)


def test_an_archive_without_batches_or_cut_short_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("readme.html"), io.BytesIO())
    with pytest.raises(ValueError, match="must have the batches data_batch_1"):
        load_cifar10(archive, check=False)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(write_batches(tmp_path / "unpacked", "python 2"), "cifar-10-batches-py")
    archive.write_bytes(archive.read_bytes()[:-2000])
    with pytest.raises(ValueError, match="must be readable"):
        load_cifar10(archive, check=False)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"train": np.zeros((1, 32, 32, 3), np.uint8)},
            "must have the arrays train, train_y, test and test_y, got train",
        ),
        ({"train": np.zeros((1, 3, 32, 32), np.uint8)}, r"uint8 images \(N, 32, 32, 3\)"),
        ({"train": np.zeros((1, 32, 32, 3))}, "got float64"),
        ({"train_y": np.array([10])}, r"whole numbers in 0\.\.9"),
        ({"train_y": np.array([[1]])}, r"labels \(1, 1\)"),
        ({"train": np.array([{}], object)}, "allow_pickle"),
    ],
)
def test_an_npz_in_another_layout_is_refused(
    tmp_path: Path, arrays: dict[str, NDArray[np.uint8]], message: str
) -> None:
    one = {"train": np.zeros((1, 32, 32, 3), np.uint8), "train_y": np.zeros(1, np.uint8)}
    whole = {**one, "test": one["train"], "test_y": one["train_y"], **arrays}
    if "arrays" in message:
        whole = arrays
    np.savez(tmp_path / "cifar10.npz", **whole)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        load_cifar10(tmp_path, check=False)


@pytest.mark.parametrize("name", ["", "nowhere", "nowhere.npz"])
def test_where_nothing_lies_the_way_to_get_it_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"path must be a file or a folder of CIFAR-10, got .*kairostep data cifar10",
    ):
        load_cifar10(tmp_path / name)


def test_classes_can_be_chosen(tmp_path: Path) -> None:
    folder, content = write_batches(tmp_path, "binary"), small_set()
    dataset = load_cifar10(folder, check=False, only_classes=(7, 2))
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [2, 7]
    assert dataset.num_classes == 10
    assert torch.equal(dataset.stored, torch.from_numpy(content.train[[2, 7]]).permute(0, 3, 1, 2))
    with pytest.raises(
        ValueError, match=r"only_classes must have an image, got none of 2, 5: the classes here are 3, 7"
    ):
        load_cifar10(folder, "test", check=False, only_classes=(2, 5))
    with pytest.raises(ValueError, match=r"only_classes must be at most 9, got 10"):
        load_cifar10(folder, check=False, only_classes=(10,))
