"""RootLoss with other uses of a weighting w: it draws by the root of w²l, these by wl or by both.

PYTHONPATH=benchmarks/samplers kairostep compare --arms experiments/comparisons/steep-weighting-cpu.yaml ...
"""

from typing import Any, Self

import torch
from torch import Tensor

from kairostep.timesteps import RootLoss, SamplerContext
from kairostep.timesteps.root_loss import gated

POINTS = 16  # of a bin, at which the weighting is read


class ShownRootLoss(RootLoss):
    """Draws by the root of the weighted loss, as it is shown."""

    @classmethod
    def from_experiment(cls, experiment: SamplerContext, **options: Any) -> Self:
        """Return the sampler without the weighting."""
        return cls(seed=experiment.seed, **options)


class MixedRootLoss(RootLoss):
    """Takes half of its draws by the root of w²l and half by that of wl: at most twice the noise of the better one."""

    def learned_mass(self) -> Tensor:
        """Return what the losses ask for, (K,), summing to 1."""
        root = self.squares.read().clamp(min=1e-36).pow(0.25)
        if self.loss_weight is None:
            return gated(root / root.sum(), self.gate)
        t = (torch.arange(POINTS * self.num_bins).to(root) + 0.5) / (POINTS * self.num_bins)
        shown = root / self.loss_weight(t).view(self.num_bins, POINTS).mean(1).sqrt()
        return gated((root / root.sum() + shown / shown.sum()) / 2, self.gate)
