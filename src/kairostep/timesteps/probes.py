"""Measures the loss without affecting training: fixed random numbers, eval mode, bounded batches."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from kairostep.ranks import rank
from kairostep.timesteps.sampler import LossAt
from kairostep.timesteps.shown import ONE_PER_ROW

T = TypeVar("T")

_probe: ContextVar[int | None] = ContextVar("probe", default=None)


class Borrowed(Generic[T]):
    """Something of the caller's that a sampler uses and does not own, such as the model.

    It is not part of the sampler's parameters, and deep copies and pickles of the sampler leave it out.
    """

    def __init__(self, value: T | None, *, left_behind: bool = False) -> None:
        self.value, self.left_behind = value, left_behind

    def __deepcopy__(self, memo: object) -> "Borrowed[T]":
        return borrowed_nothing(self.left_behind or self.value is not None)

    def __reduce__(self) -> tuple[object, ...]:
        return borrowed_nothing, (self.left_behind or self.value is not None,)


def borrowed_nothing(left_behind: bool) -> Borrowed[T]:
    """Return what a copy holds: nothing, and whether there was something."""
    return Borrowed(None, left_behind=left_behind)


def model_of(sampler_model: Borrowed[nn.Module]) -> nn.Module | None:
    """Return the model to hold in eval mode. Warn once in a copy of the sampler, which has lost it."""
    if sampler_model.left_behind:
        sampler_model.left_behind = False
        warnings.warn(
            "this sampler is a copy, and copies leave the model behind, so that probes run in the mode the model is "
            "in: name it again by sampler.set_model(model)",
            stacklevel=2,
        )
    return sampler_model.value


@contextmanager
def isolated_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Run a block with random numbers that depend on the seed alone, then restore the generators.

    Those are torch's global generators of the CPU and of this device; `torch.manual_seed` would reset all devices.
    """
    generators = global_generators(device)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def probe_randomness(device: torch.device, seed: int, step: int, *, shared: bool = False) -> Iterator[None]:
    """Run a probe with random numbers that depend on (seed, step, rank) alone, then restore the generators.

    Args:
        device: Of the probe.
        seed: The sampler's.
        step: Number of the probe, or of the step that it is made at.
        shared: Whether all ranks have the same random numbers.
    """
    token = _probe.set(probe_seed(seed, step, own_rank=0))
    try:
        with isolated_randomness(device, probe_seed(seed, step, own_rank=0 if shared else None)):
            yield
    finally:
        _probe.reset(token)


def current_probe() -> int | None:
    """Return a number that tells the probe under way from others, the same on all ranks; None outside of probes.

    A `loss_at` that makes noise as a function of it and of the row measures the same on any number of ranks.
    """
    return _probe.get()


def global_generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's global generators of the CPU and of this device."""
    generators = [torch.default_generator]
    if device.type == "mps":
        generators.append(torch.mps._get_default_mps_generator())
    elif device.type != "cpu":
        module = torch.get_device_module(device)
        generators.append(module.default_generators[module.current_device() if device.index is None else device.index])
    return generators


def probe_seed(seed: int, step: int, own_rank: int | None = None) -> int:
    """Return the seed of a probe's noise: a function of (seed, rank, step), of this rank by default."""
    return (seed * 0xD1B54A33 + step * 0x9E3779B1 + (rank() if own_rank is None else own_rank)) % 2**63


@contextmanager
def eval_mode(model: nn.Module | None) -> Iterator[None]:
    """Hold the model, if any, in eval mode, then restore the mode of each submodule: some may be frozen."""
    training = [module for module in model.modules() if module.training] if model is not None else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def evaluate_losses(loss_at: LossAt, rows: Tensor, t: Tensor, max_rows: int) -> Tensor:
    """Return the losses (N,) of rows (N,) at t (N,), asking for at most `max_rows` at a time."""
    losses = []
    for some_rows, some_t in zip(torch.split(rows, max_rows), torch.split(t, max_rows), strict=True):
        some = check_losses(loss_at(some_rows, some_t), some_rows)
        precise = torch.promote_types(some.dtype, torch.float32)  # a drop is a small difference of losses
        losses.append(some.to(precise, copy=True))  # a CUDA graph's output is overwritten by its next replay
    return torch.cat(losses)


def check_losses(losses: Tensor, rows: Tensor) -> Tensor:
    """Return the result of `loss_at` if it has one loss for each row (N,)."""
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else losses
    if shape != tuple(rows.shape):
        raise ValueError(
            f"loss_at must return one loss per row asked for, {tuple(rows.shape)}, got {shape}: {ONE_PER_ROW}"
        )
    return losses


def seconds_when_idle(device: torch.device) -> float:
    """Return the time after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
