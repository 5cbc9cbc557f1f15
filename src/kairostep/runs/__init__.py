"""The files of a run, written and read in one place. Importing this package imports no data sets or networks."""

from typing import TYPE_CHECKING

from kairostep.lazy import import_at_first_use

if TYPE_CHECKING:
    from kairostep.runs.checkpoint import CheckpointError as CheckpointError
    from kairostep.runs.checkpoint import Checkpoints as Checkpoints
    from kairostep.runs.history import RunHistory as RunHistory
    from kairostep.runs.recorder import Recorder as Recorder
    from kairostep.runs.trained import Trained as Trained
    from kairostep.runs.trained import load_trained as load_trained

__getattr__ = import_at_first_use(
    __name__,
    {
        "CheckpointError": "checkpoint",
        "Checkpoints": "checkpoint",
        "Recorder": "recorder",
        "RunHistory": "history",
        "Trained": "trained",
        "load_trained": "trained",
    },
)
