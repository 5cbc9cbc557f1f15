"""The contract of a timestep sampler: what it draws, what it learns from, what it reports."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn

from kairostep.arguments import arguments_of
from kairostep.checks import count
from kairostep.registry import samplers
from kairostep.timesteps.context import SamplerContext
from kairostep.timesteps.histogram import bin_index, quantile
from kairostep.timesteps.representation import represent
from kairostep.timesteps.shown import check_loss_at, check_shown

S = TypeVar("S", bound="TimestepSampler")
P = ParamSpec("P")

UNSHOWN = 100  # draws in a row of which a sampler that learns is shown no loss, before it says so
LARGEST = 1e15  # a loss, drop or reward beyond it counts as not finite: sums of its square would overflow float32

KIND = "kind"  # entry of a state that names the class it belongs to; states of earlier versions have none

LossAt = Callable[[Tensor, Tensor], Tensor]
"""`loss_at(rows, t)`: losses (N,) of the rows (N,) of the current batch at the times t (N,)."""


@dataclass(frozen=True, slots=True)
class Timesteps:
    """Drawn times and the weight of each sample."""

    t: Tensor  # (B,) in [0, 1): 0 is clean data, 1 is pure noise
    weight: Tensor  # (B,) factor for the per-sample loss

    def index(self, num_steps: int) -> Tensor:
        """Return the steps 0..num_steps-1 of a discrete process, 0 the least noisy: (B,) int64."""
        count("num_steps", num_steps, at_most=10**7, example=1000)
        return bin_index(self.t, num_steps)


def draw(mass: Tensor, u: Tensor, *, unbiased: bool) -> Timesteps:
    """Return times at the quantiles u (B,) of the mass (K,), weighted by 1/density if `unbiased`, else by 1."""
    t, index = quantile(mass, u)
    weight = mass.sum() / (mass.shape[0] * mass[index]) if unbiased else torch.ones_like(t)
    return Timesteps(t, weight.to(t.dtype))


class TimestepSampler(nn.Module):
    """Decides which timesteps to train on. A Module: `state_dict` holds all that it learned, and its position.

    A training loop with a sampler, any sampler:

        drawn = sampler.sample(x)
        t = drawn.index(T)  # or drawn.t, in continuous time
        losses = ...  # of each row at t, (B,)
        (losses * drawn.weight).mean().backward()
        with sampler.observe(x, drawn, losses.detach()):
            optimizer.step()

    A sampler that `uses_loss_at` also needs a function that returns losses of the same batch at other times:

        def loss_at(rows, t):  # rows (N,) of x at times t (N,): losses (N,)
            return losses_of(x[rows], t)

        with sampler.observe(x, drawn, losses.detach(), loss_at):
            optimizer.step()

    With gradient accumulation, `sampler.show(x, drawn, losses.detach())` after each micro-batch but the last, which
    `observe` shows.
    """

    uses_x0: bool = False  # its draws depend on the content of x0, not on its size alone
    uses_loss_at: bool = False  # it asks for losses beyond those it is shown
    learns_from_all: bool = False  # it uses_loss_at, and still learns from all micro-batches; x0 is that of the last
    unbiased: bool = False  # its weights are 1/density, which keeps the objective
    own_weights: bool = False  # its weights are part of its objective, neither 1 nor 1/density
    how_to_show: str = "write `with sampler.observe(x0, drawn, losses): optimizer.step()`"
    num_bins: int = 1  # in which it keeps losses; one at a step that spans several counts in each of them
    num_unshown: int = 0  # draws since it was last shown a loss
    num_rows_drawn: int = 0  # since its last observation
    _num_rows_shown: int = 0  # since its last observation
    _num_partial_steps: int = 0  # observations in a row that saw the losses of half the rows drawn, or fewer
    knows_loss_at: bool = False  # whether a `loss_at` that it was given had the right arguments
    _micro_batches: tuple[tuple[Tensor, Timesteps, Tensor], ...] = ()  # shown for the step to come
    _observation_waits: bool = False

    @classmethod
    def from_experiment(cls, experiment: SamplerContext, **options: Any) -> Self:
        """Return the sampler for an experiment, as `kairostep train --sampler=` makes it.

        By default the constructor gets the options, the seed, and the process if it takes one. A sampler that needs
        more overrides this; what it annotates here are its options, with the constructor's where it takes `**options`.
        """
        taken = arguments_of(cls)
        arguments = {name: getattr(experiment, name) for name in samplers.given if name in taken} | options
        for name, argument in taken.items():
            if argument.required and name not in arguments:
                raise ValueError(
                    f"{cls.__name__} needs {name}, which neither an experiment nor a setting gives: write a "
                    "classmethod from_experiment(cls, experiment, **options) that makes it"
                )
        return cls(**arguments)

    @classmethod
    def complete_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options with those that follow from others, as a run's config.yaml keeps them."""
        return options

    @property
    def inner(self) -> tuple["TimestepSampler", ...]:
        """The samplers inside this one; none by default."""
        return ()

    @property
    def learns(self) -> bool:
        """Whether `observe` changes the draws of this sampler or of one inside it."""
        if self.inner:
            return any(sampler.learns for sampler in self.inner)
        return type(self).observe is not TimestepSampler.observe

    def sample(self, x0: Tensor) -> Timesteps:
        """Return one time and one weight for each row of the clean batch x0 (B, ...)."""
        raise NotImplementedError

    def observe(
        self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None
    ) -> AbstractContextManager[None]:
        """Wrap the optimizer's step and learn from it. By default it does nothing.

        Args:
            x0: The clean batch (B, ...) that was drawn for.
            drawn: What `sample` returned for it.
            losses: Detached per-sample losses (B,) at `drawn.t`, before `drawn.weight`.
            loss_at: Returns losses of rows of this batch at other times. Samplers that `uses_loss_at` raise without it;
                the others never call it.
        """
        check_shown(x0, drawn, losses)
        check_loss_at(self, loss_at)
        return nullcontext()

    def show(self, x0: Tensor, drawn: Timesteps, losses: Tensor) -> None:
        """Show a micro-batch of the next step: each but the last, which `observe` shows.

        A sampler that asks for no other losses learns from all of them in that `observe`, as from one batch. One that
        `uses_loss_at` measures the last alone, since `loss_at` knows no rows but those; of the others it keeps times
        and losses if it `learns_from_all`.
        """
        check_shown(x0, drawn, losses)
        self.num_unshown = 0
        self._num_rows_shown += len(losses)
        learns_from_all = self.learns_from_all or not self.uses_loss_at
        if getattr(type(self).observe, "takes_micro_batches", False) and learns_from_all:
            self._micro_batches = (*self._micro_batches, (rows_for(self, x0), drawn, losses.detach()))

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Name the optimizer whose steps it observes, also to samplers inside; the built-in trainer does."""
        for sampler in self.inner:
            sampler.set_optimizer(optimizer)

    def density(self, num_bins: int = 100) -> Tensor:
        """Return where the draws go now: the mass of equal bins of [0, 1], (num_bins,), summing to 1."""
        raise NotImplementedError

    def diagnostics(self) -> dict[str, Tensor]:
        """Return scalars worth logging. Reading them from a GPU synchronises, so leave that to the caller."""
        return {}

    def __repr__(self) -> str:
        """Return the call that makes it, such as `RootLoss(num_bins=20, decay=0.99, floor=0.1)`."""
        return represent(self)

    def _count_draw(self, x0: Tensor) -> None:
        """Warn once after 100 draws without a call to `observe`. Draws without gradients do not count."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.num_rows_drawn += len(x0)
        self.num_unshown += 1
        if self.num_unshown == UNSHOWN:
            name = type(self).__name__
            warnings.warn(
                f"{UNSHOWN} draws in a row were followed by no loss, so {name} learns nothing: {self.how_to_show}; "
                "to draw without learning, sample under torch.no_grad()",
                stacklevel=4,
            )

    def _count_observation(self, num_rows: int) -> None:
        """Warn after 100 observations in a row that saw losses of half of the rows drawn, or fewer."""
        drawn, shown = self.num_rows_drawn, self._num_rows_shown + num_rows
        self.num_unshown = self.num_rows_drawn = 0
        if self._num_rows_shown:  # setting an attribute of a Module takes a microsecond
            self._num_rows_shown = 0
        is_partial = 0 < 2 * shown <= drawn and (self.learns_from_all or not self.uses_loss_at)
        if is_partial or self._num_partial_steps:
            self._num_partial_steps = self._num_partial_steps + 1 if is_partial else 0
        if is_partial and self._num_partial_steps == UNSHOWN:
            warnings.warn(
                f"in {UNSHOWN} steps in a row {type(self).__name__} drew for {drawn // shown} times as many rows as it "
                "saw losses of, so it learns from a part of each batch: with gradient accumulation call "
                "sampler.show(x0, drawn, losses) after each micro-batch but the last; to draw without learning, sample "
                "under torch.no_grad()",
                stacklevel=3,
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to the model's device but never to half precision, which would ruin tables and counts."""
        super()._apply(keep_dtype(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Add the name of the class, since all fixed densities have the same entries."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + KIND] = torch.tensor(list(type(self).__name__.encode()), dtype=torch.uint8)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Check the names of all samplers in here before anything is loaded."""
        for path, module in self.named_modules(prefix=prefix.removesuffix(".")):
            if isinstance(module, TimestepSampler):
                check_kind(module, state_dict.get(f"{path}.{KIND}".removeprefix(".")))
        state_dict.pop(prefix + KIND, None)  # torch would call it unexpected
        super()._load_from_state_dict(state_dict, prefix, *args)


samplers.base = TimestepSampler


def keep_dtype(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function of `Module._apply` without its casts: tensors change their device, not their dtype."""

    def move(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

    return move


def check_kind(sampler: TimestepSampler, saved: Tensor | None) -> None:
    """Raise if a state names another class than the sampler's."""
    own = type(sampler).__name__
    name = own if saved is None else bytes(saved.tolist()).decode()
    if name != own:
        raise ValueError(
            f"a sampler must load the state of its own kind, got that of {name} for {own}: "
            f"make a {name} with the arguments it was saved with"
        )


def learns_from_step(
    observe: Callable[Concatenate[S, P], Iterator[None]],
) -> Callable[Concatenate[S, P], AbstractContextManager[None]]:
    """Turn a one-yield generator into a validated `observe` context manager."""

    @wraps(observe)
    def checked(
        self: S, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None
    ) -> AbstractContextManager[None]:
        check_shown(x0, drawn, losses)
        check_loss_at(self, loss_at)
        self._count_observation(len(losses))
        if self._observation_waits:
            self._observation_waits = False
            raise RuntimeError(
                "an observation must be entered, but the last one was not, so the sampler learned nothing: "
                "write `with sampler.observe(...): optimizer.step()`"
            )
        self._observation_waits = True
        if self._micro_batches:
            micro_batches, self._micro_batches = (*self._micro_batches, (rows_for(self, x0), drawn, losses)), ()
            merged, drawn, losses = merge_micro_batches(micro_batches)
            x0 = x0 if self.uses_loss_at else merged
        return entered(self, x0, drawn, losses, loss_at)

    @contextmanager
    def entered(self: S, *args: Any) -> Iterator[None]:
        self._observation_waits = False
        yield from observe(self, *args)  # type: ignore[call-arg]  # those of `checked`

    checked.takes_micro_batches = True  # type: ignore[attr-defined]  # see `TimestepSampler.show`
    return checked  # type: ignore[return-value]  # its arguments are those of every `observe`


def rows_for(sampler: TimestepSampler, x0: Tensor) -> Tensor:
    """Return x0 (B, ...), or empty rows (B, 0) if the sampler needs only their number."""
    return x0 if sampler.uses_x0 else x0.new_empty(len(x0), 0)


def merge_micro_batches(
    micro_batches: Sequence[tuple[Tensor, Timesteps, Tensor]],
) -> tuple[Tensor, Timesteps, Tensor]:
    """Return the rows, draws and losses of several micro-batches as those of one batch."""
    rows, drawn, losses = zip(*micro_batches, strict=True)
    t, weight = torch.cat([own.t for own in drawn]), torch.cat([own.weight for own in drawn])
    return torch.cat(rows), Timesteps(t, weight), torch.cat(losses)
