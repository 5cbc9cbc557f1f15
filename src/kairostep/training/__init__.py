"""Training: a step, and a whole run around it; what brings accelerate and diffusers is imported when it is used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kairostep.training.ema import EMA as EMA
    from kairostep.training.run import Run as Run
    from kairostep.training.run import RunError as RunError
    from kairostep.training.trainer import Trainer as Trainer
    from kairostep.training.trainer import learning_rate_schedule as learning_rate_schedule
    from kairostep.training.trainer import seed_step as seed_step

_LATER = {
    "EMA": "ema",
    "Run": "run",
    "RunError": "run",
    "Trainer": "trainer",
    "seed_step": "trainer",
    "learning_rate_schedule": "trainer",
}


_RENAMED = {
    **{name: f"kairostep.runs.{name}" for name in ("CheckpointError", "Checkpoints", "Trained", "load_trained")},
    "warmed_up": "kairostep.training.learning_rate_schedule",
}

if not TYPE_CHECKING:  # type checkers would take any name for one that is here

    def __getattr__(name: str) -> Any:
        """Return a name that is imported at its first use."""
        if name in _RENAMED:
            raise AttributeError(f"{__name__}.{name} has another name now: {_RENAMED[name]}")
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
