"""A moving average of the weights. It generates better images than the latest weights."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn


class EMA:
    """Exponential moving average with decay min(decay, (1 + n) / (10 + n)) after n updates.

    Args:
        model: The network whose weights to average.
        decay: The decay of a long training.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = deepcopy(model).eval().requires_grad_(False)
        self.decay, self.num_updates = decay, 0
        self.averaged: list[Tensor] = list(self.model.parameters())
        self.current: list[Tensor] = list(model.parameters())
        self.buffers = list(zip(self.model.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the model's present weights."""
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        self.num_updates += 1
        torch._foreach_lerp_(self.averaged, self.current, 1 - decay)
        for own, current in self.buffers:  # running statistics and counts are copied, not averaged
            own.copy_(current)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights and the number of updates."""
        return {"num_updates": self.num_updates, "model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self.num_updates = state["num_updates"]
        self.model.load_state_dict(state["model"])
