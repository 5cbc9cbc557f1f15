"""Loads a trained model from a run directory, without its data."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kairostep.checks import choice
from kairostep.data.autoencoder import open_autoencoder
from kairostep.diffusion import Objective, Prediction
from kairostep.diffusion.process import Process
from kairostep.experiments.config import Config, load
from kairostep.experiments.experiment import make_network, make_objective
from kairostep.runs.checkpoint import CheckpointError, Checkpoints, read, read_digest, step_of


@dataclass(frozen=True)
class Trained:
    """A network in eval mode, without gradients, and the settings it was trained with."""

    config: Config
    process: Process
    prediction: Prediction
    objective: Objective
    model: nn.Module
    shape: tuple[int, ...]  # (C, H, W) of a sample, which is a latent if there is an autoencoder
    num_classes: int  # that the model is conditioned on, 0 if none; the null class has this number
    to_pixels: Callable[[Tensor], Tensor]  # samples -> images (B, C, H, W) in [-1, 1]
    clip: bool  # whether to clip samples to [-1, 1], as pixels are
    checkpoint: Path
    step: int
    weights: str  # "ema" or "model"
    digest: str  # SHA-256 of the checkpoint


def load_trained(
    run_directory: Path | str,
    checkpoint: str | int = "last",
    weights: str = "ema",
    device: torch.device | str = "cpu",
) -> Trained:
    """Return the model of a checkpoint.

    Args:
        run_directory: A directory that `kairostep train` wrote.
        checkpoint: "last", "best" or the number of a step.
        weights: "ema" for the averaged weights, "model" for the latest.
        device: Where to load the model.

    Raises:
        ValueError: The directory holds no such model; the message says what is missing.
    """
    choice("weights", weights, ("ema", "model"))
    directory, device = Path(run_directory), torch.device(device)
    config, objective = make_objective(load(config_path(directory)))
    path = find_checkpoint(directory, checkpoint)
    state = read_state(path)
    shape, num_classes = tuple(state["sample"]["shape"]), int(state["sample"]["num_classes"])
    model = make_network(config, shape, num_classes)
    model.load_state_dict(state["trainer"]["ema"]["model"] if weights == "ema" else state["trainer"]["model"])
    return Trained(
        config,
        objective.process,
        objective.prediction,
        objective,
        freeze(model, device),
        shape,
        num_classes,
        decoder(config.autoencoder, device),
        config.autoencoder is None,
        path,
        int(state["trainer"]["step"]),
        weights,
        read_digest(path),
    )


def config_path(directory: Path) -> Path:
    """Return the path of a run's config. Raise ValueError if the directory holds no run."""
    path = directory / "config.yaml"
    if not path.is_file():
        raise ValueError(
            f"a run directory must hold config.yaml, got {directory}: pass a directory that `kairostep train` wrote"
        )
    return path


def freeze(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model on the device, in eval mode and without gradients."""
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    model.to(device, memory_format=layout)  # type: ignore[call-overload]
    return model.eval().requires_grad_(False)


def find_checkpoint(directory: Path, which: str | int) -> Path:
    """Return the path of a run's checkpoint: "last", "best" or the number of a step."""
    checkpoints = Checkpoints(directory / "checkpoints", keep=1)
    paths = {int(path.stem.removeprefix("step-")): path for path in checkpoints.paths()}
    steps = ", ".join(map(str, paths))
    if not paths:
        raise ValueError(
            f"a run must have a checkpoint, got {directory} without any: train it to its first --checkpoint_every"
        )
    if which == "last":
        return paths[max(paths)]
    if which == "best":
        best = checkpoints.best()
        if best is None:
            raise ValueError(
                f"the best checkpoint must have a held-out loss, got none in {directory}: "
                f"pass --checkpoint last, or one of the steps {steps}"
            )
        return best
    if not str(which).isdecimal() or int(which) not in paths:
        raise ValueError(f"checkpoint must be last, best or a step that was kept, got {which!r}: there are {steps}")
    return paths[int(which)]


def find_checkpoints(directory: Path, which: str | int) -> list[str | int]:
    """Return the steps of all checkpoints for "all", otherwise `which` alone."""
    if which != "all":
        return [which]
    find_checkpoint(directory, "last")  # raises if there is none
    return [step for path in Checkpoints(directory / "checkpoints", keep=1).paths() if (step := step_of(path))]


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint. Raise ValueError if it lacks the shape of its samples."""
    try:
        state = read(path)
    except CheckpointError as error:
        raise ValueError(f"{error}: pass another one by --checkpoint STEP, or put back a good copy") from error
    if "sample" not in state:
        raise ValueError(
            f"a checkpoint must hold the shape of its samples, got {path} of an earlier version of kairostep: "
            "go on with the run for some steps, by a larger --steps"
        )
    return state


def decoder(autoencoder: str | None, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the function from samples to images: the autoencoder's, or the identity without one."""
    if autoencoder is None:
        return keep_pixels
    opened = open_autoencoder(autoencoder)
    return partial(decode, opened, opened.load(device))


def keep_pixels(x0: Tensor) -> Tensor:
    """Return the samples unchanged: they are images."""
    return x0


@torch.no_grad()
def decode(autoencoder: Any, model: nn.Module, x0: Tensor) -> Tensor:
    """Return the images that latents decode to."""
    return torch.as_tensor(autoencoder.decode(model, x0.to(torch.float32)))
