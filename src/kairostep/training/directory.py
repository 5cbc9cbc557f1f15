"""The run directory: an interface to people, reports and later runs."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

import kairostep
from kairostep.experiments.config import Config, differences, load, to_dict

PACKAGES = ("torch", "diffusers", "accelerate", "safetensors", "numpy")


def check(directory: Path, config: Config) -> None:
    """Raise ValueError if a run is already there that was configured otherwise or shall not be resumed."""
    path = directory / "config.yaml"
    if path.exists():
        changed = differences(load(path), config)
        if changed:
            raise ValueError(
                f"the run in {directory} was configured otherwise ({'; '.join(changed)}): "
                "pass the same settings to go on with it, or another --output"
            )
        if not config.resume:
            raise ValueError(f"{directory} already holds a run and --resume is false: pass another --output")


def write_config(directory: Path, config: Config, device: torch.device, world_size: int) -> None:
    """Write `config.yaml`: the settings, and what else a result depends on."""
    directory.mkdir(parents=True, exist_ok=True)
    kept = to_dict(replace(config, resume=True))  # or the command that goes on with this run would refuse to
    text = yaml.safe_dump({**kept, "provenance": provenance(device, world_size)}, sort_keys=False)
    temporary = directory / ".config.yaml"
    temporary.write_text(text)
    temporary.replace(directory / "config.yaml")


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold a lock on a directory, which ends with the process at the latest; ValueError if another process has it."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)  # of the directory itself: no file is left behind
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ValueError(
            f"a run directory must be written by one run at a time, got {directory}, in which another is training: "
            "wait for it, stop it, or pass another --output"
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


def provenance(device: torch.device, world_size: int) -> Mapping[str, Any]:
    """Return what a result depends on besides its config: versions, device, commit of the code."""
    versions = {name: _version(name) for name in PACKAGES}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "kairostep": kairostep.__version__,
        "python": platform.python_version(),
        **versions,
        "device": f"{device.type}: {name}",
        "processes": world_size,
        "commit": git_commit(),
    }


def git_commit() -> str | None:
    """Return the commit of the code that runs, `+` after it if files were changed, None outside a git checkout."""
    source = Path(__file__).parent
    try:
        _git(source, "ls-files", "--error-unmatch", "directory.py")  # fails where only the environment is in a checkout
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
