"""Shows the progress of a run: a bar on a terminal, lines elsewhere, and the time left."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from accelerate import Accelerator

from kairostep.experiments import Config, Experiment
from kairostep.experiments.settings import AUTO
from kairostep.progress_meter import ProgressMeter, duration
from kairostep.training.initial_weights import initial_weights_notes
from kairostep.training.stopwatch import Stopwatch

FIRST_STEPS = 2  # of a run; they are slower than the others
ESTIMATE_AFTER = 2.0  # seconds of the steps after the first
LONG_ON_CPU = 1800.0  # seconds left from which on a GPU is suggested
LONGEST_WARMUP = 10  # steps of a run for each step of its warm-up, at least
DAYS_ON_CPU = 3.0  # that a run may take by a rough count without a note before it
WORK_PER_SECOND = 7e10  # parameters x positions x images, on a thread; U-Nets of 7M and 27M took 1e11 and 4e10
FEW_HELD_OUT = 10  # images of a folder
NOISE_FROM = 100  # steps before a sampler's noise ratio is shown
NOISE_SETTLED = 0.02  # two noise ratios agree if they differ by less


class TrainingProgress:
    """The bar or lines of one run. Without a terminal: a line at every log step, and at least one a minute.

    Args:
        config: Of the run.
        clock: Counts the seconds of training.
        start: The step that the run starts or resumes at.
        shown: Whether to print; only the first process does.
    """

    def __init__(self, config: Config, clock: Stopwatch, start: int, *, shown: bool) -> None:
        self.config, self.clock, self.start, self.step = config, clock, start, start
        self.meter = ProgressMeter(config.steps, "", unit="step", done=start, shown=shown, file=sys.stdout)
        self.shown, self.estimated = shown, False
        self.noise_seen: tuple[float, float] | None = None  # last noise ratio and gate
        self.gate_told: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.meter.close()

    def advance(self, loss: Callable[[], float]) -> None:
        """Count a step. `loss` returns the latest loss and is only called if a line is due."""
        self.step += 1
        self.meter.advance()
        if self.step - self.start == FIRST_STEPS:
            self.clock.synchronize()
            self.meter.restart()
        elif self.step - self.start > FIRST_STEPS and not self.estimated and self.shown:
            self._estimate()
        if self.meter.due and not self._last and self.step % self.config.log_every:
            self.meter.tell(f"{self._place}: loss {loss():.5f}{self._pace}")

    def show(self, line: Mapping[str, Any], *, always: bool) -> None:
        """Show the metrics of a step: on the bar, or as a line if there is no bar or if `always`."""
        self._tell_noise(line.get("sampler", {}))
        if always or (self.meter.plain and "loss" in line):
            held_out = f"held-out loss {line['held_out']['loss']:.5f}" if "held_out" in line else ""
            loss = f"loss {line['loss']:.5f}{self._pace}" if "loss" in line else ""
            fid = f"FID {line['generated']['fid']:.2f}" if "generated" in line else ""
            told = ", ".join(filter(None, (loss, held_out, fid)))
            self.meter.tell(f"{self._place}: {told}" if told else self._place)
        if self.meter.bar is not None and "loss" in line:
            self.meter.bar.set_postfix_str(f"loss {line['loss']:.4f}, {self._images_per_second:.3g} images/s")

    def _tell_noise(self, diagnostics: Mapping[str, float]) -> None:
        """Print the sampler's noise ratio as soon as two records in a row agree, and again if its gate changes."""
        unknown = not math.isfinite(diagnostics.get("noise_ratio", math.nan))  # also while two samplers draw
        if unknown or self.step < NOISE_FROM or diagnostics.get("warming_up"):
            return
        ratio, gate = diagnostics["noise_ratio"], diagnostics.get("gate", 1.0)
        before, self.noise_seen = self.noise_seen, (ratio, gate)
        is_settled = before is not None and abs(ratio - before[0]) < NOISE_SETTLED and gate == before[1]
        if is_settled and gate != self.gate_told:
            self.gate_told = gate
            self.meter.tell(describe_noise(self.config.sampler.name, diagnostics))

    def announce_finish(self, places: str) -> None:
        """Print that all steps are taken and what is written now."""
        self.meter.tell(f"all {self.config.steps} steps taken: writing {places}")

    def _estimate(self) -> None:
        if self.meter.seconds_left is None or self.meter.seconds_each is None:
            return
        if self.meter.seconds_each * (self.step - self.start - FIRST_STEPS) < ESTIMATE_AFTER:
            return
        self.clock.synchronize()  # a GPU may still be busy with the steps counted so far
        self.estimated = True
        left, device = self.meter.seconds_left, self.clock.device.type
        told = f"about {duration(left)} for the {self.config.steps - self.step} steps to come, on this {device}"
        if device == "cpu" and left > LONG_ON_CPU:
            told += "; a GPU is many times faster, or pass fewer --steps, a smaller --batch_size or a smaller --network"
        self.meter.tell(told)

    @property
    def _last(self) -> bool:
        return self.step >= self.config.steps

    @property
    def _place(self) -> str:
        return f"step {self.step}/{self.config.steps}"

    @property
    def _images_per_second(self) -> float:
        return self.step * self.config.batch_size / max(self.clock.seconds(), 1e-9)

    @property
    def _pace(self) -> str:
        return f", {self._images_per_second:.3g} images/s" + ("" if self._last else self.meter.left)


def describe_noise(name: str, diagnostics: Mapping[str, float]) -> str:
    """Return one sentence on a sampler's gradient noise, from its `diagnostics` after its warm-up."""
    if not diagnostics.get("gate", 1):
        what = "the gradient" if "probe_evaluations" in diagnostics else "the loss"
        return f"{name}: off, since {what} is nearly flat in t: draws are uniform"
    ratio, batch = diagnostics["noise_ratio"], diagnostics["equivalent_batch"]
    return f"{name}: gradient noise about {ratio:.2f} of uniform's, like a batch of {batch:.0f}"


def notes_on(
    asked: Config, experiment: Experiment, accelerator: Accelerator, *, start: int = 0, replays: bool = False
) -> list[str]:
    """Return what the user should know before a run, each note with the setting that changes it.

    Args:
        asked: The config that was passed, before defaults were filled in.
        experiment: The experiment that was built from it.
        accelerator: Where it is trained.
        start: The step that the run starts or resumes at. A resumed run keeps its warm-up: there is no note on it.
        replays: Whether its steps are replayed as CUDA graphs.
    """
    config, notes = experiment.config, list[str]()
    if asked.label_dropout == AUTO and experiment.num_classes:
        notes.append(
            f"{experiment.num_classes} subfolders are used as classes, {config.label_dropout:.0%} of the labels hidden "
            "for guidance: pass --data.classes=none to train without them"
        )
    if config.held_out_images and experiment.held_out is None:
        notes.append(
            "no images are held out: there will be no held-out loss, no best checkpoint and no bound in `kairostep "
            "evaluate`; with 50 usable images or more --data.held_out=0.1 holds out a tenth"
        )
    num = len(experiment.held_out) if config.data.name == "images" and experiment.held_out and not start else 0
    if 0 < num < FEW_HELD_OUT:
        notes.append(
            f"only {num} {'image is' if num == 1 else 'images are'} held out, too few to tell runs apart: pass "
            "--data.held_out=0.1 to a new run, or add images"
        )
    notes += pairs_notes(config, accelerator.num_processes, replays=replays)
    if start:
        return notes
    if accelerator.device.type == "cpu":
        notes += cpu_notes(experiment, accelerator.num_processes * torch.get_num_threads())
    return [*notes, *warmup_notes(config), *weighting_notes(config), *initial_weights_notes(config)]


def cpu_notes(experiment: Experiment, num_threads: int) -> list[str]:
    """Return a note if the run takes days on so many threads of a CPU by a rough count, with settings that take less.

    The count is parameters x positions x images. A network with patches has a position for each, others for each pixel.
    """
    config, (height, width) = experiment.config, experiment.dataset.shape[1:]
    patch = config.network.options.get("patch_size", 1)
    num_parameters = sum(p.numel() for p in experiment.model.parameters())
    work = num_parameters * height * width / patch**2 * config.steps * config.batch_size
    if work < DAYS_ON_CPU * 86_400 * WORK_PER_SECOND * num_threads:
        return []
    smaller = {
        "--data.size": (config.data.options.get("size", 0) if config.autoencoder is None else 0, 32),
        "--network.channels": (config.network.options.get("channels", 0), 32),
        "--steps": (config.steps, 5000),
    }
    settings = [f"{name}={less}" for name, (value, less) in smaller.items() if value > less]
    if "channels" not in config.network.options:
        settings.append("and a smaller --network" if settings else "a smaller --network")
    return [
        f"by a rough count this run takes days on a CPU, {config.steps} steps of {config.batch_size} samples "
        f"{height}x{width} with {num_parameters / 1e6:.1f}M parameters: train on a GPU, or pass "
        + (" ".join(settings) or "a smaller --batch_size")
    ]


def weighting_notes(config: Config) -> list[str]:
    """Return a note on a weighting with which root_loss was measured to harm (results/study_cpu)."""
    if (config.sampler.name, config.weighting.name) != ("root_loss", "debias"):
        return []
    return [
        "with debias weighting root_loss ended above uniform draws where it was measured, by 1 to 2 % on linear and 5 "
        "to 10 % on cosine: pass --sampler=uniform, or another --weighting"
    ]


def warmup_notes(config: Config) -> list[str]:
    """Return a note if the warm-up takes more than a tenth of the steps, with a length that does not."""
    if config.warmup_steps * LONGEST_WARMUP <= config.steps:
        return []
    return [
        f"warm-up is longer than a tenth of the run, {config.warmup_steps} of {config.steps} steps: meanwhile the "
        f"learning rate is below {config.learning_rate:g} and the run learns less than it could; pass "
        f"--warmup_steps={config.steps // LONGEST_WARMUP}"
    ]


def pairs_notes(config: Config, num_processes: int, *, replays: bool) -> list[str]:
    """Return a note if processes make antithetic pairs: they exchange images, and cannot replay that."""
    if not config.pairs or num_processes == 1:
        return []
    eager = ", and run the backward pass eagerly, not as a CUDA graph" if replays else ""
    return [
        f"antithetic pairs are made over all {num_processes} processes: they exchange the images, times and labels of "
        f"each micro-batch{eager}; a new run with --pairs=false does not, nor does one process"
    ]
