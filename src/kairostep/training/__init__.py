"""Training: a step, and a whole run around it."""

from kairostep.training.checkpoint import CheckpointError as CheckpointError
from kairostep.training.checkpoint import Checkpoints as Checkpoints
from kairostep.training.ema import EMA as EMA
from kairostep.training.run import Run as Run
from kairostep.training.run import RunError as RunError
from kairostep.training.trained import Trained as Trained
from kairostep.training.trained import load_trained as load_trained
from kairostep.training.trainer import Trainer as Trainer
from kairostep.training.trainer import seed_step as seed_step
from kairostep.training.trainer import warmed_up as warmed_up
