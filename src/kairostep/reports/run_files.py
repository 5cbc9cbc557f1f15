"""Reading a run directory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairostep.bounded_files import Unreadable, line_chunks, read_yaml
from kairostep.renamed_options import with_new_names
from kairostep.reports.metrics_file import MAX_BYTES, parsed


@dataclass(frozen=True)
class RunFiles:
    """What a run has written so far."""

    directory: Path
    config: Mapping[str, Any]
    metrics: list[dict[str, Any]]  # in the order of steps

    @classmethod
    def read(cls, directory: Path) -> "RunFiles":
        """Return what is there; a torn last line of a run that is still writing is left out."""
        directory = directory.absolute()  # has a name, also for "."
        path = directory / "metrics.jsonl"
        chunks = line_chunks(path, MAX_BYTES) if path.is_file() else ()
        lines = [line for chunk in chunks for line in map(parsed, chunk) if line]
        return cls(directory, _config_in(directory), lines)

    def latest(self, key: str) -> Any:
        """Return the newest value of a metric, None if none was written."""
        return next((line[key] for line in reversed(self.metrics) if key in line), None)

    def name(self, part: str) -> str:
        """Return the name of a part, such as the sampler."""
        value = self.config.get(part)
        return str(value["name"] if isinstance(value, Mapping) else value)


def _config_in(directory: Path) -> Mapping[str, Any]:
    try:
        config = read_yaml(directory / "config.yaml")
        if isinstance(config, Mapping):
            return with_new_names(config)
        reason = "it holds no settings"
    except FileNotFoundError:
        reason = "it is not there"
    except (OSError, Unreadable) as error:
        reason = str(error)
    raise ValueError(f"a run directory must hold config.yaml, got {directory} ({reason}): name one that `train` made")
