"""Looking at the loss without touching training: known random numbers, eval mode, bounded batches."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kairostep.timesteps.distributed import rank
from kairostep.timesteps.sampler import LossAt


@contextmanager
def isolated_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Run a block on random numbers that depend on (seed, rank) alone, then put torch's generators back."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed * 0x9E3779B1 + rank())
        yield


@contextmanager
def eval_mode(model: nn.Module | None) -> Iterator[None]:
    """Hold the model in eval mode, if there is one and it is training."""
    if model is None or not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


@torch.no_grad()
def evaluate_losses(loss_at: LossAt, rows: Tensor, t: Tensor, max_rows: int) -> Tensor:
    """Return the losses (N,) of rows (N,) at t (N,), asking for at most `max_rows` at a time."""
    losses = []
    for some_rows, some_t in zip(torch.split(rows, max_rows), torch.split(t, max_rows), strict=True):
        some = loss_at(some_rows, some_t)
        if some.shape != some_rows.shape:
            raise ValueError(
                f"loss_at must return one loss per row asked for, {tuple(some_rows.shape)}, got {tuple(some.shape)}: "
                "reduce over all dimensions but the first"
            )
        precise = torch.promote_types(some.dtype, torch.float32)  # a drop is a small difference of losses
        losses.append(some.to(precise, copy=True))  # a CUDA graph's output is overwritten by its next replay
    return torch.cat(losses)
