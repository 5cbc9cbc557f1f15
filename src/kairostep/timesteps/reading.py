"""How this library reads the paper where its text leaves something open; the released code's answers: published.py."""

from torch import Tensor, nn

from kairostep.timesteps.fixed import UNBIASED_FLOOR
from kairostep.timesteps.policy import Beta
from kairostep.timesteps.probe_plan import DEFAULT_REWARD_ROWS, DEFAULT_SWEEP, Probing
from kairostep.timesteps.selection import DropQueue

DEFAULT_FLOOR = 0.5  # less harms the squared error: results/adaptive_digits


class Reading:
    """One answer to each question that the paper leaves open; docs/method.md has them all in a table."""

    stratified = True  # draws over the batch
    standardised = True  # rewards, unless the user wants them raw
    eval_mode = True  # of the network while it is probed
    min_rows = 3  # of the queue before timesteps are selected by it
    rates_per_input = True  # see `PolicyOptimizer`

    def floor(self, floor: float | None, *, unbiased: bool) -> float:
        """Return the share of uniform draws."""
        return max(DEFAULT_FLOOR if floor is None else floor, UNBIASED_FLOOR if unbiased else 0.0)

    def stratifies(self, stratified: bool | None, credit: str) -> bool:
        """Return whether draws are stratified, which `stratified` says unless it is None."""
        if stratified is None:
            return self.stratified and credit != "batch"
        if stratified and credit == "batch":
            raise ValueError('credit="batch" needs independent draws, got stratified=True: leave `stratified` out')
        return stratified

    def sweep(self, sweep: int | None, num_steps: int) -> int:
        """Return the timesteps in a sweep."""
        return min(num_steps, DEFAULT_SWEEP) if sweep is None else sweep

    def num_paid(self, reward_rows: int | None, num_rows: int) -> int:
        """Return how many rows of a batch over all ranks are rewarded."""
        return min(num_rows, reward_rows or DEFAULT_REWARD_ROWS)

    def check(self, floor: float | None, probing: Probing, *, unbiased: bool) -> None:
        """Raise for options that cannot be combined with this reading: here all can."""

    def prepare(self, policy: nn.Module, queue: DropQueue) -> None:
        """Set the start of policy and selection: both are made with ours."""

    def to_t(self, u: Tensor, num_steps: int) -> Tensor:
        """Return the time of the policy's u: u itself, so that all steps have equal bins."""
        return u

    def to_u(self, t: Tensor, num_steps: int) -> Tensor:
        """Return the policy's u of a time, the inverse of `to_t`."""
        return t

    def noise(self, update: int, *, after: bool) -> int:
        """Return the number of the noise that a probe is measured with: the same before and after the step."""
        return 2 * update

    def reward(self, drops: Tensor) -> Tensor:
        """Return the reward of each row from its weighted drops (|S|, R) at the selected timesteps."""
        return drops.mean(0)  # (R,), Eq. 14

    def entropy_bonus(self, log_prob: Tensor, beta: Beta, entropy: float) -> Tensor:
        """Return what the policy maximises besides its rewards, (R,), where `entropy` is the coefficient."""
        bonus: Tensor = entropy * beta.entropy_with_exact_slope()
        return bonus
