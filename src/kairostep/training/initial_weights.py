"""Weights that a run begins with instead of random ones: those of another run, or of a file."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from kairostep.experiments import Config
from kairostep.experiments.config import load
from kairostep.experiments.experiment import make_objective
from kairostep.runs.trained import find_checkpoint, read_state

NAMES = ("diffusion_pytorch_model.safetensors", "model.safetensors")  # as diffusers and `export` write them
FOLDERS = ("", "unet", "transformer", "model/unet", "model/transformer")


def load_initial_weights(network: nn.Module, source: str | None) -> None:
    """Set the weights of a network to those in `source`, which must be of the same network; None leaves them.

    Args:
        network: What is going to be trained.
        source: A run directory, for the averaged weights of its last checkpoint; a folder that diffusers'
            `save_pretrained` wrote, or one with such a folder `unet` or `transformer`; or a safetensors file.

    Raises:
        ValueError: There are no weights, or they belong to another network.
    """
    if source is None:
        return
    weights = read_weights(Path(source).expanduser())
    problem = difference(network.state_dict(), weights)
    if problem:
        raise ValueError(
            f"initial_weights must be of the network that is trained, got {source}, {problem}: pass the --network "
            "options and the --label_dropout that it was trained with"
        )
    network.load_state_dict(weights)


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Return the weights of a run, a folder or a file, by name."""
    if (path / "config.yaml").is_file():
        weights: Mapping[str, Tensor] = read_state(find_checkpoint(path, "last"))["trainer"]["ema"]["model"]
        return weights
    files = [path] if path.is_file() else [path / folder / name for folder in FOLDERS for name in NAMES]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ValueError(
            f"initial_weights must be a run directory, a folder with {NAMES[0]} or a safetensors file, got {path}: "
            "pass for instance --initial_weights=runs/digits"
        )
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"initial_weights must be a readable safetensors file, got {file}: {error}; get a fresh copy"
        ) from error


def difference(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str | None:
    """Return in words how two sets of weights differ in names or shapes, None if they do not."""
    missing = [name for name in own if name not in other]
    more = [name for name in other if name not in own]
    if missing or more:
        first = f"such as {(missing or more)[0]}"
        return f"which lacks {len(missing)} of {len(own)} tensors and has {len(more)} others, {first}"
    for name, tensor in own.items():
        if other[name].shape != tensor.shape:
            return f"with {name} of shape {tuple(other[name].shape)} instead of {tuple(tensor.shape)}"
    return None


def initial_weights_notes(config: Config) -> list[str]:
    """Return a note on which weights the run begins with, and one if they learned to predict something else."""
    if config.initial_weights is None:
        return []
    source = f"training begins with the weights of {config.initial_weights}; the average starts from them too"
    path = Path(config.initial_weights).expanduser() / "config.yaml"
    if not path.is_file():
        return [source]
    before, _ = make_objective(load(path))
    old, new = (f"{each.prediction} under {each.process.name}" for each in (before, config))
    if old == new:
        return [source]
    return [
        source,
        f"the weights of {config.initial_weights} predict {old}, this run trains {new}, which it has to learn first: "
        f"pass --process={before.process.name} --prediction={before.prediction} to train on what they know",
    ]
