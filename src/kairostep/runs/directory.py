"""The run directory: its config, its lock and where a result comes from."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
import yaml

from kairostep.experiments.config import Config, differences, load, to_dict
from kairostep.experiments.experiment import fill_defaults
from kairostep.files import whole_file
from kairostep.version import __version__

try:
    import fcntl
except ImportError:  # on Windows, where a directory cannot be locked
    fcntl = None  # type: ignore[assignment]

PACKAGES = ("torch", "diffusers", "accelerate", "safetensors", "numpy")


def check(directory: Path, config: Config) -> None:
    """Raise ValueError if the directory holds a run with other settings, or a run that must not be resumed."""
    path = directory / "config.yaml"
    if path.exists():
        changed = differences(fill_defaults(load(path)), config)  # options newer than the file get their default
        if changed:
            raise ValueError(
                f"the run in {directory} was configured otherwise ({'; '.join(changed)}): "
                "pass the same settings to go on with it, or another --output"
            )
        if not config.resume:
            raise ValueError(f"{directory} already holds a run and --resume is false: pass another --output")


def check_same_data(known: str, found: str, where: str) -> None:
    """Raise ValueError if data with the fingerprint `found` are not those that are known."""
    if known != found:
        raise ValueError(
            f"the data of {where} must stay as they were, but have changed: put them back, or pass another --output"
        )


def write_config(directory: Path, config: Config, device: torch.device, world_size: int) -> None:
    """Write `config.yaml`: the settings and the provenance."""
    kept = to_dict(replace(config, resume=True))  # so that `train --config` of this file continues the run
    text = yaml.safe_dump({**kept, "provenance": provenance(device, world_size)}, sort_keys=False)
    directory.mkdir(parents=True, exist_ok=True)
    with whole_file(directory / "config.yaml") as temporary:
        temporary.write_text(text)


class DirectoryLock:
    """Creates a directory and locks it against other processes, until `release` or the end of this process.

    Args:
        directory: The directory to lock.

    Raises:
        ValueError: Another process holds the lock, or the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / ".lock"
        self.file: IO[str] | None = None
        while self.file is None:
            file = self._open()
            try:
                # Not flock: forked workers inherit it and would hold it for seconds after this process is killed
                if fcntl is not None:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                file.close()
                raise ValueError(
                    f"a directory must be written by one command at a time, got {directory}, in which another is at "
                    "work: wait for it, stop it, or pass another --output"
                ) from error
            if self._is_at_path(file):
                self.file = file
            else:
                file.close()  # another process removed this file meanwhile: lock the new one

    def _open(self) -> IO[str]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return self.path.open("a")
        except OSError as error:
            raise ValueError(f"output must be a folder that can be written, got {self.path.parent}: {error}") from error

    def _is_at_path(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Unlock the directory."""
        if self.file is not None:
            if self._is_at_path(self.file):
                self.path.unlink(missing_ok=True)  # still locked: whoever opened it before sees that it is gone
            self.file.close()
            self.file = None


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Lock a directory for a block."""
    lock = DirectoryLock(directory)
    try:
        yield
    finally:
        lock.release()


def provenance(device: torch.device, world_size: int) -> Mapping[str, Any]:
    """Return what a result depends on besides its config: versions, device, processes and commit."""
    versions = {name: _version(name) for name in PACKAGES} | {"torch": str(torch.__version__)}  # with its build
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "kairostep": __version__,
        "python": platform.python_version(),
        **versions,
        "device": f"{device.type}: {name}",
        "processes": world_size,
        "commit": git_commit(),
    }


def git_commit() -> str | None:
    """Return the commit of this code, followed by `+` if files were changed; None outside a git checkout."""
    source = Path(__file__).parent
    try:
        _git(source, "ls-files", "--error-unmatch", "directory.py")  # fails if the checkout is not of this code
        commit = _git(source, "rev-parse", "HEAD")
        return f"{commit}+" if _git(source, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
