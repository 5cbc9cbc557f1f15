"""Samplers as the ScheduleSampler of improved-diffusion, guided-diffusion, DiT and their forks.

    from improved_diffusion.resample import LossAwareSampler
    schedule_sampler = create_named_schedule_sampler("root_loss", diffusion, base=LossAwareSampler)
    TrainLoop(..., schedule_sampler=schedule_sampler)

Their loops show losses only to instances of their own LossAwareSampler. `base` makes it one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kairostep.arguments import arguments_of
from kairostep.by_name import from_name
from kairostep.diffusion import DiscreteProcess
from kairostep.integrations.foreign_loop import check_needs, learn_without_step, require_sampler
from kairostep.integrations.noise_levels import follow
from kairostep.ranks import rank, world_size
from kairostep.registry import samplers
from kairostep.timesteps import Timesteps, TimestepSampler

if TYPE_CHECKING:
    import numpy as np


class ScheduleSampler:
    """A schedule sampler in the style of OpenAI's code.

    `sample(batch_size, device)` returns (steps in 0..T-1, weights), and `update_with_local_losses(steps, losses)`
    teaches the sampler.

    Args:
        diffusion: Has `num_timesteps` and `betas`. Step 0 is the least noisy.
    """

    def __init__(self, sampler: TimestepSampler, diffusion: Any) -> None:
        check_needs(sampler, "ScheduleSampler.sample(batch_size, device)", x0=False, loss_at=False)
        process = process_of(diffusion)
        self.sampler, self.num_steps = sampler, process.num_steps
        sampler.how_to_show = "call update_with_local_losses, or pass base=LossAwareSampler so that the loop does"

    @property
    def inner(self) -> tuple[TimestepSampler, ...]:
        """The sampler that draws."""
        return (self.sampler,)

    def weights(self) -> "np.ndarray[Any, Any]":
        """Return how often each step is drawn now, (T,), summing to 1."""
        return self.sampler.density(self.num_steps).cpu().numpy()

    def sample(self, batch_size: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Return one step (B,) int64 and one weight (B,) per row, and move the sampler to the device."""
        rows = torch.empty(batch_size, 0, device=device)
        follow(self.sampler, rows.device)
        drawn = self.sampler.sample(rows)
        return drawn.index(self.num_steps), drawn.weight

    def update_with_local_losses(self, local_ts: Tensor, local_losses: Tensor) -> None:
        """Show this rank's losses (B,) at its steps (B,), before weights; all ranks learn the same.

        A loss at step i counts for all of [i/T, (i+1)/T): if the sampler's bins are finer than steps, for each bin in
        that range. Each call counts as a step of the sampler, so micro-batches make several per update.
        """
        if local_ts.is_floating_point():
            raise ValueError(f"local_ts must be steps 0..T-1, whole numbers, got {local_ts.dtype}: pass what was drawn")
        per_step = -(-self.sampler.num_bins // self.num_steps)  # places, so that each bin has one
        part = torch.arange(per_step, device=local_ts.device)
        t = (local_ts[:, None] * per_step + part + 0.5).flatten().float() / (per_step * self.num_steps)
        learn_without_step(self.sampler, Timesteps(t, torch.ones_like(t)), local_losses.repeat_interleave(per_step))

    def update_with_all_losses(self, ts: Sequence[int], losses: Sequence[float]) -> None:
        """Show the losses of all ranks at once, the same on each: each rank takes its part of them."""
        if len(ts) != len(losses):
            raise ValueError(f"there must be one loss per step, got {len(ts)} steps and {len(losses)} losses")
        device = next((tensor.device for tensor in self.sampler.buffers()), None)
        parts = (torch.as_tensor(values, device=device).tensor_split(world_size())[rank()] for values in (ts, losses))
        self.update_with_local_losses(*parts)

    def state_dict(self) -> dict[str, Any]:
        """Return what the sampler learned. Their checkpoints leave it out, so save it beside them."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what a sampler learned."""
        self.sampler.load_state_dict(state)


def as_loss_aware(base: type) -> type[ScheduleSampler]:
    """Return ScheduleSampler as a subclass of their LossAwareSampler, so that their loops show it losses."""
    if not (isinstance(base, type) and hasattr(base, "update_with_local_losses")):
        raise ValueError(
            f"base must be the LossAwareSampler class of the code that trains, got {base!r}: "
            "import it from that code's resample.py or timestep_sampler.py"
        )
    return type("LossAwareScheduleSampler", (ScheduleSampler, base), {"__doc__": ScheduleSampler.__doc__})


def create_named_schedule_sampler(
    name: str | TimestepSampler, diffusion: Any, *, base: type | None = None, **options: Any
) -> ScheduleSampler:
    """Return the schedule sampler of this name, or of this sampler, in place of theirs.

    Names are theirs ("uniform", "loss-second-moment") and those of `ks.from_name`, with "-" or "_". A sampler that
    takes a process gets the one of `diffusion`. A sampler that learns needs `base`, their LossAwareSampler.
    """
    if isinstance(name, str):
        name = name.replace("-", "_")
        taken = arguments_of(samplers.find(name)) if name in samplers else {}
        given = {"process": process_of(diffusion)} if "process" in taken else {}
        if name == "loss_second_moment":
            given["num_bins"] = diffusion.num_timesteps
        sampler = require_sampler(from_name(name, **{**given, **options}))
    elif options:
        raise ValueError(f"options belong to the name of a sampler, got {options} and {name!r}: leave them out")
    else:
        sampler = require_sampler(name)
    if base is None and sampler.learns:
        raise ValueError(
            f"{type(sampler).__name__} learns from losses, which these loops show to their own LossAwareSampler alone: "
            "pass base=LossAwareSampler, or make a ScheduleSampler and call update_with_local_losses yourself"
        )
    return (ScheduleSampler if base is None else as_loss_aware(base))(sampler, diffusion)


def process_of(diffusion: Any) -> DiscreteProcess:
    """Return the process of their GaussianDiffusion, in the steps that it trains on."""
    betas = getattr(diffusion, "betas", None)
    if betas is None or not hasattr(diffusion, "num_timesteps"):
        raise ValueError(
            f"diffusion must have betas and num_timesteps, as GaussianDiffusion has, got {diffusion!r}: "
            "pass the object whose training_losses(model, x, t) is called"
        )
    process = DiscreteProcess.from_betas(torch.as_tensor(betas))  # betas above 0: noise grows with the step
    if process.num_steps != diffusion.num_timesteps:
        raise ValueError(f"betas must be one per step, got {process.num_steps} for {diffusion.num_timesteps} steps")
    return process
