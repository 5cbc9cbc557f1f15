"""Writes results as JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kairostep.files import whole_file

SCHEMA = 1  # version of the documents


def plain(value: Any) -> Any:
    """Return data that JSON can hold: dataclasses as mappings, tensors as lists, non-finite numbers as None."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_result(path: Path, analysis: str, facts: Mapping[str, Any], result: Any) -> None:
    """Write a result and the facts it depends on, whole or not at all."""
    document = {"schema": SCHEMA, "analysis": analysis, **plain(facts), "result": plain(result)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, shared=True) as temporary:
            temporary.write_text(json.dumps(document, allow_nan=False, indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"results must go to a file that can be written, got {path}: {error.strerror}") from error
