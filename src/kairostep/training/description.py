"""What a run is about to do, and what it has done, in a few lines each."""

import shlex
from pathlib import Path

from accelerate import Accelerator

from kairostep.experiments import Experiment
from kairostep.progress_meter import duration
from kairostep.training.step_mode import StepMode


def describe(
    experiment: Experiment, accelerator: Accelerator, step_mode: StepMode, before: tuple[int, int], num_held_out: int
) -> str:
    """Return three lines: data and model, steps and devices, speed.

    Args:
        experiment: What is trained, its config with all defaults filled in.
        accelerator: Where it is trained.
        step_mode: How steps are taken, and why.
        before: Steps taken before, and the number of processes that took them.
        num_held_out: Images held out.
    """
    config, dataset, (step, num_processes) = experiment.config, experiment.dataset, before
    num_parameters = sum(p.numel() for p in experiment.model.parameters()) / 1e6
    parts = (config.process.name, config.prediction, config.weighting.name, config.sampler.name)
    resumed = f"going on from step {step} to {config.steps}"
    taken = resumed if step < config.steps else f"{step} steps taken before"
    start = taken if step else f"{config.steps} steps"
    if step and num_processes != accelerator.num_processes:
        start += f", {num_processes} process{'es' if num_processes > 1 else ''} before"
    held_out = f", {num_held_out} held out" if num_held_out else ", none held out"
    classes = f", {experiment.num_classes} classes" if experiment.num_classes else ""
    return (
        f"{config.data.name}: {len(dataset)} x {dataset.shape}{classes}{held_out}; "
        f"{config.network.name} of {num_parameters:.2f}M parameters; {', '.join(map(str, parts))}\n"
        f"{start}, {config.batch_size} images each, on {accelerator.num_processes} x {accelerator.device.type}, "
        f"{config.precision}; run directory {config.output}\n"
        f"speed {step_mode.mode}: {step_mode.why}"
    )


def describe_end(directory: Path, num_steps: int, seconds: tuple[float, float], loading: str, what: str) -> str:
    """Return four lines: what was trained, how long it took, and two ways to use the model.

    Args:
        directory: Of the run.
        num_steps: Steps taken.
        seconds: Of training, and of all.
        loading: Code that loads the model.
        what: All that the seconds are of: "command" or "run".
    """
    training, total = map(duration, seconds)
    return (
        f"trained {num_steps} steps in {training} of training: {directory}\n"
        f"this {what} took {total}, with start, held-out losses, samples and files\n"
        f"make images with: kairostep generate {shlex.quote(str(directory))} --num_images 64\n"
        f"or load the model: {loading}"
    )
