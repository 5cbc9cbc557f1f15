"""Builds the objects that a config names."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kairostep.counters import RowRandom, key_tensor
from kairostep.data import Dataset, LatentSet, NothingHeldOut, encode_latents
from kairostep.diffusion import Objective, Prediction, StableTarget
from kairostep.diffusion.process import Process
from kairostep.diffusion.variance_reduction import check_pairs
from kairostep.experiments import parts
from kairostep.experiments.settings import AUTO, Component, Config
from kairostep.registry import REGISTRIES, datasets
from kairostep.shares import WHOLE, Share
from kairostep.timesteps import TimestepSampler

TRAINING_COPIES = 5  # of the weights during training: weights, average, gradients and Adam's two moments
LABEL_DROPOUT = 0.1  # for label_dropout=auto: the usual share for guidance
NUM_REFERENCE = 8192  # images on the device that a stable target draws from


@dataclass(frozen=True)
class Experiment:
    """The parts of one experiment, still on the CPU, and its config with all defaults filled in."""

    config: Config
    dataset: Dataset
    held_out: Dataset | None
    objective: Objective
    model: nn.Module
    sampler: TimestepSampler
    num_classes: int  # that the model is conditioned on, 0 if none

    @property
    def process(self) -> Process:
        """The noising process."""
        return self.objective.process

    @property
    def prediction(self) -> Prediction:
        """What the network predicts."""
        return self.objective.prediction

    def to_pixels(self, x0: Tensor) -> Tensor:
        """Return images (B, C, H, W) in [-1, 1] for samples x0."""
        return self.dataset.decode(x0) if isinstance(self.dataset, LatentSet) else x0


def build(config: Config, device: torch.device, share: Share = WHOLE) -> Experiment:
    """Return the experiment that a config describes.

    Args:
        config: The experiment. Its seed determines the initial weights.
        device: Where latents are encoded.
        share: Of the encoding, where several processes build the experiment together.
    """
    config, objective = make_objective(resolve(config))  # first, so that a wrong name raises before data is read
    process = objective.process
    check(config, process, device)
    dataset, held_out = load_data(config, device, share)
    if config.label_dropout == AUTO:
        usable = config.data.name == "images" and dataset.num_classes and not config.stable_target
        config = replace(config, label_dropout=LABEL_DROPOUT if usable else None)
    if config.stable_target:
        objective.target = StableTarget(read_reference(config, dataset).to(device), config.stable_target)
    copies = TRAINING_COPIES if device.type == "cpu" else 1
    num_classes = dataset.num_classes if config.label_dropout is not None else 0
    model = make_network(config, dataset.shape, num_classes, copies=copies)
    sampler = parts.make_sampler(config.sampler, parts.sampler_context(config, objective, model, dataset.shape))
    if config.pairs:
        check_pairs(sampler)
    return Experiment(config, dataset, held_out, objective, model, sampler, num_classes)


def fill_defaults(config: Config) -> Config:
    """Return the config with today's defaults of all options that it leaves out. Unknown parts stay as they are."""
    known = {kind: getattr(config, kind) for kind, names in REGISTRIES.items() if getattr(config, kind).name in names}
    filled: dict[str, Any] = {kind: parts.with_defaults(REGISTRIES[kind], part) for kind, part in known.items()}
    return replace(config, **filled)


def resolve(config: Config) -> Config:
    """Return the config with every option of its parts, in its type. An unknown name raises ValueError."""
    filled: dict[str, Any] = {}
    for kind, registry in REGISTRIES.items():
        given: Component = getattr(config, kind)
        checked = parts.check_options(registry, given)
        lists = {name: list(value) for name, value in checked.items() if isinstance(value, tuple)}  # also from `1,2,2`
        filled[kind] = parts.with_defaults(registry, Component(given.name, {**given.options, **lists}))
    return replace(config, **filled)


def make_objective(config: Config) -> tuple[Config, Objective]:
    """Return the config with its prediction filled in, and the objective that it describes."""
    process = parts.make_process(config.process)
    name = config.prediction or parts.natural_prediction(process)
    weighting = parts.make_weighting(config.weighting, process)
    return replace(config, prediction=name), Objective(process, parts.make_prediction(name, process), weighting)


def check(config: Config, process: Process, device: torch.device) -> None:
    """Raise ValueError for settings that would fail during or after training."""
    if config.precision == "fp16" and device.type == "cpu":
        raise ValueError("precision fp16 needs a GPU, got a CPU: pass --precision=fp32, or bf16")
    if config.stable_target and config.label_dropout not in (None, AUTO):
        raise ValueError(
            "stable_target averages over images of all classes, so that the model must have none, "
            f"got label_dropout {config.label_dropout}: pass --stable_target=0, or --label_dropout=null"
        )
    check_speed(config)
    num_steps = getattr(process, "num_steps", config.sample_steps)
    if config.sample_steps > num_steps:
        raise ValueError(
            f"sample_steps must be at most the {num_steps} steps of the process, got {config.sample_steps}: "
            f"pass --sample_steps={num_steps}"
        )


def check_speed(config: Config) -> None:
    """Raise ValueError for sampler speed with another weighting or prediction: its weight is for an epsilon loss."""
    options = config.sampler.options
    if "speed" not in (config.sampler.name, options.get("first"), options.get("then")):
        return
    if config.weighting.name != "constant":
        raise ValueError(
            f"a loss is weighted once, got sampler speed, which weighs by its own rule, and weighting "
            f"{config.weighting.name}: pass --weighting=constant, or another sampler"
        )
    if config.prediction != "epsilon":
        raise ValueError(
            f"the weight of sampler speed is meant for an epsilon loss, got prediction {config.prediction}: "
            "pass --prediction=epsilon, or another sampler, such as --sampler=root_loss"
        )


def trained_classes(config: Config, num_classes: int) -> tuple[int, ...]:
    """Return the classes that a model with so many has seen in training, none if it has none."""
    only = config.data.options.get("only_classes")
    return tuple(sorted(only)) if only and num_classes else tuple(range(num_classes))


def read_reference(config: Config, dataset: Dataset) -> Tensor:
    """Return clean samples (M, ...) to average targets over, mirrored at random if training does so."""
    samples, _ = dataset.read_some(NUM_REFERENCE)
    if config.stable_target > len(samples):
        raise ValueError(
            f"stable_target draws from {len(samples)} images that are kept on the device, got {config.stable_target}: "
            f"pass --stable_target={min(256, len(samples))}"
        )
    return dataset.to_x0(samples, RowRandom(key_tensor(0), torch.arange(len(samples))))


def load_data(config: Config, device: torch.device, share: Share = WHOLE) -> tuple[Dataset, Dataset | None]:
    """Return the training set and the held-out set, None if there is none, as pixels or latents.

    Processes with a share each call it together, and encode latents together.
    """
    train = _load_split(config, "train", device, share)
    try:
        held_out = _load_split(config, "test", device, share) if config.held_out_images else None
    except NothingHeldOut:
        held_out = None
    if config.label_dropout not in (None, AUTO) and not train.num_classes:
        raise ValueError(
            f"label_dropout must be null for data without classes, got {config.label_dropout}: "
            "pass --label_dropout=null, or a folder with one subfolder per class"
        )
    return train, held_out


def _load_split(config: Config, split: str, device: torch.device, share: Share) -> Dataset:
    data = config.data
    if split == "test" and "flip" in datasets.options_of(data.name):
        data = replace(data, options={**data.options, "flip": False})  # mirrored images add no evidence
    with share.first_goes_first():  # a set from elsewhere may write files that others read
        dataset = parts.load_dataset(data, split)
    if config.autoencoder is None:
        return dataset
    cache = Path(config.cache).expanduser()
    return encode_latents(dataset, config.autoencoder, cache, device, num_workers=config.workers, share=share)


def make_network(config: Config, shape: tuple[int, ...], num_classes: int, *, copies: int = 1) -> nn.Module:
    """Return the network of a config. Its seed determines the weights.

    Args:
        config: Names the network.
        shape: (C, H, W) of a sample.
        num_classes: That the network is conditioned on, 0 if none.
        copies: Of the weights that must fit into memory. A network that is too large raises before it is made.
    """
    channels, height, width = shape
    if height != width:
        raise ValueError(f"samples must be square, got {height} x {width}: crop them first")
    sizes = (height, channels, num_classes or None)
    generator_state = torch.get_rng_state()
    with torch.device("meta"), size_named_as_typed(config):  # sizes without memory
        check_memory(config.network.name, parts.make_network(config.network, *sizes), copies)
    torch.manual_seed(config.seed)
    model = parts.make_network(config.network, *sizes)
    torch.set_rng_state(generator_state)
    return model


@contextmanager
def size_named_as_typed(config: Config) -> Iterator[None]:
    """In a network's error, name `--data.size` instead of `sample_size`, if that option sets it.

    Anything else that sets the size of samples is named by its network alone.
    """
    try:
        yield
    except ValueError as error:
        if config.autoencoder is not None or "size" not in config.data.options:
            raise
        raise ValueError(str(error).replace("sample_size", "--data.size")) from error


def check_memory(name: str, model: nn.Module, copies: int) -> None:
    """Raise ValueError if `copies` of the network's weights do not fit into the machine's memory."""
    memory, num_bytes = host_memory(), copies * sum(p.numel() * p.element_size() for p in model.parameters())
    if memory is not None and num_bytes > memory:
        num_parameters = sum(p.numel() for p in model.parameters()) / 1e6
        raise ValueError(
            f"{copies} x the weights of a network must fit into memory, {memory / 2**30:.0f} GiB, got {name} of "
            f"{num_parameters:,.0f}M parameters, {num_bytes / 2**30:,.0f} GiB: lower a --network option"
        )


def host_memory() -> int | None:
    """Return the bytes of this machine's memory, None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
