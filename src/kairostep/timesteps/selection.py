"""Which few timesteps explain the whole objective: feature selection over past loss drops (Kim et al., App. 10)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kairostep.timesteps.sampler import LARGEST

SelectionRule = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`rule(features (n, m), target (n,), present (n,))`: a score (m,) for each feature, from the rows that are present."""


def f_statistic(features: Tensor, target: Tensor, present: Tensor | None = None) -> Tensor:
    """Return the F-statistic of regressing target (n,) on each column of features (n, m) alone: (m,).

    F = r**2 / (1 - r**2) (n - 2), r the correlation: 0 for a constant column, the largest float for a perfect one.
    """
    present = torch.ones_like(target) if present is None else present.to(target.dtype)
    num_rows = present.sum()
    x = (features - (present @ features) / num_rows) * present[:, None]
    y = (target - (present @ target) / num_rows) * present
    r_squared = ((y @ x).square() / (x.square().sum(0) * y.square().sum())).clamp(max=1)  # rounding may pass 1
    f = r_squared / (1 - r_squared) * (num_rows - 2)
    return f.nan_to_num(nan=0.0, posinf=torch.finfo(f.dtype).max)


def select_timesteps(
    queue: Tensor, k: int, *, present: Tensor | None = None, rule: SelectionRule = f_statistic
) -> Tensor:
    """Return the k columns of the loss drops queue (n, m) that best explain their sum, ascending: (k,) int64.

    Among equal scores the later column wins, as in scikit-learn's SelectKBest.
    """
    if not 1 <= k <= queue.shape[1]:
        raise ValueError(f"k must be in 1..{queue.shape[1]}, the timesteps of the queue, got {k}: lower num_selected")
    present = torch.ones(len(queue), dtype=torch.bool, device=queue.device) if present is None else present
    scores = rule(queue, queue.sum(1), present)
    if scores.shape != queue.shape[1:]:
        raise ValueError(
            f"a selection rule must return one score per timestep, {tuple(queue.shape[1:])}, got {tuple(scores.shape)}"
        )
    return scores.argsort(stable=True)[-k:].sort().values


class DropQueue(nn.Module):
    """The latest loss drops over a sweep of timesteps, and the few timesteps that explain them best.

    A sweep of fewer than T timesteps is an even grid from the first step to the last; each one's drop stands for those
    of the steps nearest to it, with the weights that they have, so that a row always sums to the drop over all T.
    """

    step_t: Tensor  # (T,) the middle of each step, in [0, 1)
    nearest: Tensor  # (T,) the position in the sweep that stands for it
    sweep_t: Tensor  # (n,)
    drops: Tensor  # (Q, n)
    present: Tensor  # (Q,) which rows are filled
    selected: Tensor  # (k,) positions in the sweep, ascending

    def __init__(
        self, num_steps: int, sweep: int, size: int, num_selected: int, *, rule: SelectionRule, min_rows: int = 3
    ) -> None:
        super().__init__()
        if not num_selected <= sweep <= num_steps:
            raise ValueError(
                f"num_selected <= sweep <= num_steps must hold, got {num_selected}, {sweep} and {num_steps}: "
                "select fewer timesteps or raise num_steps"
            )
        self.rule, self.min_rows = rule, min_rows
        index = torch.linspace(0, num_steps - 1, sweep, dtype=torch.float64).round().long()
        step_t = (torch.arange(num_steps, dtype=torch.float32) + 0.5) / num_steps
        spread = (2 * torch.arange(num_selected) + 1) * sweep // (2 * num_selected)
        between = (index[1:] + index[:-1] + 1) // 2
        self.register_buffer("step_t", step_t, persistent=False)
        self.register_buffer("nearest", torch.bucketize(torch.arange(num_steps), between, right=True), persistent=False)
        self.register_buffer("sweep_t", step_t[index], persistent=False)
        self.register_buffer("drops", torch.zeros(size, sweep, dtype=torch.float32))
        self.register_buffer("present", torch.zeros(size, dtype=torch.bool))
        self.register_buffer("selected", spread)

    def push(self, drop: Tensor, weight: Tensor, slot: int) -> Tensor:
        """Put the drops (n,) into a slot of the ring and choose anew; return whether they were finite, ().

        weight (T,) is what the loss of each step counts in the objective.
        """
        drop = drop * torch.zeros_like(drop).scatter_add(0, self.nearest, weight)
        finite = (drop.abs() < LARGEST).all()
        self.drops[slot] = torch.where(finite, drop, 0.0)
        self.present[slot] = finite
        precise = torch.float32 if self.drops.device.type == "mps" else torch.float64
        chosen = select_timesteps(self.drops.to(precise), len(self.selected), present=self.present, rule=self.rule)
        self.selected.copy_(torch.where(self.present.sum() >= self.min_rows, chosen, self.selected))
        return finite
