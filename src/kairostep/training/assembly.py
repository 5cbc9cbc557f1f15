"""Builds the accelerator, trainer and batches of an experiment."""

import os
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, LoggerType

from kairostep.data import Batches
from kairostep.experiments import Config, Experiment
from kairostep.parallelism import check_parallelism
from kairostep.training.cuda_graphs import ReplayedTrainer
from kairostep.training.restarts import join_after_restart
from kairostep.training.step_mode import StepMode, choose_step_mode, compile_network
from kairostep.training.trainer import Trainer, learning_rate_schedule

GROUP_TIMEOUT = timedelta(hours=24)  # of a collective: processes wait long while the first encodes, measures or writes


def make_accelerator(config: Config) -> Accelerator:
    """Return an accelerator with the config's precision, trackers and determinism."""
    check_parallelism()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.benchmark = not config.deterministic
    waits = config.autoencoder is not None or config.rank_timeout > 0  # a watch ends them if one is lost
    join_after_restart(GROUP_TIMEOUT)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Tried adding logger|.*no supported trackers")  # an error below
        accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),  # without this, accelerate ignores torchrun's other processes
            mixed_precision="no" if config.precision == "fp32" else config.precision,
            log_with=list(config.trackers) or None,
            project_dir=Path(config.output or ".") / "trackers",
            kwargs_handlers=[InitProcessGroupKwargs(timeout=GROUP_TIMEOUT)] if waits else None,
        )
    check_parallelism(accelerator.distributed_type.value)
    check_trackers(config.trackers, accelerator)
    return accelerator


def check_trackers(names: tuple[str, ...], accelerator: Accelerator) -> None:
    """Raise ValueError if a tracker is not installed: accelerate drops it silently."""
    found = {str(LoggerType(tracker)) for tracker in accelerator.log_with}
    for name in names:
        if name not in found and name != "all":
            raise ValueError(f"a tracker must be installed, got {name!r}: pip install {name}")


def step_mode_of(config: Config, accelerator: Accelerator) -> StepMode:
    """Return how this machine executes the steps of a config."""
    return choose_step_mode(config.speed, config.steps * config.batch_size, accelerator)


def make_trainer(experiment: Experiment, accelerator: Accelerator, step_mode: StepMode | None = None) -> Trainer:
    """Return the trainer of an experiment.

    Args:
        experiment: What to train.
        accelerator: The device, the processes and the precision.
        step_mode: How to execute steps. Default: `step_mode_of` the experiment's config.
    """
    config = experiment.config
    optimizer_class = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    optimizer = optimizer_class(
        experiment.model.parameters(),
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=accelerator.device.type == "cuda",
    )
    step_mode = step_mode or step_mode_of(config, accelerator)
    if step_mode.mode == "compile":
        compile_network(experiment.model)
    trainer_class = ReplayedTrainer if step_mode.replays else Trainer
    return trainer_class(
        experiment.model,
        experiment.objective,
        experiment.sampler,
        optimizer,
        accelerator=accelerator,
        learning_rate=learning_rate_schedule(
            config.learning_rate, config.warmup_steps, config.steps if config.schedule == "cosine" else None
        ),
        max_grad_norm=config.max_grad_norm,
        ema_decay=config.ema_decay,
        pairs=config.pairs,
        channels_last=step_mode.mode == "compile" and accelerator.device.type == "cuda",
        seed=config.seed,
    )


def make_batches(experiment: Experiment, accelerator: Accelerator) -> Batches:
    """Return the batches of an experiment. One optimizer step takes `accumulate` of them."""
    config, num_processes = experiment.config, accelerator.num_processes
    check_divides(config, num_processes)
    return Batches(
        experiment.dataset,
        config.batch_size // config.accumulate,
        seed=config.seed,
        device=accelerator.device,
        rank=accelerator.process_index,
        world_size=num_processes,
        label_dropout=None if config.label_dropout is None else float(config.label_dropout),
        num_workers=config.workers,
    )


def check_divides(config: Config, num_processes: int) -> None:
    """Raise ValueError if the processes cannot share a batch evenly."""
    parts = config.accumulate * num_processes
    if config.batch_size % parts == 0:
        return
    num_rows = config.batch_size // config.accumulate  # of a micro-batch, over all processes
    fitting = max(num for num in range(1, num_processes) if num_rows % num == 0)
    below = config.batch_size // parts * parts
    sizes = [f"--batch_size={size}" for size in (below, below + parts) if size]
    goes_on = config.output is not None and (Path(config.output) / "config.yaml").exists()
    other_size = ", since a run that goes on keeps its batch" if goes_on else f", or pass {' or '.join(sizes)}"
    raise ValueError(
        f"batch_size must be a multiple of accumulate times the processes, {config.accumulate} x {num_processes}, "
        f"got {config.batch_size}: launch {fitting} process{'es' * (fitting > 1)}{other_size}"
    )
