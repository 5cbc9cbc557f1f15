"""The files that CIFAR-10 comes in: official python and binary batches, packed or not, and one npz."""

import hashlib
import io
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kairostep.files import whole_file

Bytes = NDArray[np.uint8]

NPZ = "cifar10.npz"
PIXELS_SHA256 = "0ac3ab5c78edb36ac68f69e287fd8f957b2d4f820b80e5fa9bd05c810fc0d95d"
LABELS_SHA256 = "3edb456524d5918aefded81f5aef7c32efab2a788211df998a4eb0c8957baa1f"
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"
_PLACES = ("", "cifar-10-batches-py", "cifar-10-batches-bin")  # below the folder that was named
_ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz")
_ROW = 3 * 32 * 32


@dataclass(frozen=True, slots=True)
class Cifar10:
    """Both parts of the set, in the official order."""

    train: Bytes  # (N, 32, 32, 3)
    train_y: Bytes  # (N,)
    test: Bytes  # (M, 32, 32, 3)
    test_y: Bytes  # (M,)

    def check(self, source: Path) -> None:
        """Refuse anything but CIFAR-10 itself."""
        for what, expected, parts in (
            ("pixels", PIXELS_SHA256, (self.train, self.test)),
            ("labels", LABELS_SHA256, (self.train_y, self.test_y)),
        ):
            digest = hashlib.sha256()
            for part in parts:
                digest.update(np.ascontiguousarray(part).data)
            if digest.hexdigest() != expected:
                raise ValueError(
                    f"the {what} of CIFAR-10 must have the SHA-256 {expected}, got {digest.hexdigest()} in {source}: "
                    "get a fresh copy with obtain_cifar10, or pass check=False for a set that was changed on purpose"
                )

    def save(self, path: Path) -> None:
        """Write the npz, whole or not at all."""
        with whole_file(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **{field.name: getattr(self, field.name) for field in fields(self)})


def find(folder: Path) -> Path | None:
    """Return the npz, the archive or the folder of batches to read, in that order, or None."""
    files = [path for name in (NPZ, *_ARCHIVES) if (path := folder / name).is_file()]
    batches = [
        folder / place
        for place in _PLACES
        for ending in ("", ".bin")
        if any((folder / place / f"{name}{ending}").is_file() for name in (*TRAIN_BATCHES, TEST_BATCH))
    ]
    return next(iter([*files, *batches]), None)


def read(path: Path, *, complete: bool) -> Cifar10:
    """Return the content of an npz, an archive or a folder of batches. `complete` demands all six batches."""
    try:
        if path.is_dir():
            return _read_batches(path, lambda name: _content(path / name), complete=complete)
        if path.suffix == ".npz":
            return _read_npz(path)
        with tarfile.open(path) as archive:
            members = {Path(member.name).name: member for member in archive.getmembers() if member.isfile()}
            return _read_batches(path, lambda name: _extract(archive, members.get(name)), complete=complete)
    except (OSError, EOFError, tarfile.TarError, zlib.error, zipfile.BadZipFile) as error:
        raise ValueError(f"a file of CIFAR-10 must be readable, got {path} ({error}): get a fresh copy") from error


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo | None) -> bytes | None:
    file = None if member is None else archive.extractfile(member)
    return None if file is None else file.read()


def _read_npz(path: Path) -> Cifar10:
    if not zipfile.is_zipfile(path):
        raise OSError("it is no zip file")
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        missing = [field.name for field in fields(Cifar10) if field.name not in arrays]
        if missing:
            raise ValueError(
                f"an npz of CIFAR-10 must have the arrays train, train_y, test and test_y, got "
                f"{', '.join(arrays)} in {path}: save it under these names"
            )
        train, train_y, test, test_y = (arrays[field.name] for field in fields(Cifar10))
    for pixels, labels in ((train, train_y), (test, test_y)):
        _check_part(path, pixels, labels)
    return Cifar10(train, train_y.astype(np.uint8), test, test_y.astype(np.uint8))


def _check_part(path: Path, pixels: NDArray[Any], labels: NDArray[Any]) -> None:
    if pixels.dtype != np.uint8 or pixels.shape[1:] != (32, 32, 3) or labels.shape != pixels.shape[:1]:
        raise ValueError(
            f"CIFAR-10 must be uint8 images (N, 32, 32, 3) with labels (N,), got {pixels.dtype} {pixels.shape} and "
            f"labels {labels.shape} in {path}: save it in this layout"
        )
    if labels.dtype.kind not in "iu" or (len(labels) and not 0 <= labels.min() <= labels.max() <= 9):
        raise ValueError(f"labels of CIFAR-10 must be whole numbers in 0..9, got others in {path}: get a fresh copy")


def _read_batches(path: Path, content_of: Callable[[str], bytes | None], *, complete: bool) -> Cifar10:
    parts: dict[str, tuple[Bytes, Bytes]] = {}
    for name in (*TRAIN_BATCHES, TEST_BATCH):
        if (content := content_of(name)) is not None:
            parts[name] = _read_python_batch(content, f"{name} in {path}")
        elif (content := content_of(f"{name}.bin")) is not None:
            parts[name] = _read_binary_batch(content, f"{name}.bin in {path}")
    missing = [name for name in (*TRAIN_BATCHES, TEST_BATCH) if name not in parts]
    if missing if complete else not parts:
        raise ValueError(
            f"CIFAR-10 must have the batches {', '.join(TRAIN_BATCHES)} and {TEST_BATCH}, plain or as .bin, got "
            f"{path} without {', '.join(missing)}: unpack cifar-10-python.tar.gz there, or pass the archive itself"
        )
    empty = np.zeros((0, _ROW), np.uint8), np.zeros(0, np.uint8)
    train = [parts[name] for name in TRAIN_BATCHES if name in parts] or [empty]
    pixels, labels = (np.concatenate(column) for column in zip(*train, strict=True))
    test, test_y = parts.get(TEST_BATCH, empty)
    return Cifar10(_to_rows_of_colours(pixels), labels, _to_rows_of_colours(test), test_y)


def _to_rows_of_colours(planes: Bytes) -> Bytes:
    """Return images (N, 32, 32, 3) of the official planes (N, 3072): all red first, then green, then blue."""
    return np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _read_binary_batch(content: bytes, name: str) -> tuple[Bytes, Bytes]:
    """Return planes (N, 3072) and labels (N,) of rows of one label byte and 3072 pixel bytes."""
    if not content or len(content) % (1 + _ROW):
        raise ValueError(
            f"a binary batch must be a multiple of {1 + _ROW} bytes, got {len(content)} in {name}: get a fresh copy"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + _ROW)
    return _checked_batch(rows[:, 1:], rows[:, 0], name)


def _read_python_batch(content: bytes, name: str) -> tuple[Bytes, Bytes]:
    """Return planes (N, 3072) and labels (N,) of a pickled dictionary."""
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        pixels = batch.get(b"data", batch.get("data"))
        labels = np.asarray(batch.get(b"labels", batch.get("labels")))
    except Exception as error:  # a damaged pickle fails in any way it likes
        raise ValueError(
            f"a python batch must be a pickled dictionary of arrays, numbers and text, got {name} ({error}): "
            "get a fresh copy"
        ) from error
    return _checked_batch(pixels, labels, name)


def _checked_batch(pixels: Any, labels: NDArray[Any], name: str) -> tuple[Bytes, Bytes]:
    fits = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape == (*labels.shape, _ROW)
    if not fits or labels.dtype.kind not in "iu" or not 0 <= labels.min(initial=0) <= labels.max(initial=0) <= 9:
        raise ValueError(
            f"a batch must have uint8 data (N, {_ROW}) and N labels in 0..9, got something else in {name}: "
            "get a fresh copy"
        )
    return pixels, labels.astype(np.uint8)


class _ArraysOnly(pickle.Unpickler):
    """Rebuilds numpy arrays and refuses every other object, since a pickle can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few names that rebuilding an array needs."""
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _reconstruct
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return _encode
        return _refuse(f"{module}.{name}")


def _reconstruct(kind: Any, shape: Any, code: Any) -> NDArray[Any]:
    """Return the empty array that a pickle then fills."""
    if kind is not np.ndarray:
        _refuse(repr(kind))
    return np.ndarray(shape, code)


def _encode(text: str, encoding: str) -> bytes:
    """Return the bytes that protocols below 3 write as text."""
    if encoding not in ("latin1", "latin-1"):
        _refuse(f"the codec {encoding!r}")
    return text.encode("latin1")


def _refuse(what: str) -> NoReturn:
    raise pickle.UnpicklingError(f"it asks for {what}, which may run code")
