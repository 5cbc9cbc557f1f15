"""generation.json: the settings of the images in a folder, so that no others are mixed with them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kairostep.files import whole_file

NAME = "generation.json"
FREE = {"run", "num", "num_complete", "complete"}  # may differ where one generation goes on with another


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of a folder of generated images, None if it is empty or does not exist."""
    try:
        record: dict[str, Any] = json.loads((folder / NAME).read_text())
    except FileNotFoundError:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"images must go to an empty folder or one with {NAME}, got {folder}: pass another --output"
            ) from None
        return None
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        raise ValueError(f"{folder / NAME} must be what `kairostep generate` wrote, got {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("num"), int):
        raise ValueError(f"{folder / NAME} must be what `kairostep generate` wrote, got no number of images in it")
    return record


def check_record(folder: Path, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record of the folder; ValueError, naming the differences, if its images have other settings."""
    there = read_record(folder)
    if there is None:
        return {}
    keys = [key for key in record if key not in FREE and there.get(key) != record[key]]
    finished_npz = there.get("complete") and record["format"] == "npz"
    if record["num"] < there["num"] or (record["num"] > there["num"] and finished_npz):
        keys.append("num")
    if keys:
        changes = "; ".join(f"{key}: {there.get(key)} -> {record[key]}" for key in keys)
        raise ValueError(
            f"the images in {folder} were generated otherwise ({changes}): "
            "pass the same settings to go on with them, or another --output"
        )
    return there


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the record, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / NAME) as temporary:
        temporary.write_text(json.dumps(dict(record), indent=2) + "\n")
