"""Measures a run while it trains: held-out loss, image quality and sample grids."""

from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from kairostep.data import Dataset
from kairostep.evaluation import held_out_loss
from kairostep.experiments import Experiment
from kairostep.experiments.experiment import trained_classes
from kairostep.generation import generate, save_grid
from kairostep.progress_meter import ProgressMeter
from kairostep.shares import share_of_process
from kairostep.training.image_quality import ImageQuality

NUM_GRID_IMAGES = 64
SAMPLE_SEED = 1  # of the noise of grids and of the held-out loss; all runs share it, so that they can be paired


class Monitor:
    """Measures the averaged weights, in batches of the size that one process trains on.

    Processes share each measurement: all of them call its method.

    Args:
        experiment: What is trained.
        model: The averaged weights.
        accelerator: The device, the processes and the precision.
    """

    def __init__(self, experiment: Experiment, model: nn.Module, accelerator: Accelerator) -> None:
        self.experiment, self.model, self.accelerator = experiment, model, accelerator
        config = experiment.config
        self.batch_size = config.batch_size // config.accumulate // accelerator.num_processes
        self.share = share_of_process()
        dataset = experiment.held_out
        self.held_out = None if dataset is None else self._read(dataset, config.held_out_images)
        self.images: ImageQuality | None = None
        if config.fid_every:
            self.images = ImageQuality.open(experiment, accelerator.device, self.batch_size, self.share)

    def _read(self, dataset: Dataset, num: int) -> tuple[Tensor, Tensor | None]:
        samples, labels = dataset.read_some(num)
        x0 = dataset.to_x0(samples.to(self.accelerator.device), None)
        return x0, labels.to(x0.device) if self.experiment.num_classes else None

    def evaluate(self) -> dict[str, float]:
        """Return the held-out losses."""
        assert self.held_out is not None
        x0, labels = self.held_out
        meter = ProgressMeter(len(x0), "held-out loss", unit="image", shown=self.share.is_first)
        with meter, self._watching(meter), self.accelerator.autocast():
            result = held_out_loss(
                self.model,
                self.experiment.objective,
                x0,
                labels=labels,
                seed=SAMPLE_SEED,
                batch_size=self.batch_size,
                share=self.share,
            )
        return asdict(result)

    def measure_images(self) -> dict[str, float]:
        """Return FID, KID, precision and recall. The noise is the same at every step and in every run."""
        assert self.images is not None
        return self.images.measure(self.experiment, self.model)

    def _watching(self, meter: ProgressMeter, calls: int = 1) -> AbstractContextManager[None]:
        return meter.watching(self.model, lambda num: num * self.share.num_processes / calls)

    def save_samples(self, path: Path) -> None:
        """Write a grid of samples, in the first process. The noise is the same at every step and in every run."""
        images = self.share.gather_batches(self._samples())
        if self.share.is_first:
            save_grid(torch.cat(images), path)

    def _samples(self) -> list[Tensor]:
        """Return this process's batches of a grid."""
        experiment, device = self.experiment, self.accelerator.device
        generator = torch.Generator().manual_seed(SAMPLE_SEED)
        noise = torch.randn(NUM_GRID_IMAGES, *experiment.dataset.shape, generator=generator).to(device)
        known = trained_classes(experiment.config, experiment.num_classes) or (0,)
        classes = torch.tensor(known, device=device)[torch.arange(NUM_GRID_IMAGES, device=device) % len(known)]
        images, steps = [], experiment.config.sample_steps
        meter = ProgressMeter(NUM_GRID_IMAGES, "samples", unit="image", shown=self.share.is_first)
        for batch in self.share.batches(NUM_GRID_IMAGES, self.batch_size):
            rows = slice(batch.start, batch.stop)
            with self._watching(meter, steps), self.accelerator.autocast():
                samples = generate(
                    self.model,
                    experiment.process,
                    experiment.prediction,
                    noise[rows],
                    steps=steps,
                    clip=experiment.config.autoencoder is None,
                    labels=classes[rows] if experiment.num_classes else None,
                )
            images.append(experiment.to_pixels(samples.float()).cpu())
        meter.close()
        return images
