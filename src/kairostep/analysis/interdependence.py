"""Measures what training on a range of times does to the loss at all others: Figure 4 of Kim et al. (CVPR 2025)."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kairostep.analysis.gradient_profile import Track
from kairostep.analysis.rows import Rows
from kairostep.checks import count
from kairostep.diffusion import Objective
from kairostep.evaluation.estimate import Estimate, mean_and_error
from kairostep.evaluation.likelihood import LossProfile, loss_profile
from kairostep.timesteps.probes import eval_mode, isolated_randomness

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class RangeTraining:
    """How to train on each range, with t uniform in it.

    Args:
        num_steps: Optimizer steps on each range.
        batch_size: Rows of a step.
        max_grad_norm: Clip gradients to this norm; None: do not clip.
        seed: Of rows, of times within the range and of noise, which are the same for all ranges.
    """

    num_steps: int = 100
    batch_size: int = 128
    max_grad_norm: float | None = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check sizes."""
        count("num_steps", self.num_steps, at_most=10**7, example=1000)
        count("batch_size", self.batch_size, at_most=10**6, example=64)


@dataclass(frozen=True, slots=True)
class RangeEffect:
    """How training on times in [start, end) changes the held-out loss: after minus before."""

    start: float
    end: float
    change: list[Estimate]  # in each part of [0, 1]
    inside: Estimate  # mean over the parts of the range
    outside: Estimate | None  # mean over the other parts; None if the range is all of [0, 1]
    balance: Estimate | None  # inside plus outside; above 0 if the loss outside outweighs the gain inside


@dataclass(frozen=True, slots=True)
class Interdependence:
    """The effect of each range on each part of [0, 1]. Errors are those of paired means over held-out rows."""

    before: list[Estimate]  # the loss in each part before training
    effects: list[RangeEffect]  # first of all times, then of each range
    num_evaluations: int

    @property
    def matrix(self) -> Tensor:
        """The changes, (1 + num_ranges, num_parts)."""
        return torch.tensor([[change.value for change in effect.change] for effect in self.effects])


def range_effects(
    model: nn.Module,
    objective: Objective,
    rows: Rows,
    held_out: Rows,
    *,
    num_ranges: int = 5,
    num_parts: int = 20,
    training: RangeTraining | None = None,
    make_optimizer: MakeOptimizer = torch.optim.Adam,
    track: Track[tuple[float, float]] = iter,
) -> Interdependence:
    """Return how training on each of several equal ranges of t changes the held-out loss at all times.

    Measurements share rows, times and noise. The model gets its weights back after each range.

    Args:
        model: The network to start from.
        objective: The loss.
        rows: To train on.
        held_out: To measure on.
        num_ranges: Equal ranges of t.
        num_parts: Equal parts of t in which the loss is measured, a multiple of `num_ranges`.
        training: How to train on each range.
        make_optimizer: Called with the parameters for each range. Should load the moments of the model's training.
        track: Shows progress over the ranges, as `tqdm` does.
    """
    ranges = _ranges(num_ranges, num_parts)
    training = training or RangeTraining()
    weights = deepcopy(model.state_dict())
    profile = partial(_profile, model, objective, held_out, num_parts, training.seed)
    before, effects = profile(), []
    for start, end in track(ranges):
        try:
            train_on_range(model, objective, rows, (start, end), training, make_optimizer)
            effects.append(_effect(start, end, (profile().per_image - before.per_image).cpu()))
        finally:
            model.load_state_dict(weights)
    losses, trained = [part.loss for part in before.bins], len(ranges) * training.num_steps * training.batch_size
    return Interdependence(losses, effects, trained + (1 + len(ranges)) * before.num_evaluations)


def _profile(model: nn.Module, objective: Objective, rows: Rows, num_parts: int, seed: int) -> LossProfile:
    """Return the losses of the rows in each part of [0, 1], in eval mode."""
    with eval_mode(model):
        return loss_profile(model, objective, rows.x0, labels=rows.labels, num_bins=num_parts, seed=seed)


def _ranges(num_ranges: int, num_parts: int) -> list[tuple[float, float]]:
    """Return all of [0, 1], then its equal ranges. Raise ValueError if parts are no multiple of ranges."""
    count("num_ranges", num_ranges, at_least=2)
    if count("num_parts", num_parts, at_most=10**5, example=20) % num_ranges:
        raise ValueError(
            f"num_parts must be a multiple of the {num_ranges} ranges, got {num_parts}: "
            f"pass for instance {num_ranges * max(1, num_parts // num_ranges)}"
        )
    return [(0.0, 1.0), *((k / num_ranges, (k + 1) / num_ranges) for k in range(num_ranges))]


def train_on_range(
    model: nn.Module,
    objective: Objective,
    rows: Rows,
    times: tuple[float, float],
    training: RangeTraining,
    make_optimizer: MakeOptimizer = torch.optim.Adam,
) -> None:
    """Train the model in place, only at times in [times[0], times[1])."""
    start, end = times
    generator = torch.Generator().manual_seed(training.seed)
    device = rows.x0.device
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(parameters)
    was_training = model.training
    model.train()
    with isolated_randomness(device, training.seed), torch.enable_grad():  # dropout
        for _ in range(training.num_steps):
            index = torch.randint(len(rows.x0), (training.batch_size,), generator=generator).to(device)
            strata = torch.arange(training.batch_size) + torch.rand(training.batch_size, generator=generator)
            u = (strata / training.batch_size).to(device)  # rows are in random order
            x0 = rows.x0[index]
            noise = torch.randn(x0.shape, generator=generator).to(x0)
            t = (start + (end - start) * u).clamp(1e-6, 1 - 1e-6)
            losses = objective(model, x0, t, noise=noise, **rows.cond(index))
            optimizer.zero_grad()
            losses.mean().backward()  # type: ignore[no-untyped-call]
            if training.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters, training.max_grad_norm)
            optimizer.step()
    optimizer.zero_grad()
    model.train(was_training)


def _effect(start: float, end: float, change: Tensor) -> RangeEffect:
    """Return the effect of a range from the `change` (N, num_parts) of each held-out row's loss in each part."""
    middle = (torch.arange(change.shape[1]) + 0.5) / change.shape[1]
    within = (middle >= start) & (middle < end)
    inside = change[:, within].mean(1)  # (N,)
    everywhere = bool(within.all())
    outside = inside if everywhere else change[:, ~within].mean(1)
    return RangeEffect(
        start,
        end,
        _estimates(change),
        Estimate(*mean_and_error(inside)),
        None if everywhere else Estimate(*mean_and_error(outside)),
        None if everywhere else Estimate(*mean_and_error(inside + outside)),
    )


def _estimates(values: Tensor) -> list[Estimate]:
    columns: Sequence[Tensor] = values.unbind(1)
    return [Estimate(*mean_and_error(column)) for column in columns]
