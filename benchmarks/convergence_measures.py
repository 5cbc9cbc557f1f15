"""What convergence.py measures: the error of the noise on the way; bound, errors by time and FID at the end."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kairostep.diffusion import Objective, constant
from kairostep.diffusion.conditions import class_condition
from kairostep.diffusion.weighting import LOG_SNR_LIMIT
from kairostep.evaluation import (
    FeatureNetwork,
    FeatureStatistics,
    feature_statistics,
    fid,
    load_inception,
    loss_profile,
    variational_bound,
)
from kairostep.evaluation.estimate import Estimate, mean_and_error
from kairostep.evaluation.matched import matched_draws
from kairostep.evaluation.reference import reference_statistics
from kairostep.experiments import Config
from kairostep.experiments.experiment import load_data
from kairostep.generation.image_folder import Request, make_batch
from kairostep.runs import Trained
from kairostep.training import Run
from kairostep.training.monitor import SAMPLE_SEED, Monitor

CHECKPOINT_BINS, END_BINS = 4, 20  # parts of [0, 1] in each of which every held-out image is seen once
BATCH = 512  # of all that is evaluated and generated: one shape, so that a network is compiled once
BOUND_IMAGES = 1024  # of the bound on the way
GENERATION_STEPS = 50


class CloserMonitor(Monitor):
    """Sees each held-out image several times, and measures the error of the noise whatever is predicted."""

    def __init__(self, run: Run, judge: "Judge | None", fid_every: int) -> None:
        super().__init__(run.experiment, run.trainer.ema.model, run.accelerator)
        self.trainer, self.judge, self.fid_every = run.trainer, judge, fid_every
        if self.held_out is None:
            raise ValueError(f"data must have a held-out part, got {run.config.data.name} without: name other data")
        self.draws = list(
            matched_draws(self.held_out[0], CHECKPOINT_BINS, SAMPLE_SEED)
        )  # made once: costly on the host
        self.batch_size = BATCH
        compile_as_trained(self.model, run.config)

    def save_samples(self, path: Path) -> None:
        """Leave out the grid: images are made for FID."""

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the held-out losses: of what is predicted, of the noise, and the bound in bits per dimension."""
        objective, (x0, labels) = self.experiment.objective, self.held_out
        plain = Objective(objective.process, objective.prediction, constant())
        loss, epsilon_mse = torch.zeros(2, len(x0), dtype=torch.float64, device=x0.device)
        for draw in self.draws:
            log_snr = objective.process.log_snr(draw.u).clamp(-LOG_SNR_LIMIT, LOG_SNR_LIMIT)
            to_epsilon = (log_snr + objective.prediction.log_x0_error(log_snr)).exp()  # (N,), as in loss_profile
            seen = self._losses(plain, draw.u.to(torch.float32).clamp(1e-6, 1 - 1e-6), draw.noise) / len(self.draws)
            loss += seen
            epsilon_mse += seen * to_epsilon
        some: dict[str, Any] = {"labels": None if labels is None else labels[:BOUND_IMAGES], "seed": SAMPLE_SEED}
        with self.accelerator.autocast():
            bound = variational_bound(
                self.model, objective, x0[:BOUND_IMAGES], num_times=2, batch_size=self.batch_size, **some
            )
        found = {"loss": mean_and_error(loss), "epsilon_mse": mean_and_error(epsilon_mse)}
        found["bits_per_dim"] = (bound.total.value, bound.total.error)
        step = self.trainer.step_number
        if self.judge is not None and self.fid_every and step % self.fid_every == 0 and step < self.config.steps:
            distance = self.judge.fid(self._trained(), self.accelerator.device)
            found["fid"] = (distance.value, distance.error)
        return {f"{name}{part}": pair[i] for name, pair in found.items() for i, part in enumerate(("", "_error"))}

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return self.experiment.config

    def _trained(self) -> Trained:
        """Return the averaged weights as they are now."""
        parts, shape = self.experiment, self.experiment.dataset.shape
        model = (parts.process, parts.prediction, parts.objective, self.model, shape, parts.num_classes)
        clip = self.config.autoencoder is None
        return Trained(self.config, *model, parts.to_pixels, clip, Path(), self.trainer.step_number, "ema", "")

    def _losses(self, plain: Objective, t: Tensor, noise: Tensor) -> Tensor:
        x0, labels = self.held_out
        with self.accelerator.autocast():
            parts = [
                plain(self.model, x0[rows], t[rows], noise=noise[rows], **class_condition(labels, rows)).double()
                for rows in torch.split(torch.arange(len(x0), device=x0.device), self.batch_size)
            ]
        return torch.cat(parts)  # (N,)


@dataclass(frozen=True)
class Judge:
    """Inception, and what it makes of the training images: computed once for all runs."""

    network: FeatureNetwork
    reference: FeatureStatistics
    num: int  # generated images

    def fid(self, trained: Trained, device: torch.device) -> Estimate:
        """Return the FID of images from the same noise for every model."""
        half = "bf16" if trained.config.precision == "bf16" else "fp32"
        request = Request(num=self.num, steps=GENERATION_STEPS, precision=half)
        numbers = torch.arange(self.num).split(BATCH)
        made = (make_batch(trained, request, part.tolist(), device).pixels.permute(0, 3, 1, 2) for part in numbers)
        return fid(feature_statistics(self.network, made, device=device), self.reference)


def open_judge(inception: Path, sha256: str, num: int, config: Config, device: torch.device) -> Judge:
    """Return the judge of so many generated images, by a file of the Inception network and the data of a config."""
    network = load_inception(inception, sha256=sha256, device=device)
    images, _ = load_data(replace(config, held_out_images=0), device)
    reference = reference_statistics(images, network, cache=config.cache, device=device, batch_size=BATCH)
    return Judge(network, reference, num)


@torch.no_grad()
def measure_end(
    trained: Trained,
    held_out: tuple[Tensor, Tensor | None],  # x0 (N, ...) and labels (N,)
    judge: Judge | None,
    device: torch.device,
) -> dict[str, Any]:
    """Return the bound in bits per dimension, the error of the noise by time, and FID."""
    x0, labels = held_out
    compile_as_trained(trained.model, trained.config)
    seen: dict[str, Any] = {"labels": labels, "seed": SAMPLE_SEED, "batch_size": BATCH}
    with autocast(trained.config, device):
        bound = variational_bound(trained.model, trained.objective, x0, **seen).total
        profile = loss_profile(trained.model, trained.objective, x0, num_bins=END_BINS, **seen)
    found: dict[str, Any] = {
        "bits_per_dim": [bound.value, bound.error],
        "epsilon_mse": [profile.epsilon_mse.value, profile.epsilon_mse.error],
        "epsilon_mse_by_t": [part.epsilon_mse.value for part in profile.bins],
    }
    if judge is None:
        return found
    distance = judge.fid(trained, device)
    solver = f"ddim, {GENERATION_STEPS} steps"
    return {**found, "fid": [distance.value, distance.error], "num_generated": judge.num, "solver": solver}


def compile_as_trained(model: nn.Module, config: Config) -> None:
    """Compile the model if the run's was: faster, once the first has been."""
    if config.speed == "compile":
        model.compile(dynamic=False)


def autocast(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """Return the precision that the run trained in, for a block."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, dtypes[config.precision]) if config.precision in dtypes else nullcontext()
