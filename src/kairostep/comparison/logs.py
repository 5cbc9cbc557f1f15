"""Reads logs of earlier studies, FOLDER/TASK/ARM/seed-N.jsonl: the origin, a line per checkpoint, the end."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairostep.bounded_files import Unreadable, read_bytes

MAX_BYTES = 10_000_000  # of a log
BASE = "uniform"


@dataclass(frozen=True)
class Log:
    """The log of one run."""

    where: Mapping[str, Any]  # command, device, commit, seed
    checkpoints: list[dict[str, Any]]
    end: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Log":
        """Return the log in a file. Raise ValueError if it is no log."""
        try:
            where, *checkpoints, end = map(json.loads, read_bytes(path, MAX_BYTES).decode().splitlines())
            return cls(where, checkpoints, end)
        except (OSError, Unreadable, ValueError) as error:
            raise ValueError(f"{path} must be the log of a run, got {error}: put back a good copy") from error

    def final(self, key: str) -> float:
        """Return a measurement of the last checkpoint."""
        return float(self.checkpoints[-1][key])

    @property
    def seconds_per_step(self) -> float:
        """Seconds of training between the first and the last checkpoint, per step."""
        first, last = self.checkpoints[0], self.checkpoints[-1]
        if first is last:
            return float(last["seconds"] / last["step"])
        return float((last["seconds"] - first["seconds"]) / (last["step"] - first["step"]))

    def costs(self, cost: str) -> list[float]:
        """Return the cost at each checkpoint: seconds without start-up, or network evaluations including probes."""
        if cost == "seconds":
            return [line["step"] * self.seconds_per_step for line in self.checkpoints]
        return [line["training_evaluations"] + line["probe_evaluations"] for line in self.checkpoints]

    def curve(self, key: str, cost: str) -> tuple[list[float], list[float]]:
        """Return the costs and values of a measurement at each checkpoint."""
        return self.costs(cost), [float(line[key]) for line in self.checkpoints]


Logs = dict[int, Log]  # by seed


def read_logs(folder: Path) -> dict[str, dict[str, Logs]]:
    """Return all logs by task, arm and seed. Tasks without a baseline are left out."""
    found: dict[str, dict[str, Logs]] = {}
    for path in sorted(folder.glob("*/*/seed-*.jsonl")):
        log = Log.read(path)
        found.setdefault(path.parts[-3], {}).setdefault(path.parts[-2], {})[log.where["seed"]] = log
    return {task: arms for task, arms in found.items() if BASE in arms}


def has_logs(folder: Path) -> bool:
    """Whether a folder holds logs of a study."""
    return any(folder.glob("*/*/seed-*.jsonl"))
