"""The parts of an experiment once it is trained, its data left out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from kairostep.diffusion import Objective, Prediction
from kairostep.diffusion.process import Process
from kairostep.experiments.config import Config


@dataclass(frozen=True)
class Trained:
    """A network in eval mode, without gradients, and what it was trained for."""

    config: Config
    process: Process
    prediction: Prediction
    objective: Objective
    model: nn.Module
    shape: tuple[int, ...]  # of a sample: (C, H, W), of a latent where there is an autoencoder
    num_classes: int  # that the model is told, 0 if none; the null class has this number
    to_pixels: Callable[[Tensor], Tensor]  # samples -> images (B, C, H, W) in [-1, 1]
    clip: bool  # whether samples are pixels, which stay in [-1, 1]
    checkpoint: Path
    step: int
    weights: str  # "ema" or "model"
    digest: str  # SHA-256 of the checkpoint
