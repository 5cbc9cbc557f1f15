"""A sampler that measures gradients: one of the paper's comparisons."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from kairostep.checks import below_one, count, share
from kairostep.ranks import sum_over_ranks, world_size
from kairostep.registry import samplers
from kairostep.timesteps.context import SamplerContext
from kairostep.timesteps.draw_table import TableSampler, add_table
from kairostep.timesteps.fixed import UNBIASED_FLOOR
from kairostep.timesteps.gradient_size import gradients_of
from kairostep.timesteps.histogram import with_floor
from kairostep.timesteps.probes import Borrowed, check_losses, probe_randomness
from kairostep.timesteps.sampler import LARGEST, LossAt, Timesteps, learns_from_step


@samplers.register("gradient_variance")
class GradientVariance(TableSampler):
    """Draws by the variance of the gradient (Kim et al. 2025, Table 4).

    Kim et al. show that it fails. They name p_t ~ Var[grad L_t] over x0 and noise, and no estimator. This one is the
    trace of the covariance of a single row's gradient, E|g|^2 - |E g|^2, at the centre of each bin, of the loss as it
    is trained (no extra c_t): the squared difference between the mean gradients of two groups of n rows is 2 / n of it
    on average. Draws are uniform until each bin has been measured once. From then on density / uniform stays between
    `floor` and (1 - floor) num_bins + floor.

    `loss_at` must be differentiable. Under DDP let it call the wrapped `model.module`.

    Args:
        parameters: The parameters whose gradients are measured.
        num_bins: Equal bins of [0, 1].
        every: Steps between measurements. Each measures one bin, in turn, by one forward and backward of the batch.
        rows_per_gradient: Rows of the current batch that one gradient is taken over, at most half of them. Two such
            groups are compared, so that with several ranks twice as many must divide the rows of each. Rows that fill
            no pair of groups are left out.
        decay: Of the running mean of a bin's variance, per measurement.
        floor: Share of draws that stay uniform.
        unbiased: Weight by 1/density.
        stratified: Draw one time in each of N equal parts of the distribution, N being the batch over all ranks.
        seed: Of the draws.
    """

    uses_loss_at = True
    variance: Tensor  # (K,)
    num_measured: Tensor  # (K,)
    num_skipped: Tensor  # ()
    num_probes: Tensor  # () network evaluations, over all ranks
    fits_ranks: bool = False  # whether pairs of groups were found to fill the rows of this rank

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        num_bins: int = 20,
        every: int = 10,
        rows_per_gradient: int = 8,
        decay: float = 0.9,
        floor: float = 0.0,
        unbiased: bool = False,
        stratified: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(num_bins, beta=float(unbiased), stratified=stratified, seed=seed)
        trained = [p for p in parameters if p.requires_grad]
        self.parameters_of_model = Borrowed(trained)
        if not trained:
            raise ValueError("parameters must hold at least one that requires a gradient: pass model.parameters()")
        self.num_bins = num_bins
        self.every = count("every", every, example=40)
        self.rows_per_gradient = count("rows_per_gradient", rows_per_gradient)
        self.decay = below_one("decay", decay, example=0.99)
        self.floor = max(share("floor", floor), UNBIASED_FLOOR if unbiased else 0.0)
        self.register_buffer("variance", torch.zeros(num_bins, dtype=torch.float32))
        self.register_buffer("num_measured", torch.zeros(num_bins, dtype=torch.int64))
        self.register_buffer("num_skipped", torch.tensor(0))
        self.register_buffer("num_probes", torch.tensor(0))

    @classmethod
    def from_experiment(cls, experiment: SamplerContext, **options: Any) -> Self:
        """Return the sampler that measures gradients of the model that is trained."""
        return cls(experiment.model.parameters(), seed=experiment.seed, **options)

    @learns_from_step
    def observe(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None) -> Iterator[None]:
        """Measure the next bin if it is time."""
        num_before = self.steps.advance() - 1
        if num_before % self.every:
            yield
            return
        assert loss_at is not None  # `learns_from_step` checked it
        bin_ = num_before // self.every % len(self.variance)
        with probe_randomness(x0.device, self.steps.seed, num_before), torch.enable_grad():
            measured = self.measure(bin_, x0, loss_at)
        yield
        self.record(bin_, *measured)

    def measure(self, bin_: int, x0: Tensor, loss_at: LossAt) -> tuple[Tensor, Tensor]:
        """Return the variance of one row's gradient at the centre of the bin and the rows used, over all ranks."""
        parameters = self.parameters_of_model.value
        if parameters is None:
            raise RuntimeError(
                "this sampler is a copy, and copies leave the parameters of the model behind: make a "
                "GradientVariance(model.parameters()) and give it the copy's state by load_state_dict"
            )
        parameters = [p for p in parameters if p.requires_grad]  # some may have been frozen since
        size = min(self.rows_per_gradient, max(1, len(x0) * world_size() // 2))  # as one rank would with all rows
        t = self.variance.new_full((size,), (bin_ + 0.5) / len(self.variance))
        num_pairs = len(x0) // (2 * size)
        sums = self.variance.new_zeros(4)  # of variances, pairs, rows, and ranks whose rows fill no whole pairs
        sums[3] = len(x0) % (2 * size) > 0
        for pair in torch.arange(num_pairs * 2 * size, device=x0.device).view(num_pairs, 2, size):
            first, second = (group_gradient(loss_at, rows, t, parameters) for rows in pair)
            variance = (first - second).square().sum() * (size / 2)
            sums[:3] += torch.stack([variance, torch.ones_like(variance), torch.full_like(variance, 2 * size)])
        variance, num, num_rows, num_unfit = sum_over_ranks(sums)
        self.check_ranks(len(x0), size, num_unfit)
        return variance / num, num_rows

    def check_ranks(self, num_rows: int, size: int, num_unfit: Tensor) -> None:
        """Raise at the first measurement, on all ranks, if pairs of groups would lie on two ranks."""
        if self.fits_ranks or world_size() == 1:
            return
        if float(num_unfit):
            fix = f"rows_per_gradient={math.gcd(size, num_rows // 2)}" if num_rows % 2 == 0 else "another batch size"
            raise ValueError(
                f"2 * rows_per_gradient must divide the rows of each of {world_size()} ranks, here {num_rows}, got "
                f"{size}: pass {fix}, or go on with fewer ranks"
            )
        self.fits_ranks = True

    @torch.no_grad()
    def record(self, bin_: int, variance: Tensor, num_rows: Tensor) -> None:
        """Move the bin's variance toward the measured one. Skip it if it is not finite or of no pair."""
        finite = variance.abs() < LARGEST**2
        keep = self.decay * (self.num_measured[bin_] > 0).float()
        new = torch.lerp(variance.clamp(min=0), self.variance[bin_], keep)
        self.variance[bin_] = torch.where(finite, new, self.variance[bin_])
        self.num_measured[bin_] += finite
        self.num_skipped += ~finite
        self.num_probes += num_rows.long()
        self.table.set(self.learned_mass())

    def learned_mass(self) -> Tensor:
        """Return the density of the variances, (K,), summing to 1."""
        ready = (self.num_measured > 0).all() & (self.variance.sum() > 0)
        return with_floor(torch.where(ready, self.variance, 1.0), self.floor)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load states of version 0.1 too, which have no table."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}variance" in state_dict and f"{prefix}table.rows" not in state_dict:
            add_table(state_dict, prefix, self, self.learned_mass())

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the network evaluations spent on probes and how many of them gave no finite variance."""
        return {"probe_evaluations": self.num_probes, "skipped_probes": self.num_skipped}


def group_gradient(loss_at: LossAt, rows: Tensor, t: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """Return the gradient (P,) of the mean loss of rows (n,) at t (n,); raise unless it can be differentiated."""
    losses = check_losses(loss_at(rows, t), rows)
    if not losses.requires_grad:
        raise ValueError("GradientVariance needs a differentiable loss_at: take it out of torch.no_grad()")
    gradients = gradients_of(losses.mean(), parameters)
    return torch.cat([g.detach().flatten().float() for g in gradients])
