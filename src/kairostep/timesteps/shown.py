"""Checks of what a loop shows to a sampler: the rows, what was drawn for them, their losses, and other losses."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kairostep.checks import takes

if TYPE_CHECKING:
    from kairostep.timesteps.sampler import Timesteps, TimestepSampler

ONE_PER_ROW = 'compute losses with reduction="none" and reduce all dimensions but the first, losses.flatten(1).mean(1)'
LOSS_AT = "def loss_at(rows, t): return losses_of(x0[rows], t)"


def check_drawn(x0: Tensor, drawn: "Timesteps", call: str) -> None:
    """Raise unless these are a clean batch and what `sample` returned; `call` shows the order of arguments."""
    if not isinstance(x0, Tensor):
        raise ValueError(f"x0 must be a tensor, the clean batch (B, ...), got {type(x0).__name__}: write {call}")
    if not isinstance(getattr(drawn, "t", None), Tensor):
        raise ValueError(
            f"drawn must be what `sample` returned, got {type(drawn).__name__}: write {call}, with drawn itself "
            "and not drawn.t"
        )


def check_shown(x0: Tensor, drawn: "Timesteps", losses: Tensor) -> None:
    """Raise unless there is one loss for each row that was drawn for."""
    check_drawn(x0, drawn, "observe(x0, drawn, losses)")
    expected, num_rows = drawn.t.shape, len(x0) if x0.ndim else 0
    if isinstance(losses, Tensor) and losses.shape == expected and num_rows == len(losses):
        return
    got: Any = losses if isinstance(losses, int | float) else type(losses).__name__
    fix = f"show the batch that was drawn for, and {ONE_PER_ROW}"
    if isinstance(losses, Tensor):
        got = tuple(losses.shape)
    elif not isinstance(losses, int | float):
        fix = "pass the tensor that the loss is computed from, losses.detach()"
    raise ValueError(
        f"losses must be a tensor with one value per sample, {tuple(expected)}, got {got} for {num_rows} rows of x0: "
        f"{fix}"
    )


def check_loss_at(
    sampler: "TimestepSampler", loss_at: Callable[..., Tensor] | None, call: str = "loss_at(rows, t)"
) -> None:
    """Raise if the sampler needs `loss_at` and it is missing or takes other arguments, which are checked once."""
    if not sampler.uses_loss_at or (sampler.knows_loss_at and loss_at is not None):
        return
    if loss_at is None:
        raise ValueError(
            f"{type(sampler).__name__} asks for losses at other times: `observe` needs loss_at, got None; write "
            f"`with sampler.observe(x0, drawn, losses, loss_at): optimizer.step()`, where {call} returns the losses of "
            f"the batch's rows with these numbers at these times: {LOSS_AT}"
        )
    if torch.compiler.is_compiling():
        return
    if not callable(loss_at) or not takes(loss_at, 2):
        raise ValueError(
            f"loss_at must be a function that can be called as {call}, got {loss_at!r}: write one for the batch's rows "
            f"with these numbers, {LOSS_AT}"
        )
    sampler.knows_loss_at = True
