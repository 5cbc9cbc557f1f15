"""Checkpoints: one safetensors file each, without pickle, written whole or not at all, verified when read."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kairostep.files import sync_folder, whole_file
from kairostep.shares import Share

log = logging.getLogger("kairostep")


class CheckpointError(ValueError):
    """A checkpoint is damaged or does not fit."""


class Checkpoints:
    """The checkpoints of one run. It keeps the last ones, the best one and milestones.

    Args:
        directory: Holds `step-00001000.safetensors` and so on.
        keep: How many of the last checkpoints to keep.
        keep_every: Also keep the checkpoints at multiples of this many steps; 0: none.
    """

    def __init__(self, directory: Path, keep: int, keep_every: int = 0) -> None:
        self.directory, self.keep, self.keep_every = directory, keep, keep_every

    @property
    def last(self) -> Path | None:
        """The checkpoint of the latest step."""
        return next(reversed(self.paths()), None)

    def paths(self) -> list[Path]:
        """Return the checkpoints, oldest first."""
        try:
            paths = [path for path in self.directory.glob("step-*.safetensors") if step_of(path) is not None]
        except FileNotFoundError:  # the folder was removed just now
            return []
        return sorted(paths, key=lambda path: step_of(path) or 0)

    def read_newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest readable checkpoint and its state, None if there is none. Warn about damaged ones."""
        paths = self.paths()
        for path in reversed(paths):
            try:
                return path, read(path)
            except CheckpointError as error:
                log.warning("%s; using the one before", error)
        if paths:
            raise CheckpointError(
                f"none of the {len(paths)} checkpoints in {self.directory} can be read: "
                "put back a good one, or pass another --output to start anew"
            )
        return None

    def save(self, step: int, state: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        """Write the state of a step, and remove checkpoints that need not be kept.

        Args:
            step: Names the file.
            state: Tensors, numbers and text, nested in any way.
            facts: Can be read without the state. The fact `held_out` ranks checkpoints, see `best`.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"step-{step:08d}.safetensors"
        write(path, state, facts)
        self.prune(path)
        return path

    def prune(self, latest: Path) -> None:
        """Remove the checkpoints that need not be kept, and what an interrupted save left behind."""
        for pattern in (".step-*", ".tmp*"):  # safetensors has temporary names of its own
            for leftover in self.directory.glob(pattern):
                if not leftover.is_dir():
                    leftover.unlink(missing_ok=True)
        paths = self.paths()
        last = paths[: paths.index(latest) + 1][-self.keep :] if latest in paths else []  # later ones are unreadable
        milestones = [path for path in paths if self.keep_every and (step_of(path) or 0) % self.keep_every == 0]
        kept = {*last, *milestones, self.best()}
        for path in paths:
            if path not in kept and not path.is_dir():
                path.unlink(missing_ok=True)  # another process may have removed it

    def best(self) -> Path | None:
        """Return the checkpoint with the lowest held-out loss, None if none has one."""
        ranked = []
        for path in self.paths():
            try:
                value = read_facts(path).get("held_out")
            except CheckpointError:
                continue
            if isinstance(value, int | float) and math.isfinite(value):
                ranked.append((value, path))
        return min(ranked)[1] if ranked else None


def check_same_checkpoint(path: Path | None, share: Share) -> None:
    """Raise in all processes unless they have found the same checkpoint, or all none."""
    found: dict[str, list[int]] = {}
    own = "none" if path is None else f"{path.name} (SHA-256 {read_digest(path)[:12]})"
    for process, name in enumerate(share.gather(own)):
        found.setdefault(name, []).append(process)
    if len(found) > 1:
        given = ", ".join(f"{name} in process {' '.join(map(str, numbers))}" for name, numbers in found.items())
        raise CheckpointError(
            f"all processes must go on from the same checkpoint, got {given}: let all machines see one run directory, "
            "and start again once its files have reached them"
        )


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name, None for another file."""
    number = path.stem.removeprefix("step-")
    return int(number) if number.isdecimal() else None


def write(path: Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write nested tensors, numbers and text: to a temporary file, which is synced to disk and renamed."""
    tensors: dict[str, Tensor] = {}
    skeleton = json.dumps(_take_tensors(state, "", tensors))
    header = {"state": skeleton, "facts": json.dumps(dict(facts))}
    header["sha256"] = digest(tensors, header)
    try:
        with whole_file(path) as temporary:
            save_file(tensors, temporary, metadata=header)
            temporary.chmod(usual_mode())
        sync_folder(path.parent)
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error


def read(path: Path) -> dict[str, Any]:
    """Return the state that `write` wrote, on the CPU. Raise CheckpointError if any bit of the file is damaged."""
    header = _header(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if digest(tensors, {"state": header["state"], "facts": header["facts"]}) != header["sha256"]:
        raise CheckpointError(f"{path} is damaged: its content does not have the SHA-256 it was written with")
    state: dict[str, Any] = _put_tensors(json.loads(header["state"]), tensors)
    return state


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts that were written with a checkpoint."""
    try:
        facts: dict[str, Any] = json.loads(_header(path)["facts"])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(facts, dict):
        raise CheckpointError(f"{path} is damaged: its facts are {type(facts).__name__}, not a mapping")
    return facts


def read_digest(path: Path) -> str:
    """Return the SHA-256 that a checkpoint was written with."""
    return _header(path)["sha256"]


def _header(path: Path) -> dict[str, str]:
    if path.is_dir():
        raise CheckpointError(f"{path} is damaged: it must be a file, and is a directory")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if missing := {"state", "facts", "sha256"} - set(header):
        raise CheckpointError(f"{path} is not a checkpoint of kairostep: it lacks {', '.join(sorted(missing))}")
    return header


def digest(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    """Return a SHA-256 over the names, dtypes, shapes and bytes of all tensors, and over the header."""
    sha = hashlib.sha256(json.dumps(dict(header), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()


def usual_mode() -> int:
    """Return the usual mode of new files. safetensors makes files that only their owner can read."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


# Nested states: tensors go to the file under the path of their keys, everything else into JSON.


def _take_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        while name in tensors:
            name += "'"  # {"a": {"b": x}, "a.b": y}
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()  # a copy: safetensors refuses shared memory
        return {"tensor": name}
    if isinstance(value, Mapping):
        items = [[key, _take_tensors(item, f"{name}.{key}", tensors)] for key, item in value.items()]
        return {"mapping": items}  # pairs: the keys of an optimizer's state are numbers
    if isinstance(value, list | tuple):
        return {"list": [_take_tensors(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    return value


def _put_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "mapping":
        return {key: _put_tensors(item, tensors) for key, item in content}
    return [_put_tensors(item, tensors) for item in content]
