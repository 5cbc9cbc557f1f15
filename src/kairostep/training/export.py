"""Writes a trained model as diffusers loads it."""

import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers.models.unets.unet_2d import UNet2DModel
from diffusers.pipelines.ddpm.pipeline_ddpm import DDPMPipeline
from safetensors.torch import save_model
from torch import nn

from kairostep.data import LatentSet
from kairostep.diffusion import EDMProcess, FlowProcess
from kairostep.experiments import Experiment
from kairostep.generation import native_prediction, scheduler_for
from kairostep.runs.checkpoint import usual_mode


def export(experiment: Experiment, model: nn.Module, directory: Path) -> str:
    """Write the model, its scheduler and its autoencoder, and return the code that loads them.

    An earlier export is replaced whole, or not at all.
    """
    temporary = directory.with_name(f".{directory.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    parts = parts_of(experiment, model)
    if fits_ddpm_pipeline(experiment, parts):
        DDPMPipeline(**parts).save_pretrained(temporary)
        code = loading_code("pipeline", DDPMPipeline, directory)
    else:
        for name, part in parts.items():
            save_part(part, temporary / name)
        code = "; ".join(loading_code(name, type(part), directory / name) for name, part in parts.items())
    for path in temporary.rglob("*.safetensors"):
        path.chmod(usual_mode())
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)
    return code


def save_part(part: Any, folder: Path) -> None:
    """Write a part as diffusers does, or only the weights if it is no diffusers model."""
    if hasattr(part, "save_pretrained"):
        part.save_pretrained(folder)
    else:
        folder.mkdir(parents=True)
        save_model(part, str(folder / "model.safetensors"))


def loading_code(name: str, kind: type, folder: Path) -> str:
    """Return the code that loads an object of this class from a folder into a variable."""
    if not hasattr(kind, "from_pretrained"):
        return f'from kairostep.runs import load_trained; {name} = load_trained("{folder.parent.parent}").model'
    package = {"diffusers": "diffusers", "kairostep": "kairostep.networks"}.get(
        kind.__module__.partition(".")[0], kind.__module__
    )
    return f'from {package} import {kind.__name__}; {name} = {kind.__name__}.from_pretrained("{folder}")'


def parts_of(experiment: Experiment, model: nn.Module) -> dict[str, Any]:
    """Return network, scheduler and autoencoder, by the names of their folders.

    The scheduler is left out if diffusers has none for this prediction, such as velocity under a discrete process.
    """
    parts: dict[str, Any] = {"unet" if isinstance(model, UNet2DModel) else "transformer": model}
    native = native_prediction(experiment.process, experiment.prediction)
    if native == experiment.prediction:
        parts["scheduler"] = scheduler_for(experiment.process, native, clip=experiment.config.autoencoder is None)
    if isinstance(experiment.dataset, LatentSet):
        parts["autoencoder"] = experiment.dataset.autoencoder.load(torch.device("cpu"))
    return parts


def fits_ddpm_pipeline(experiment: Experiment, parts: dict[str, Any]) -> bool:
    """Whether diffusers' DDPM pipeline, for unconditional U-Nets on pixels, generates as this experiment does."""
    process = experiment.process
    if isinstance(process, EDMProcess) or (isinstance(process, FlowProcess) and process.time_scale != 1000):
        return False
    return set(parts) == {"unet", "scheduler"} and not experiment.num_classes
