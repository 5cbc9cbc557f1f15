"""Samplers that learn soon, and a loss that takes no time: what the integrations with whole trainers are tested on."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import kairostep as ks

NUM_ROWS = 16
Make = Callable[[nn.Module], ks.TimestepSampler]


def make_root_loss(model: nn.Module) -> ks.TimestepSampler:
    """Return a sampler that learns soon."""
    return ks.RootLoss(num_bins=4, warmup=4, refresh=2, gate=1.0)


def make_adaptive(model: nn.Module) -> ks.TimestepSampler:
    """Return a sampler that looks at x0 and asks for losses."""
    policy = ks.BetaPolicy.for_input((3,), hidden=8, seed=0)
    return ks.Adaptive(policy, probing=ks.Probing(every=2, sweep=8, reward_rows=8, queue_size=3), model=model)


def make_uniform(model: nn.Module) -> ks.TimestepSampler:
    """Return a sampler that learns nothing."""
    return ks.Uniform(seed=3)


def losses_of(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    """Return the losses (B,) at t (B,), with the same noise for as many rows."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(len(x)))
    xt = (1 - t[:, None]) * x + t[:, None] * noise
    return (model(torch.cat([xt, t[:, None]], dim=1)) - noise).square().mean(1)
