"""Checks that another library can supply what a sampler needs: the step, the data, losses at other times."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kairostep.timesteps import RootLoss, Timesteps, TimestepSampler


@torch.no_grad()
def learn_without_step(sampler: TimestepSampler, drawn: Timesteps, losses: Tensor) -> None:
    """Show losses (B,) to a sampler without wrapping the step: enough for all that ask for no other losses."""
    with sampler.observe(drawn.t.new_empty(len(drawn.t), 0), drawn, losses.detach()):
        pass


def name_of(sampler: TimestepSampler) -> str:
    """Return the name of its class and of the samplers inside: `Scheduled(RootLoss)`."""
    within = ", ".join(map(name_of, sampler.inner))
    return f"{type(sampler).__name__}({within})" if within else type(sampler).__name__


def give_loss_weight(sampler: TimestepSampler, loss_weight: Callable[[Tensor], Tensor]) -> None:
    """Give each `RootLoss` without a loss weight this one, a function of t."""
    for own in sampler.inner:
        give_loss_weight(own, loss_weight)
    if isinstance(sampler, RootLoss) and sampler.loss_weight is None:
        sampler.loss_weight = loss_weight


def load_state(sampler: TimestepSampler, saved: dict[str, Any], where: str) -> None:
    """Load the state in `saved["sampler"]` if `saved["name"]` is the name of this sampler."""
    name = name_of(sampler)
    try:
        if saved.get("name", name) != name:  # fixed densities have the same keys, whichever they are
            raise RuntimeError(f"it is of a {saved['name']}")
        sampler.load_state_dict(saved["sampler"])
    except RuntimeError as error:
        raise ValueError(
            f"{where} must hold the state of a {name} made with the same arguments, but it holds that of another "
            f"sampler: make the sampler as it was\n{error}"
        ) from error


def rows_of_value(value: Any, rows: Tensor, num_rows: int) -> Any:
    """Return these rows of a condition, if it is one per row of the batch, else the condition itself."""
    per_row = isinstance(value, Tensor) and value.ndim > 0 and len(value) == num_rows
    return value[rows] if per_row else value


def require_sampler(sampler: TimestepSampler) -> TimestepSampler:
    """Return `sampler` if it is one."""
    if not isinstance(sampler, TimestepSampler):
        raise ValueError(f"sampler must be a kairostep sampler, got {sampler!r}: pass for instance ks.RootLoss()")
    return sampler


def check_needs(sampler: TimestepSampler, where: str, *, x0: bool, loss_at: bool) -> None:
    """Raise if the sampler needs something that this library cannot supply."""
    require_sampler(sampler)
    name = type(sampler).__name__
    if sampler.uses_x0 and not x0:
        raise ValueError(
            f"{where} draws before it sees the data, got {name}, whose draws depend on them: pass for instance "
            "ks.RootLoss(), or write the loop with sampler.sample(x0)"
        )
    if sampler.uses_loss_at and not loss_at:
        raise ValueError(
            f"{where} cannot evaluate losses around a step, got {name}, which asks for them: pass for instance "
            "ks.RootLoss(), or use sampler.observe or StepObserver with a loss_at"
        )
