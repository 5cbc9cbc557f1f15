"""What the released code of Kim et al. does differently from the paper or from us: `Adaptive(as_published=True)`."""

import math

import torch
from torch import Tensor, nn

from kairostep.timesteps.policy import Beta, BetaPolicy, ConstantBeta
from kairostep.timesteps.probe_plan import Probing
from kairostep.timesteps.reading import Reading
from kairostep.timesteps.selection import DropQueue


class Published(Reading):
    """The released code's answers, for comparison, without its crashes."""

    stratified = False
    standardised = False
    eval_mode = False
    min_rows = 2
    rates_per_input = False

    def floor(self, floor: float | None, *, unbiased: bool) -> float:
        """Return 0: all draws follow the policy."""
        return 0.0

    def sweep(self, sweep: int | None, num_steps: int) -> int:
        """Return all T timesteps."""
        return num_steps

    def num_paid(self, reward_rows: int | None, num_rows: int) -> int:
        """Return all rows."""
        return num_rows

    def check(self, floor: float | None, probing: Probing, *, unbiased: bool) -> None:
        """Raise if an option is given that the released code fixes."""
        given = (floor, probing.sweep, probing.reward_rows, probing.credit, unbiased)
        if given != (None, None, None, "sample", False):
            raise ValueError("as_published fixes floor, sweep, reward_rows, credit and unbiased: leave them out")

    def prepare(self, policy: nn.Module, queue: DropQueue) -> None:
        """Start with the first timesteps selected, and with the map to a and b that the released code has."""
        queue.selected.copy_(torch.arange(len(queue.selected)))
        if isinstance(policy, BetaPolicy | ConstantBeta):
            policy.use_released_map()

    def to_t(self, u: Tensor, num_steps: int) -> Tensor:
        """Return t such that floor(t T) is round(u (T - 1)): both ends have half a bin."""
        return (u * (num_steps - 1) + 0.5) / num_steps

    def to_u(self, t: Tensor, num_steps: int) -> Tensor:
        """Return the policy's u of a time, the inverse of `to_t`."""
        return (t * num_steps - 0.5) / (num_steps - 1)

    def noise(self, update: int, *, after: bool) -> int:
        """Return the number of the noise that a probe is measured with: fresh after the step."""
        return 2 * update + after

    def reward(self, drops: Tensor) -> Tensor:
        """Return the reward of each row from its weighted drops (|S|, R) at the selected timesteps."""
        return super().reward(drops) * (len(drops) / math.log(2))  # the sum over S, in bits

    def entropy_bonus(self, log_prob: Tensor, beta: Beta, entropy: float) -> Tensor:
        """Return the entropy as a part of the reward, (R,): gradients flow through both factors."""
        return log_prob * (entropy * beta.entropy())
