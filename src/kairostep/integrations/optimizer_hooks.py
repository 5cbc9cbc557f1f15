"""Observes optimizer steps that somebody else's code takes, by the hooks of `torch.optim.Optimizer`."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, Self

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from kairostep.integrations.foreign_loop import require_sampler
from kairostep.timesteps import LossAt, Timesteps, TimestepSampler
from kairostep.timesteps.sampler import rows_for
from kairostep.timesteps.shown import check_loss_at, check_shown


class FollowedZeroGrad:
    """Calls `follow` at each `optimizer.zero_grad()`, for which torch has no hook, until removed."""

    def __init__(self, optimizer: Optimizer, follow: Callable[[], None]) -> None:
        self.optimizer, self.follow = optimizer, follow
        self.zero_grad = optimizer.zero_grad  # that of the class, or of another who follows
        update_wrapper(self, self.zero_grad)  # accelerate looks for `set_to_none` in the signature
        optimizer.zero_grad = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients."""
        self.follow()
        self.zero_grad(*args, **kwargs)

    def remove(self) -> None:
        """Restore the optimizer. If somebody else wrapped it since, only stop calling `follow`."""
        self.follow = _ignore
        if self.optimizer.__dict__.get("zero_grad") is self:
            self.optimizer.zero_grad = self.zero_grad


def _ignore() -> None:
    """Do nothing."""


@dataclass
class ShownBatch:
    """A batch whose step is to come."""

    x0: Tensor
    drawn: Timesteps
    losses: Tensor  # (B,), detached
    loss_at: LossAt | None
    is_attached: bool  # its losses were, so that their backward pass is noticed
    is_dropped: bool = False  # cleared since it was shown; attached losses undo this at their backward pass

    @classmethod
    def of(cls, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None) -> Self:
        """Return the batch, which notices a backward pass to come if the losses are attached."""
        batch = cls(x0, drawn, losses.detach(), loss_at, losses.requires_grad)
        if batch.is_attached:
            losses.register_hook(batch.keep)  # type: ignore[no-untyped-call]
        return batch

    def keep(self, gradient: Tensor) -> None:
        """Belong to the next step: the backward pass has just reached the losses."""
        self.is_dropped = False


class StepObserver:
    """Lets a sampler observe each step of an optimizer, whoever calls `optimizer.step()`. The loop shows the batch.

        observer = StepObserver(sampler, optimizer)
        ...
        drawn = sampler.sample(x)
        losses = ...  # of each row at drawn.t, (B,)
        observer.show(x, drawn, losses)  # and the framework steps

    The sampler learns from all batches shown for a step, so show every micro-batch. A sampler that asks for other
    losses measures the last one. If `optimizer.zero_grad()` drops a gradient, its batch belongs to no step. A step
    without a batch is not observed, and the first one warns. Nothing is learned from a step that a GradScaler skips or
    that raises. With `step(closure)` the closure shows the batch, and its first call counts. `LeastNoise` is told the
    optimizer. Save `sampler.state_dict()` between steps.
    """

    def __init__(self, sampler: TimestepSampler, optimizer: Optimizer) -> None:
        self.sampler = require_sampler(sampler)
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner  # a wrapper, such as accelerate's, has no hooks of its own
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizer must be a torch.optim.Optimizer or wrap one as `.optimizer`, got {optimizer!r}: "
                "pass the one whose step() updates the model"
            )
        sampler.set_optimizer(optimizer)
        self.num_unseen = 0  # steps taken without a batch shown
        self._shown: list[ShownBatch] = []
        self._entered: AbstractContextManager[None] | None = None
        self._depth = 0  # of steps within steps: an optimizer's step may call that of its base class, which hooks too
        self._in_closure = self._has_closure = False
        self._handles: list[RemovableHandle | FollowedZeroGrad] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            FollowedZeroGrad(optimizer, self._drop),
        ]

    def show(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None) -> None:
        """Show the batch of the next step: `losses` (B,) at `drawn.t`, before `drawn.weight`, detached or not."""
        if not self._handles:
            raise RuntimeError("an observer must be on its optimizer, but remove() was called: make a new StepObserver")
        check_shown(x0, drawn, losses)
        check_loss_at(self.sampler, loss_at)
        if self._depth and not self._in_closure:
            self._abandon()
        earlier = [batch for batch in self._shown if not batch.is_dropped]
        for batch in earlier[-1:]:  # of which nobody asks for other losses, nor for images: let go of both
            batch.x0, batch.loss_at = rows_for(self.sampler, batch.x0), None
        self._shown = [*earlier, ShownBatch.of(x0, drawn, losses, loss_at)]

    def remove(self) -> None:
        """Take the hooks off the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._shown = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin to observe; with a closure, after its first call, which computes the losses."""
        self._depth += 1
        if self._depth > 1:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first argument is the optimizer
        self._has_closure = closure is not None
        if closure is None:
            return self._enter()
        followed = partial(self._follow, closure)
        if len(args) > 1:
            return (args[0], followed, *args[2:]), kwargs
        return args, {**kwargs, "closure": followed}

    def _follow(self, closure: Callable[[], Any]) -> Any:
        self._in_closure = True
        try:
            loss = closure()
        finally:
            self._in_closure = False
        if self._entered is None:
            self._enter()
        return loss

    def _enter(self) -> None:
        if not self._shown:
            self.num_unseen += 1
            if self.num_unseen == 1 and self.sampler.learns:
                warnings.warn(
                    "an optimizer stepped without a batch shown since its last step, so the sampler learned nothing "
                    "from it: call observer.show(x0, drawn, losses) before each step",
                    stacklevel=2,
                )
            return
        *earlier, last = self._shown
        self._shown = []
        for batch in (each for each in earlier if not (each.is_attached and each.is_dropped)):
            self.sampler.show(batch.x0, batch.drawn, batch.losses)
        entered = self.sampler.observe(last.x0, last.drawn, last.losses, last.loss_at)
        entered.__enter__()
        self._entered = entered

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        entered, self._entered, self._shown = self._entered, None, []
        if entered is not None:
            entered.__exit__(None, None, None)
        if self._has_closure:  # it draws at each of its calls, and the first one counts
            for sampler in self.sampler.modules():
                if isinstance(sampler, TimestepSampler):
                    sampler.num_rows_drawn = 0

    def _drop(self) -> None:
        """Record that the gradients of the shown batches are gone, unless a batch was shown before its backward pass.

        Many loops compute the loss, then clear the gradients, then run backward. Attached losses notice that. Batches
        of detached ones stay until the next is shown, which after a step that a GradScaler skipped belongs to another.
        """
        for batch in self._shown:
            batch.is_dropped = True

    def _abandon(self) -> None:
        """End an observation whose step raised. Nothing is learned."""
        entered, self._entered, self._depth = self._entered, None, 0
        if entered is not None:
            error = RuntimeError("the observed step did not finish")
            entered.__exit__(RuntimeError, error, None)
