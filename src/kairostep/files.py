"""Files that are whole or not there, whatever happens while they are written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end of the block its content is on the disk under the name `path`.

    If the block or the disk fails, what was at `path` stays as it was and nothing is left beside it. A process killed
    in between leaves the temporary file, which the next writer replaces.

    Args:
        path: Where the file belongs, in a folder that is there.
        shared: Whether several processes may write this file at once, each then under a temporary name of its own.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}" if shared else f".{path.name}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # or a power cut may leave the name without its content
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last: without it a power cut could undo them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
