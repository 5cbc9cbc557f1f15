"""Randomness of probes: known before, and without a trace in the training stream after."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from kairostep.timesteps.distributed import rank


@contextmanager
def isolated_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Run a block on random numbers that depend on (seed, rank) alone, then put torch's generators back."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed * 0x9E3779B1 + rank())
        yield
