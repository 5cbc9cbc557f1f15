"""A whole run: takes a config and writes a directory with metrics, samples, checkpoints and a model."""

import itertools
import math
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from kairostep.experiments import Config, build
from kairostep.parallelism import launched
from kairostep.runs.checkpoint import Checkpoints, check_same_checkpoint
from kairostep.runs.directory import DirectoryLock, check, check_same_data, write_config
from kairostep.runs.recorder import Recorder
from kairostep.shares import share_of_process
from kairostep.training.assembly import make_accelerator, make_batches, make_trainer, step_mode_of
from kairostep.training.description import describe, describe_end
from kairostep.training.export import export
from kairostep.training.initial_weights import load_initial_weights
from kairostep.training.interruption import Interruption
from kairostep.training.monitor import Monitor
from kairostep.training.process_watch import watch_processes
from kairostep.training.progress_lines import TrainingProgress, notes_on
from kairostep.training.run_errors import Diverged
from kairostep.training.run_errors import RunError as RunError
from kairostep.training.stopwatch import Stopwatch


class Run:
    """One experiment in its directory. `Run(config).train()` starts it, or resumes it.

    Args:
        config: The experiment; `config.output` names the directory.
        measure_only: Write metrics and checkpoints alone, print no progress, and evaluate no more often than asked.
        go_on: How the user continues a stopped run, in words (by `kairostep train`).
        began: `time.monotonic()` when the command began, for the last lines (now).
        check_data: Gets the fingerprint of the data before anything is written, and may raise.

    Raises:
        ValueError: The config, the data or the directory is wrong. Nothing has been trained then.
    """

    def __init__(
        self,
        config: Config,
        *,
        measure_only: bool = False,
        go_on: str = "",
        began: float | None = None,
        check_data: Callable[[str], object] = bool,
    ) -> None:
        if config.output is None:
            raise ValueError("output must name the run directory, got none: pass --output=runs/NAME")
        self.began, self.what = (time.monotonic(), "run") if began is None else (began, "command")
        self.directory = Path(config.output)
        self.accelerator, self.saved_step = make_accelerator(config), 0
        command = f"kairostep train --config {shlex.quote(str(self.directory / 'config.yaml'))}"
        self.go_on = go_on or f"go on with: {launched(command, self.accelerator.num_processes)}"
        self.measure_only, self.stopped_by = measure_only, 0
        self.watch = watch_processes(config.rank_timeout, self.accelerator.device, self._where)
        with self.watch.guard():
            self._assemble(config, check_data)

    def _assemble(self, config: Config, check_data: Callable[[str], object]) -> None:
        self.experiment = build(config, self.accelerator.device, share_of_process())
        self.asked, self.config = config, self.experiment.config  # as passed, and with all defaults filled in
        self.data = self.experiment.dataset.fingerprint()
        check_data(self.data)
        check(self.directory, self.config)
        self.step_mode = step_mode_of(self.config, self.accelerator)
        self.checkpoints = Checkpoints(self.directory / "checkpoints", config.keep_checkpoints, config.keep_every)
        if not self.checkpoints.paths():
            load_initial_weights(self.experiment.model, config.initial_weights)
        self.trainer = make_trainer(self.experiment, self.accelerator, self.step_mode)
        self.batches = make_batches(self.experiment, self.accelerator)
        self.recorder = Recorder(self.directory, self.accelerator.log if config.trackers else None)
        self.clock = Stopwatch(self.accelerator.device)
        self.monitor = Monitor(self.experiment, self.trainer.ema.model, self.accelerator)
        self.lock = DirectoryLock(self.directory) if self.accelerator.is_main_process else None
        self.num_processes_before = self.accelerator.num_processes  # of the checkpoint that it goes on from
        try:
            self._resume()
        except BaseException:
            self.release()
            raise

    @property
    def finished(self) -> bool:
        """Whether all steps have been taken."""
        return self.trainer.step_number >= self.config.steps

    @property
    def description(self) -> str:
        """Three lines on what this run does."""
        before = (self.trainer.step_number, self.num_processes_before)
        num_held_out = len(self.monitor.held_out[0]) if self.monitor.held_out else 0
        return describe(self.experiment, self.accelerator, self.step_mode, before, num_held_out)

    @property
    def notes(self) -> list[str]:
        """What the user should know before this run trains, each note with the setting that changes it."""
        if self.finished:
            return []
        start, replays = self.trainer.step_number, self.step_mode.replays
        return notes_on(self.asked, self.experiment, self.accelerator, start=start, replays=replays)

    def train(self) -> None:
        """Train to the last step. SIGINT, SIGTERM and SIGHUP save a checkpoint and raise `SystemExit`.

        In the last step they do not, since the run is whole: `stopped_by` then has the exit code, 0 otherwise.
        """
        start, trackers = self.trainer.step_number, self.config.trackers
        try:
            with self.watch.guard():
                if trackers:
                    self.accelerator.init_trackers("kairostep")
                self._take_steps(start)
                complete = (self.directory / "model").exists() and self._grid_path.exists()
                if not self.measure_only and (start < self.config.steps or not self.monitor.share.from_first(complete)):
                    self._finish()
                if trackers:
                    self.accelerator.end_training()
        finally:
            self.release()
            self.watch.close()

    def _take_steps(self, start: int) -> None:
        config, on_main = self.config, self.accelerator.is_main_process
        with (
            Interruption(self.accelerator.device, self.watch) as interruption,
            closing(self.batches.from_step(start * config.accumulate)) as batches,
            TrainingProgress(config, self.clock, start, shown=on_main and not self.measure_only) as progress,
        ):
            self.clock.start()
            while not self.finished:
                # Take one step, exactly as a hand-written loop would
                with self.watch.one_step():
                    step = self.trainer.step(list(itertools.islice(batches, config.accumulate)))
                self.recorder.add(step.drawn, step.losses)
                progress.advance(self.recorder.latest_loss)
                # Write what is due: a line of metrics, samples, a checkpoint
                line = self._measure(progress)
                if line:
                    with self._writing():
                        self.recorder.write({"step": self.trainer.step_number, **line})
                if self._due(config.sample_every) and not self.finished:
                    self._save_samples()
                stop = interruption.agreed(self.trainer.step_number)
                if self.finished:
                    progress.announce_finish(f"a checkpoint, the model and samples to {self.directory}")
                if self._due(config.checkpoint_every) or self._due(config.keep_every) or stop:
                    self._save(line.get("held_out"))
                # Leave after a signal
                if stop and not self.finished:
                    stopped = f"stopped at step {self.trainer.step_number} of {config.steps}, saved; {self.go_on}"
                    interruption.leave(stopped, speak=on_main)
                self.stopped_by = interruption.exit_code if stop else 0

    def release(self) -> None:
        """Let others use the directory: `train` does it at its end."""
        if self.lock is not None:
            self.lock.release()

    def _where(self) -> str:
        """Say what is lost if the run stops now. A thread calls this, so nothing here waits."""
        if not (step := self.trainer.step_number if hasattr(self, "trainer") else 0):
            return "no step was taken yet: run the same command again"
        saved = f"of step {self.saved_step}" if self.saved_step else "none yet"
        lost = step - self.saved_step
        return f"lost: {lost} step{'s' * (lost != 1)} since the last checkpoint ({saved}); {self.go_on}"

    # Measuring

    def _due(self, every: int) -> bool:
        return self.finished or (every > 0 and self.trainer.step_number % every == 0)

    def _measure(self, progress: TrainingProgress) -> dict[str, Any]:
        """Return the metrics that are due: losses and diagnostics, density, held-out loss, image quality."""
        line: dict[str, Any] = {}
        config, on_main = self.config, self.accelerator.is_main_process
        if self._due(config.log_every):
            line |= self._progress()
        if self._due(config.density_every):
            line |= self._distribution()
        every = (config.evaluate_every, *(() if self.measure_only else (config.checkpoint_every, config.keep_every)))
        evaluates = any(map(self._due, every))
        if evaluates and self.monitor.held_out is not None:
            with self.clock.paused():
                line["held_out"] = self.monitor.evaluate()
        if config.fid_every and self._due(config.fid_every):
            with self.clock.paused():
                line["generated"] = self.monitor.measure_images()
        if on_main:
            progress.show(line, always=evaluates or "generated" in line)
        return line

    def _distribution(self) -> dict[str, list[float]]:
        """Return the density of the draws over t, and their recent mean weight times the weight of the loss."""
        density = self.trainer.sampler.density()
        middle = (torch.arange(len(density)) + 0.5) / len(density)
        return {
            "density": density.tolist(),
            "weights": (self.recorder.weights * self.experiment.objective.weight(middle)).tolist(),
        }

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

    def _not_finite(self, what: str) -> Diverged:
        return Diverged(
            f"the {what} no longer finite at step {self.trainer.step_number}: lower --learning_rate or raise "
            f"--warmup_steps; the last good checkpoint is {self.checkpoints.last or 'none yet'}"
        )

    def _save_samples(self) -> None:
        with self.clock.paused(), self._writing():
            self.monitor.save_samples(self._grid_path)

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
                "data": self.data,
                "sample": {"shape": list(self.experiment.dataset.shape), "num_classes": self.experiment.num_classes},
            }
            if self.accelerator.is_main_process:
                facts = {"step": self.trainer.step_number, "held_out": held_out and held_out["loss"]}
                with self.watch.busy(f"writing the checkpoint of step {self.trainer.step_number}"):
                    self.checkpoints.save(self.trainer.step_number, state, facts)
            self.accelerator.wait_for_everyone()
            self.saved_step = self.trainer.step_number

    def _resume(self) -> None:
        newest = self.checkpoints.read_newest()
        check_same_checkpoint(newest[0] if newest else None, self.monitor.share)
        if newest is not None:
            state = newest[1]
            self.num_processes_before = state["processes"]
            check_same_data(state["data"], self.data, f"the run in {self.directory}")
            self.trainer.load_state_dict(state["trainer"])
            self.saved_step = self.trainer.step_number
            self.recorder.load_state_dict(state["recorder"], self.accelerator.device)
            self.clock = Stopwatch(self.accelerator.device, state["seconds"])
        self.accelerator.wait_for_everyone()  # all processes have read the directory before the first one writes
        if self.accelerator.is_main_process:
            self.recorder.resume(self.trainer.step_number)
            config = replace(self.config, steps=max(self.config.steps, self.trainer.step_number))  # or those taken
            write_config(self.directory, config, self.accelerator.device, self.accelerator.num_processes)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn a failed write, such as a full disk, into an error that names the last good checkpoint."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"cannot write to {self.directory} at step {self.trainer.step_number}: {error}; training stopped, the "
                f"last good checkpoint is {self.checkpoints.last or 'none yet'}; make room, then {self.go_on}"
            ) from error

    def _finish(self) -> None:
        """Write the model, then the final samples. The samples come last: if they exist, so does the model."""
        with self._writing():
            on_main, model = self.accelerator.is_main_process, self.trainer.ema.model
            code = export(self.experiment, model, self.directory / "model") if on_main else ""
        self._save_samples()
        seconds = (self.clock.seconds(), time.monotonic() - self.began)
        told = describe_end(self.directory, self.trainer.step_number, seconds, code, self.what)
        self.accelerator.print(told, flush=True)  # in the first process alone
