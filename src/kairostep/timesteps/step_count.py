"""The step that a sampler is at, and its seed."""

import torch
from torch import Tensor, nn


class StepCount(nn.Module):
    """Steps counted on the host, and the seed of what is drawn in them, both saved with the sampler.

    On the host, whether something is due costs no sync.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.num_steps, self.seed = 0, seed

    def advance(self) -> int:
        """Count one step and return how many there have been."""
        self.num_steps += 1
        return self.num_steps

    def refreshed_since(self, step: int, refresh: int) -> bool:
        """Whether the last change of what changes every `refresh` steps was at this step or later."""
        return self.num_steps // refresh * refresh >= max(1, step)

    def get_extra_state(self) -> Tensor:
        """Return the number of steps and the seed."""
        return torch.tensor([self.num_steps, self.seed])

    def set_extra_state(self, state: Tensor) -> None:
        """Take up the number of steps and the seed."""
        self.num_steps, self.seed = state.tolist()
