"""Observing steps that somebody else's code takes: a sampler on the hooks of `torch.optim.Optimizer`."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

from torch import Tensor
from torch.optim import Optimizer

from kairostep.integrations.reach import checked_sampler, given_or_unneeded, learns
from kairostep.timesteps import LossAt, Timesteps, TimestepSampler


class StepObserver:
    """Shows a sampler each step of an optimizer, whoever calls `optimizer.step()`; the loop says what the step is on.

        observer = StepObserver(sampler, optimizer)
        ...
        drawn = sampler.sample(x)
        losses = loss_at(torch.arange(len(x)), drawn.t)
        observer.show(x, drawn, losses, loss_at)  # and the framework steps

    The last batch shown before a step is observed, so with gradient accumulation the last micro-batch. A step without
    one is not observed, and the first such step warns. A step that a GradScaler skips, or that raises, is none: nothing
    is learned from it. In `step(closure)` the closure shows the batch, and what its first call shows is observed.
    What a sampler learned is in `sampler.state_dict()`: save it between steps.
    """

    def __init__(self, sampler: TimestepSampler, optimizer: Optimizer) -> None:
        self.sampler = checked_sampler(sampler)
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner  # a wrapper, such as accelerate's, has no hooks of its own
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizer must be a torch.optim.Optimizer or wrap one as `.optimizer`, got {optimizer!r}: "
                "pass the one whose step() updates the model"
            )
        self.num_unseen = 0  # steps taken without a batch shown
        self._shown: tuple[Tensor, Timesteps, Tensor, LossAt] | None = None
        self._entered: AbstractContextManager[None] | None = None
        self._depth = 0  # of steps within steps: an optimizer's step may call that of its base class, which hooks too
        self._in_closure = False
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def show(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None) -> None:
        """Say what the next step is taken on: `losses` (B,) at `drawn.t`, before `drawn.weight`."""
        if not self._handles:
            raise RuntimeError("an observer must be on its optimizer, but remove() was called: make a new StepObserver")
        loss_at = given_or_unneeded(loss_at, self.sampler)
        if self._depth and not self._in_closure:
            self._abandon()
        self._shown = x0, drawn, losses.detach(), loss_at

    def remove(self) -> None:
        """Take the hooks off the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._shown = [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enter the observation, with a closure after its first call: it computes what is observed."""
        self._depth += 1
        if self._depth > 1:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first argument is the optimizer
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
        if self._shown is None:
            self.num_unseen += 1
            if self.num_unseen == 1 and learns(self.sampler):
                warnings.warn(
                    "an optimizer stepped without a batch shown since its last step, so the sampler learned nothing "
                    "from it: call observer.show(x0, drawn, losses) before each step",
                    stacklevel=2,
                )
            return
        entered, self._shown = self.sampler.observe(*self._shown), None
        entered.__enter__()
        self._entered = entered

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        entered, self._entered, self._shown = self._entered, None, None
        if entered is not None:
            entered.__exit__(None, None, None)

    def _abandon(self) -> None:
        """Leave an observation whose step raised, as if it raised now: nothing is learned."""
        entered, self._entered, self._depth = self._entered, None, 0
        if entered is not None:
            error = RuntimeError("the observed step did not finish")
            entered.__exit__(RuntimeError, error, None)
