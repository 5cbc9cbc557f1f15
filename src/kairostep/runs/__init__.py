"""What a run leaves on disk, written and read in one room; what brings data sets and networks is imported when used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kairostep.runs.checkpoint import CheckpointError as CheckpointError
    from kairostep.runs.checkpoint import Checkpoints as Checkpoints
    from kairostep.runs.history import RunHistory as RunHistory
    from kairostep.runs.recorder import Recorder as Recorder
    from kairostep.runs.trained import Trained as Trained
    from kairostep.runs.trained import load_trained as load_trained

_LATER = {
    "CheckpointError": "checkpoint",
    "Checkpoints": "checkpoint",
    "Recorder": "recorder",
    "RunHistory": "history",
    "Trained": "trained",
    "load_trained": "trained",
}

if not TYPE_CHECKING:  # type checkers would take any name for one that is here

    def __getattr__(name: str) -> Any:
        """Return a name that is imported at its first use."""
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
