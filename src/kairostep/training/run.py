"""A whole run: from a config to a directory with metrics, samples, checkpoints and a model."""

import itertools
import logging
import math
import shlex
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

from kairostep.evaluation import held_out_loss
from kairostep.experiments import Config, build
from kairostep.generation import generate, save_grid
from kairostep.training.checkpoint import CheckpointError, Checkpoints, read
from kairostep.training.directory import alone_in, check, write_config
from kairostep.training.export import export
from kairostep.training.interruption import Interruption
from kairostep.training.recorder import Recorder
from kairostep.training.setup import make_accelerator, make_batches, make_trainer
from kairostep.training.stopwatch import Stopwatch

log = logging.getLogger("kairostep")

NUM_GRID_IMAGES = 64
SAMPLE_SEED = 1  # of the noise of grids and of the held-out loss, the same in all runs so that they pair


class RunError(RuntimeError):
    """A run that cannot go on; the message says what is left and what to do."""


class Run:
    """One experiment in its directory: `Run(config).train()` starts it, or goes on where it was stopped.

    What is wrong with the config, the data or the directory raises ValueError here, before anything is trained.
    """

    def __init__(self, config: Config) -> None:
        if config.output is None:
            raise ValueError("output must name the run directory, got none: pass --output=runs/NAME")
        self.directory = Path(config.output)
        self.accelerator = make_accelerator(config)
        with self.accelerator.main_process_first():  # the first encodes latents, the others find them in the cache
            self.experiment = build(config, self.accelerator.device)
        self.config = self.experiment.config
        check(self.directory, self.config)
        self.trainer = make_trainer(self.experiment, self.accelerator)
        self.batches = make_batches(self.experiment, self.accelerator)
        self.recorder = Recorder(self.directory, self.accelerator.log if config.trackers else None)
        self.checkpoints = Checkpoints(self.directory / "checkpoints", config.keep_checkpoints)
        self.clock = Stopwatch(self.accelerator.device)
        self.held_out = self._held_out_batch()
        self._resume()
        self.accelerator.wait_for_everyone()  # all have checked what is there before it is written anew
        if self.accelerator.is_main_process:
            write_config(self.directory, self.config, self.accelerator.device, self.accelerator.num_processes)

    @property
    def finished(self) -> bool:
        """Whether all steps have been taken."""
        return self.trainer.step_number >= self.config.steps

    @property
    def description(self) -> str:
        """What this run does, in two lines."""
        config, step = self.config, self.trainer.step_number
        num_parameters = sum(p.numel() for p in self.trainer.network.parameters()) / 1e6
        parts = (config.process.name, config.prediction, config.weighting.name, config.sampler.name)
        start = f"going on from step {step} of {config.steps}" if step else f"{config.steps} steps"
        return (
            f"{config.data.name}, {len(self.experiment.dataset)} x {self.experiment.dataset.shape}; "
            f"{config.network.name} of {num_parameters:.2f}M parameters; {', '.join(map(str, parts))}\n"
            f"{start} of {config.batch_size} on {self.accelerator.num_processes} x {self.accelerator.device}, "
            f"{config.precision}; run directory {self.directory}"
        )

    def train(self) -> None:
        """Train to the last step; SIGINT and SIGTERM save a checkpoint first and end in `SystemExit`."""
        start = self.trainer.step_number
        config, on_main = self.config, self.accelerator.is_main_process
        if config.trackers:
            self.accelerator.init_trackers("kairostep")
        bar = tqdm(total=config.steps, initial=start, unit="step", disable=None if on_main else True, leave=False)
        with (
            Interruption(self.accelerator.device) as interruption,
            alone_in(self.directory) if on_main else nullcontext(),
            closing(self.batches.from_step(start * config.accumulate)) as batches,
            bar,
        ):
            self.clock.start()
            while not self.finished:
                # One step, exactly as a hand-written loop would take it
                self.recorder.add(self.trainer.step(list(itertools.islice(batches, config.accumulate))))
                bar.update()
                # What is due: a line of metrics, samples, a checkpoint
                line = self._measure(bar)
                if line:
                    with self._writing():
                        self.recorder.write({"step": self.trainer.step_number, **line})
                if self._due(config.sample_every) and not self.finished:
                    self._save_samples()
                stop = interruption.agreed(self.trainer.step_number)
                if self._due(config.checkpoint_every) or stop:
                    self._save(line.get("held_out"))
                # A signal: leave
                if stop and not self.finished:
                    stopped = f"stopped at step {self.trainer.step_number} of {config.steps}, saved; {self.go_on}"
                    interruption.leave(stopped, speak=on_main)
        if start < config.steps or not ((self.directory / "model").exists() and self._grid_path.exists()):
            self._finish()

    @property
    def go_on(self) -> str:
        """How to continue this run, in words."""
        num_processes = self.accelerator.num_processes
        launch = f"accelerate launch --multi_gpu --num_processes {num_processes} -m " if num_processes > 1 else ""
        return f"go on with: {launch}kairostep train --config {shlex.quote(str(self.directory / 'config.yaml'))}"

    # Measuring

    def _due(self, every: int) -> bool:
        return self.finished or (every > 0 and self.trainer.step_number % every == 0)

    def _measure(self, bar: "tqdm[Any]") -> dict[str, Any]:
        """Return what is due at this step: losses and the sampler's state, its density, the held-out loss."""
        line: dict[str, Any] = {}
        config, step = self.config, self.trainer.step_number
        if self._due(config.log_every):
            line |= self._progress()
            bar.set_postfix_str(f"loss {line['loss']:.4f}, {line['images'] / line['seconds']:.0f} images/s")
        if self._due(config.density_every):
            line["density"] = self.trainer.sampler.density().tolist()
        if self.held_out is not None and (self._due(config.evaluate_every) or self._due(config.checkpoint_every)):
            line["held_out"] = self._evaluate()
            if bar.disable and self.accelerator.is_main_process:
                print(f"step {step}/{config.steps}: held-out loss {line['held_out']['loss']:.5f}", flush=True)
        return line

    def _progress(self) -> dict[str, Any]:
        summary = self.recorder.summary()
        if not math.isfinite(summary["loss"]):
            raise self._not_finite("loss is")
        images = self.trainer.step_number * self.config.batch_size
        diagnostics = {name: value.item() for name, value in self.trainer.sampler.diagnostics().items()}
        return {
            "images": images,
            "seconds": self.clock.seconds(),
            "training_evaluations": images,
            "probe_evaluations": diagnostics.get("probe_evaluations", 0),
            **summary,
            "learning_rate": self.trainer.optimizer.param_groups[0]["lr"],
            "sampler": diagnostics,
        }

    def _not_finite(self, what: str) -> RunError:
        return RunError(
            f"the {what} no longer finite at step {self.trainer.step_number}: lower --learning_rate or raise "
            f"--warmup_steps; the last good checkpoint is {self._last_checkpoint()}"
        )

    def _held_out_batch(self) -> tuple[Tensor, Tensor | None] | None:
        dataset, num = self.experiment.held_out, self.config.held_out_images
        if dataset is None or not num or not self.accelerator.is_main_process:
            return None
        samples, labels = zip(*(dataset.read(row) for row in range(min(num, len(dataset)))), strict=True)
        x0 = dataset.to_x0(torch.stack(samples).to(self.accelerator.device), None)
        return x0, torch.tensor(labels, device=x0.device) if self.experiment.num_classes else None

    def _evaluate(self) -> dict[str, float]:
        assert self.held_out is not None
        x0, labels = self.held_out
        model, objective = self.trainer.ema.model, self.experiment.objective
        with self.clock.paused(), self.accelerator.autocast():
            result = held_out_loss(model, objective, x0, labels=labels, seed=SAMPLE_SEED)
        return asdict(result)

    def _save_samples(self) -> None:
        """Write a grid of samples by the averaged weights, from the same noise at every step and in every run."""
        if not self.accelerator.is_main_process:
            return
        experiment, device = self.experiment, self.accelerator.device
        generator = torch.Generator().manual_seed(SAMPLE_SEED)
        noise = torch.randn(NUM_GRID_IMAGES, *experiment.dataset.shape, generator=generator).to(device)
        labels = (
            torch.arange(NUM_GRID_IMAGES, device=device) % experiment.num_classes if experiment.num_classes else None
        )
        with self.clock.paused(), self.accelerator.autocast():
            samples = generate(
                self.trainer.ema.model,
                experiment.process,
                experiment.prediction,
                noise,
                steps=self.config.sample_steps,
                clip=self.config.autoencoder is None,
                labels=labels,
            )
            with self._writing():
                save_grid(experiment.to_pixels(samples), self._grid_path)

    @property
    def _grid_path(self) -> Path:
        return self.directory / "samples" / f"step-{self.trainer.step_number:08d}.png"

    # Saving and resuming

    def _save(self, held_out: dict[str, float] | None) -> None:
        if not torch.stack([p.isfinite().all() for p in self.trainer.network.parameters()]).all():
            raise self._not_finite("weights are")
        with self.clock.paused(), self._writing():
            self.recorder.sync()
            state = {
                "trainer": self.trainer.state_dict(),
                "recorder": self.recorder.state_dict(),
                "seconds": self.clock.seconds(),
                "processes": self.accelerator.num_processes,
            }
            if self.accelerator.is_main_process:
                facts = {"step": self.trainer.step_number, "held_out": held_out and held_out["loss"]}
                self.checkpoints.save(self.trainer.step_number, state, facts)
            self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        state = self._last_state()
        if state is not None:
            if state["processes"] != self.accelerator.num_processes:
                raise ValueError(
                    f"the run in {self.directory} has {state['processes']} processes, each with random numbers of its "
                    f"own, got {self.accelerator.num_processes}: launch it with as many, or pass another --output"
                )
            self.trainer.load_state_dict(state["trainer"])
            self.recorder.load_state_dict(state["recorder"], self.accelerator.device)
            self.clock = Stopwatch(self.accelerator.device, state["seconds"])
        self.recorder.resume(self.trainer.step_number)

    def _last_state(self) -> dict[str, Any] | None:
        """Return the newest state that can be read; damaged ones are named and passed over."""
        paths = self.checkpoints.paths()
        for path in reversed(paths):
            try:
                return read(path)
            except CheckpointError as error:
                log.warning("%s; using the one before", error)
        if paths:
            raise CheckpointError(
                f"none of the {len(paths)} checkpoints in {self.checkpoints.directory} can be read: "
                "put back a good one, or pass another --output to start anew"
            )
        return None

    def _last_checkpoint(self) -> str:
        paths = self.checkpoints.paths()
        return str(paths[-1]) if paths else "none yet"

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn a full disk and its like into an error that says what is left."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"cannot write to {self.directory} at step {self.trainer.step_number}: {error}; training stopped, the "
                f"last good checkpoint is {self._last_checkpoint()}; make room, then {self.go_on}"
            ) from error

    def _finish(self) -> None:
        """Write the model and the final samples, once all steps have been taken: the samples say that all is there."""
        if not self.accelerator.is_main_process:
            return
        with self._writing():
            code = export(self.experiment, self.trainer.ema.model, self.directory / "model")
        self._save_samples()
        print(f"trained {self.trainer.step_number} steps in {self.clock.seconds():.0f} s: {self.directory}", flush=True)
        print(f"load the model with {code}", flush=True)
        if self.config.trackers:
            self.accelerator.end_training()
