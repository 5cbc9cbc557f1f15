"""Writes files whole or not at all, whatever happens meanwhile."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to. After the block, the file is synced to disk and renamed to `path`.

    If the block or the disk fails, the old file stays and the temporary one is removed. A killed process leaves the
    temporary file behind, and the next writer replaces it.

    Args:
        path: The file to write, in a folder that exists.
        shared: Whether several processes may write this file at once. Each then has its own temporary name.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}" if shared else f".{path.name}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # or a power cut may leave an empty file
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that a power cut cannot undo renames in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
