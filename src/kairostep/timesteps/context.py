"""What an experiment has for the samplers that are made for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class LossWeights(Protocol):
    """An objective, as far as a sampler cares: `kairostep.Objective` is one."""

    process: Any  # has log_snr(t), and num_steps if it is discrete

    def weight(self, t: Tensor) -> Tensor:
        """Return the factor (N,) on the squared error at t (N,)."""
        ...

    def x0_weight(self, t: Tensor) -> Tensor:
        """Return the factor (N,) on the squared error of x0 at t (N,)."""
        ...

    def bound_reweighting(self) -> Callable[[Tensor], Tensor]:
        """Return the function of t that turns the loss into the variational bound."""
        ...


@dataclass(frozen=True)
class SamplerContext:
    """What `TimestepSampler.from_experiment` may use.

    Args:
        objective: The loss that is trained.
        model: The network that is trained.
        shape: Of one sample x0, without the batch.
        seed: Of the experiment.
        accumulate: Batches per optimizer step.
    """

    objective: LossWeights
    model: nn.Module
    shape: tuple[int, ...]
    seed: int = 0
    accumulate: int = 1

    @property
    def process(self) -> Any:
        """The noising process: alpha(t), sigma(t), log_snr(t), and num_steps if it is discrete."""
        return self.objective.process

    def loss_weight(self) -> Callable[[Tensor], Tensor] | None:
        """Return the weight of the loss as a function of t, None where it is 1 everywhere."""
        weight = self.objective.weight
        return weight if bool((weight((torch.arange(100) + 0.5) / 100) != 1).any()) else None
