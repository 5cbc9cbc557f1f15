"""An evaluation: check everything first, then measure, and write each measurement at once."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kairostep.checks import count
from kairostep.data import Dataset
from kairostep.evaluation.features import FeatureNetwork, NoInception, check_file, load_features, load_inception
from kairostep.evaluation.images import ImageSource, facts_beside, generated_in, num_complete, open_images
from kairostep.evaluation.measure import (
    HeldOutData,
    generation_facts,
    measure_held_out,
    measure_images,
    source_statistics,
)
from kairostep.evaluation.measurement import Measurement
from kairostep.evaluation.reference import reference_statistics
from kairostep.experiments.experiment import load_data
from kairostep.runs.evaluations import EVALUATIONS, append_evaluations
from kairostep.runs.trained import Trained
from kairostep.shares import WHOLE, Share
from kairostep.version import __version__

NAME = "evaluations.jsonl"
NUM = 50_000  # generated images that FID is of by convention
HELD_OUT_IMAGES = 1024  # where neither the command nor the run says


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What is measured, and how."""

    images: Path | None = None  # npz file or folder; by default those of this checkpoint in RUN/generated
    num: int | None = None  # generated images of which FID is stated; by default 50,000, where there are as many
    inception: Path | None = None  # file; by default that of an installed package
    inception_sha256: str | None = None  # of another network than the usual one
    features: str | None = None  # module:function instead of Inception
    held_out_images: int | None = None  # by default as many as in training
    cache: Path | None = None  # of reference statistics; by default the run's
    batch_size: int = 64

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        if self.num is not None:
            count("num", self.num, at_least=2, at_most=10**7, example=64)
        count("batch_size", self.batch_size, at_most=10**6, example=64)
        if self.held_out_images is not None:
            count("held_out_images", self.held_out_images, at_least=2, example=1024)
        if self.features and (self.inception or self.inception_sha256):
            raise ValueError("features must come from one network, got --features and --inception: pass one of them")
        if self.inception is not None:
            check_file(self.inception)  # also where there are no images yet


@dataclass(frozen=True)
class Evaluation:
    """An evaluation whose request was checked."""

    trained: Trained
    request: EvaluationRequest
    device: torch.device
    held_out: HeldOutData | None
    sources: list[ImageSource]
    network: FeatureNetwork | None
    reference: Dataset | None  # images
    notes: list[str]  # what is left out, and how to get it
    share: Share = WHOLE  # of the work, where several processes evaluate together

    def measure(self) -> Iterator[list[Measurement]]:
        """Yield the measurements in groups, each after it was appended to the run's evaluations.jsonl.

        If it cannot be, it is yielded before the error. Of several processes the first one appends and yields them. All
        must go through all groups.
        """
        if self.held_out is not None:
            found = measure_held_out(self.trained, self.held_out, batch_size=self.request.batch_size, share=self.share)
            if self.share.is_first:
                yield from self._kept(found)
        if self.network is None or self.reference is None:
            return
        shared: dict[str, Any] = {"device": self.device, "batch_size": self.request.batch_size, "share": self.share}
        cache = self.request.cache or Path(self.trained.config.cache)
        reference = reference_statistics(self.reference, self.network, cache=cache, **shared)
        digests = {"data": self.reference.fingerprint(), "network": self.network.digest}
        for source in self.sources:
            generated = source_statistics(source, self.network, self.request.num or NUM, **shared)
            facts = {**generation_facts(source), "features": self.network.name, "digests": digests}
            if self.share.is_first:
                yield from self._kept(measure_images(generated, reference, facts))

    def _kept(self, measurements: list[Measurement]) -> Iterator[list[Measurement]]:
        common = {
            "checkpoint": self.trained.step,
            "checkpoint_sha256": self.trained.digest,
            "weights": self.trained.weights,
            "solver": None,
            "kairostep": __version__,
        }
        try:
            append_evaluations(run_directory(self.trained) / EVALUATIONS, [one.line(common) for one in measurements])
        except OSError:
            yield measurements
            raise
        yield measurements


def prepare(trained: Trained, request: EvaluationRequest, device: torch.device, share: Share = WHOLE) -> Evaluation:
    """Return a checked evaluation; ValueError if the request cannot be met. All processes call it."""
    config, notes = trained.config, list[str]()
    if share.is_first:
        check_writable(run_directory(trained) / EVALUATIONS)
    paths = [request.images] if request.images is not None else _complete_sets(trained, request, notes)
    num = request.held_out_images or config.held_out_images or HELD_OUT_IMAGES
    train, test = load_data(replace(config, held_out_images=num), device, share)
    if test is None:
        notes.append("the data has no held-out part: bound and losses are left out")
    pixels = train
    if paths and config.autoencoder is not None:
        pixels, _ = load_data(replace(config, autoencoder=None, held_out_images=0, label_dropout=None), device, share)
    sources = [open_images(path, pixels.shape[0]) for path in paths]
    for source in sources:
        source.check(request.num or NUM, pixels.shape)
    network = _network(request, pixels.shape, device, notes) if sources else None
    classes, latent = bool(trained.num_classes), config.autoencoder is not None
    held_out = HeldOutData.of(test, num, device, classes=classes, pixels=not latent) if test is not None else None
    reference = pixels if network else None
    return Evaluation(trained, request, device, held_out, sources, network, reference, notes, share)


def check_writable(path: Path) -> None:
    """Raise ValueError if lines cannot be appended to a file."""
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"measurements are appended to {path}, which cannot be written: copy the run to another place")


def run_directory(trained: Trained) -> Path:
    """Return the run directory of a model."""
    return trained.checkpoint.parents[1]


def _network(
    request: EvaluationRequest, shape: tuple[int, ...], device: torch.device, notes: list[str]
) -> FeatureNetwork | None:
    if request.features is not None:
        return load_features(request.features, shape, device=device)
    pin: Mapping[str, Any] = {} if request.inception_sha256 is None else {"sha256": request.inception_sha256}
    try:
        return load_inception(request.inception, device=device, **pin)
    except NoInception as error:
        notes.append(f"FID, KID, precision and recall are left out: {error}")
        return None


def _complete_sets(trained: Trained, request: EvaluationRequest, notes: list[str]) -> list[Path]:
    """Return the images in RUN/generated that this checkpoint made, and those of unknown origin.

    Incomplete sets are named and left out. So are sets that are too small, unless a number was asked for.
    """
    run, complete = run_directory(trained), list[Path]()
    paths = [path for path in generated_in(run) if _is_of(trained, facts_beside(path))]
    for path in paths:
        num = num_complete(path)
        if num == 0:
            notes.append(f"the images in {path} are not complete and left out: run their command again, which goes on")
        elif num is not None and num < NUM and request.num is None:
            how = f"kairostep generate {run} --num_images {NUM}, or state that it is of fewer by --num_images {num}"
            notes.append(f"FID is of {NUM} images by convention, {path} has {num} and is left out: {how}")
        else:
            complete.append(path)
    if not paths:
        make = f"kairostep generate {run} --num_images {request.num or NUM}"
        notes.append(f"no images of this checkpoint in {run / 'generated'}: {make}, or pass --images")
    return complete


def _is_of(trained: Trained, made: Mapping[str, Any]) -> bool:
    return not made or (made.get("digest"), made.get("weights")) == (trained.digest, trained.weights)
