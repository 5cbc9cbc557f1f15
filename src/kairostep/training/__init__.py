"""Training: one step, and the whole run around it. Importing this package does not import accelerate or diffusers."""

from typing import TYPE_CHECKING

from kairostep.lazy import import_at_first_use

if TYPE_CHECKING:
    from kairostep.training.ema import EMA as EMA
    from kairostep.training.run import Run as Run
    from kairostep.training.run import RunError as RunError
    from kairostep.training.run_errors import LostProcess as LostProcess
    from kairostep.training.trainer import Trainer as Trainer
    from kairostep.training.trainer import learning_rate_schedule as learning_rate_schedule
    from kairostep.training.trainer import seed_step as seed_step

__getattr__ = import_at_first_use(
    __name__,
    {
        "EMA": "ema",
        "LostProcess": "run_errors",
        "Run": "run",
        "RunError": "run",
        "Trainer": "trainer",
        "learning_rate_schedule": "trainer",
        "seed_step": "trainer",
    },
    moved={
        **{name: f"kairostep.runs.{name}" for name in ("CheckpointError", "Checkpoints", "Trained", "load_trained")},
        "warmed_up": "kairostep.training.learning_rate_schedule",
    },
)
