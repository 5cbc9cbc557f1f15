"""A moving average of the weights. It generates better images than the latest weights."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)


class EMA:
    """Exponential moving average with decay min(decay, (1 + n) / (10 + n)) after n updates.

    Weights in half precision are averaged in float32, since a small step would round away.

    Args:
        model: The network whose weights to average.
        decay: The decay of a long training.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = deepcopy(model).eval().requires_grad_(False)
        self.decay, self.num_updates = decay, 0
        own = dict(self.model.named_parameters())
        self.current: list[Tensor] = list(model.parameters())
        self.precise = {name: p.float() for name, p in own.items() if p.dtype in HALF}
        self.averaged: list[Tensor] = [self.precise.get(name, p) for name, p in own.items()]
        self.rounded: list[Tensor] = [own[name] for name in self.precise]
        self.buffers = list(zip(self.model.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the model's present weights."""
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        self.num_updates += 1
        weights = self.current
        if self.precise:
            weights = [p.to(own.dtype) for p, own in zip(self.current, self.averaged, strict=True)]
        torch._foreach_lerp_(self.averaged, weights, 1 - decay)
        if self.precise:
            torch._foreach_copy_(self.rounded, list(self.precise.values()))
        for own, current in self.buffers:  # running statistics and counts are copied, not averaged
            own.copy_(current)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights, those in half precision also as they are averaged, and the number of updates."""
        precise = {"precise": dict(self.precise)} if self.precise else {}
        return {"num_updates": self.num_updates, "model": self.model.state_dict(), **precise}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self.num_updates = state["num_updates"]
        self.model.load_state_dict(state["model"])
        for name, own in self.precise.items():  # states of version 0.1 have the rounded ones alone
            own.copy_(state.get("precise", state["model"])[name])
