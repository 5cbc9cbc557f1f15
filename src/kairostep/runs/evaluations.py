"""Writes and reads `evaluations.jsonl` of a run: one line for each measurement of a checkpoint."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kairostep.bounded_files import Unreadable, read_bytes
from kairostep.runs.metrics import parse_line

EVALUATIONS = "evaluations.jsonl"
MAX_EVALUATIONS = 16_000_000  # bytes, about two thousand evaluations


def append_evaluations(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append lines, all or none. A torn last line gets a line of its own."""
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = end > 0 and file.read(1) != b"\n"
        file.write((("\n" if torn else "") + text).encode())
        file.flush()
        os.fsync(file.fileno())


def read_evaluations(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return the readable lines. Describe unreadable ones in `problems`."""
    try:
        lines = read_bytes(path, MAX_EVALUATIONS).decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, Unreadable) as error:
        problems.append(f"{path.name} cannot be read: {reason_of(error)}")
        return []
    read = [parse_line(line) for line in lines if line.strip()]
    if None in read:
        problems.append(f"{sum(line is None for line in read)} of {len(read)} lines of {path.name} cannot be read")
    return [line for line in read if line is not None]


def reason_of(error: Exception) -> str:
    """Return why a file could not be read, in words."""
    if isinstance(error, FileNotFoundError):
        return "it is not there"
    return str(getattr(error, "strerror", None) or error)
