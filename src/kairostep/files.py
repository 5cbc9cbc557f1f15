"""Writes files whole or not at all, whatever happens meanwhile."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]


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


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait while another process is in this block with the same path, so that only the first one has to make the file.

    The lock is a hidden file beside `path`, removed at the end. Where none can be made or locked, nothing waits.
    """
    lock = path.with_name(f".{path.name}.lock")
    with ExitStack() as stack:
        with suppress(OSError):  # a read-only folder, or a network disk without locks
            lock.parent.mkdir(parents=True, exist_ok=True)
            while fcntl is not None and not _locked(lock, stack):
                pass
        yield


def _locked(lock: Path, stack: ExitStack) -> bool:
    """Lock a file until the stack ends. Return False if its holder removed it meanwhile: there may be a new one."""
    with ExitStack() as own:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        own.callback(os.close, descriptor)  # releases the lock, as the end of the process does
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not os.fstat(descriptor).st_nlink:
            return False
        own.callback(lock.unlink, missing_ok=True)  # before it is released
        stack.enter_context(own.pop_all())
    return True


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that a power cut cannot undo renames in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
