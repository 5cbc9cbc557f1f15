"""Measures FID, KID, precision and recall of a model's images while it trains."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from kairostep.data import Dataset
from kairostep.evaluation.features import FeatureNetwork, NoInception, load_features, load_inception
from kairostep.evaluation.measure import measure_images
from kairostep.evaluation.moments import FeatureStatistics, shared_statistics
from kairostep.evaluation.reference import reference_statistics
from kairostep.experiments import Config, Experiment
from kairostep.experiments.experiment import load_data
from kairostep.generation.image_folder import Request, make_batch
from kairostep.progress_meter import ProgressMeter
from kairostep.runs import Trained
from kairostep.shares import WHOLE, Share


@dataclass(frozen=True)
class ImageQuality:
    """A feature network and the feature statistics of the data.

    Args:
        network: Turns images into features.
        reference: Feature statistics of the training set.
        device: Where to generate.
        batch_size: Images to generate at once.
        share: Of the images, where several processes measure together.
    """

    network: FeatureNetwork
    reference: FeatureStatistics
    device: torch.device
    batch_size: int
    share: Share = WHOLE

    @classmethod
    def open(cls, experiment: Experiment, device: torch.device, batch_size: int, share: Share = WHOLE) -> Self:
        """Return the network that the config names, with the statistics of the data, computed now or cached.

        Raises:
            ValueError: No feature network is installed.
        """
        config, images = experiment.config, images_of(experiment, device)
        network = open_network(config, images.shape, device)
        reference = reference_statistics(
            images, network, cache=config.cache, device=device, batch_size=batch_size, share=share
        )
        return cls(network, reference, device, batch_size, share)

    @torch.no_grad()
    def measure(self, experiment: Experiment, model: nn.Module) -> dict[str, float]:
        """Return `fid`, `kid` and so on, their standard errors as `fid_error` and so on, and `num`, the image count.

        Of several processes only the first one measures: the others make their share of the images and return nothing.
        """
        batches = self._images(experiment, model)
        generated = shared_statistics(self.network, batches, device=self.device, share=self.share)
        if not self.share.is_first:
            return {}
        found = measure_images(generated, self.reference)
        values = {measurement.what: measurement.estimate.value for measurement in found}
        errors = {f"{measurement.what}_error": measurement.estimate.error for measurement in found}
        return {**values, **errors, "num": experiment.config.fid_images}

    def _images(self, experiment: Experiment, model: nn.Module) -> Iterator[tuple[range, Tensor]]:
        config = experiment.config
        half = "bf16" if config.precision == "bf16" else "fp32"
        request = Request(num=config.fid_images, steps=config.sample_steps, precision=half)
        trained = as_trained(experiment, model)
        with ProgressMeter(config.fid_images, "images for FID", unit="image", shown=self.share.is_first) as meter:
            for rows in self.share.batches(config.fid_images, self.batch_size):
                yield rows, make_batch(trained, request, list(rows), self.device).pixels.permute(0, 3, 1, 2)
                meter.update(len(rows) * self.share.num_processes)


def images_of(experiment: Experiment, device: torch.device) -> Dataset:
    """Return the training set as images."""
    config = experiment.config
    if config.autoencoder is None:
        return experiment.dataset
    return load_data(replace(config, autoencoder=None, held_out_images=0, label_dropout=None), device)[0]


def open_network(config: Config, shape: tuple[int, ...], device: torch.device) -> FeatureNetwork:
    """Return the network that the config names, or the installed Inception. Raise ValueError if there is none."""
    if config.features is not None:
        return load_features(config.features, shape, device=device)
    pin = {} if config.inception_sha256 is None else {"sha256": config.inception_sha256}
    path = None if config.inception is None else Path(config.inception)
    try:
        return load_inception(path, device=device, **pin)
    except NoInception as error:
        raise ValueError(f"--fid_every needs the network that FID is defined on: {error}") from error


def as_trained(experiment: Experiment, model: nn.Module) -> Trained:
    """Return a model in training in the form that generation takes. It has no checkpoint."""
    return Trained(
        experiment.config,
        experiment.process,
        experiment.prediction,
        experiment.objective,
        model,
        experiment.dataset.shape,
        experiment.num_classes,
        experiment.to_pixels,
        experiment.config.autoencoder is None,
        checkpoint=Path(),
        step=0,
        weights="ema",
        digest="",
    )
