"""Samplers that learn from the losses, or the gradients, they are shown."""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kairostep.timesteps.arguments import below_one, count, positive, share
from kairostep.timesteps.distributed import gather_over_ranks, rank, sum_over_ranks
from kairostep.timesteps.draws import Draws
from kairostep.timesteps.fixed import UNBIASED_FLOOR, LogSNR
from kairostep.timesteps.histogram import bin_index, rebin, with_floor
from kairostep.timesteps.probes import isolated_randomness, probe_seed
from kairostep.timesteps.sampler import LARGEST, LossAt, Timesteps, TimestepSampler, draw, learns_from_step


def finite_in_bins(t: Tensor, losses: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    """Return bin (B,) and loss (B,); a loss that is not finite becomes 0 in the extra bin `num_bins`."""
    losses = losses.float()
    finite = losses.abs() < LARGEST
    index = torch.where(finite, bin_index(t, num_bins), num_bins)
    return index, torch.where(finite, losses, 0.0)


class LossSecondMoment(TimestepSampler):
    """Draws in proportion to the root mean square of each bin's last losses, weighted by 1/density.

    Nichol & Dhariwal 2021, meant for the variational bound. Uniform until every bin has seen `history` losses.
    """

    losses: Tensor  # (K, history), a ring per bin
    num_seen: Tensor  # (K,)
    num_skipped: Tensor  # ()

    def __init__(
        self,
        num_bins: int = 1000,
        history: int = 10,
        uniform_prob: float = 0.001,
        *,
        stratified: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.history = count("history", history)
        self.uniform_prob = positive("uniform_prob", share("uniform_prob", uniform_prob))
        self.draws = Draws(seed, stratified=stratified)
        self.register_buffer("losses", torch.zeros(count("num_bins", num_bins), history, dtype=torch.float32))
        self.register_buffer("num_seen", torch.zeros(num_bins, dtype=torch.int64))
        self.register_buffer("num_skipped", torch.tensor(0))

    def mass(self) -> Tensor:
        """Return the mass of each bin (K,)."""
        root_mean_square = self.losses.square().mean(1).sqrt()
        ready = (self.num_seen >= self.history).all() & (root_mean_square.sum() > 0)
        return with_floor(torch.where(ready, root_mean_square, 1.0), self.uniform_prob)

    def sample(self, x0: Tensor) -> Timesteps:
        """Return one time and one weight for each row of x0 (B, ...)."""
        return draw(self.mass(), self.draws(x0), unbiased=True)

    @learns_from_step
    def observe(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt) -> Iterator[None]:
        """Record the losses, those of all ranks in the order of ranks."""
        self.record(drawn.t, losses)
        yield

    @torch.no_grad()
    def record(self, t: Tensor, losses: Tensor) -> None:
        """Push each loss (B,) into the ring of its bin, as if the batches of all ranks were one."""
        num_bins = self.losses.shape[0]
        index, losses = finite_in_bins(t, losses, num_bins)
        index, order = index.sort(stable=True)
        num_new = index.new_zeros(num_bins + 1).index_add(0, index, torch.ones_like(index))
        place = torch.arange(len(index), device=index.device) - (num_new.cumsum(0) - num_new)[index]  # within its bin
        num_new_by_rank = gather_over_ranks(num_new)  # (W, K+1)
        num_new = num_new_by_rank.sum(0)
        place = place + num_new_by_rank[: rank()].sum(0)[index]
        kept = (index < num_bins) & (place >= num_new[index] - self.history)  # the last few, should one bin get many
        slot = (self.num_seen[index.clamp(max=num_bins - 1)] + place) % self.history
        cell = torch.where(kept, index * self.history + slot, num_bins * self.history)  # (B,), the last a dustbin
        new = losses.new_zeros(2, num_bins * self.history + 1)
        new[:, cell] = torch.stack([losses[order], torch.ones_like(losses)])
        value, written = sum_over_ranks(new)[:, :-1].view(2, num_bins, self.history)
        self.losses.copy_(torch.where(written > 0, value, self.losses))
        self.num_seen += num_new[:-1]
        self.num_skipped += num_new[-1]

    def density(self, num_bins: int = 100) -> Tensor:
        """Return where the draws go now: (num_bins,), summing to 1."""
        return rebin(self.mass(), num_bins)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return how many losses were skipped, being NaN or infinite."""
        return {"skipped_losses": self.num_skipped}


class InfoNoise(TimestepSampler):
    """Draws where noise hides most about the data: the entropy rate, read off the losses (Raya et al., 2602.18647).

    The rate per sigma is q = MMSE / sigma**3. It is gated by sigma**n / (sigma**n + c**n), c being the onset: the
    largest sigma at which q still reaches `onset` times its peak. The density is gated rate / loss weight, so that
    density times weight follows the gated rate. Uniform until every bin has seen `warmup` losses; `floor` is the share
    of uniform draws from then on. A process of fewer steps than `num_bins` has one bin per step.
    """

    error: Tensor  # (K,) running mean of the squared error in x0
    num_seen: Tensor  # (K,)
    num_skipped: Tensor  # ()
    log_snr: Tensor  # (K,)
    log_width: Tensor  # (K,) of the bin in log(sigma)
    log_weight: Tensor  # (K,) log of the factor that the loss puts on the squared error in x0

    def __init__(
        self,
        process: LogSNR,
        loss_weight: Callable[[Tensor], Tensor] = torch.exp,  # of log-SNR; exp is an unweighted epsilon loss
        *,
        num_bins: int = 100,
        decay: float = 0.99,  # per loss
        warmup: int = 10,
        onset: float = 0.002,
        gate_power: float = 3.0,
        floor: float = 0.1,
        unbiased: bool = False,
        stratified: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.decay = below_one("decay", decay)
        self.warmup = count("warmup", warmup)
        self.onset = positive("onset", share("onset", onset))
        self.gate_power = positive("gate_power", gate_power)
        self.floor = max(positive("floor", share("floor", floor)), UNBIASED_FLOOR if unbiased else 0.0)
        self.unbiased = unbiased
        self.draws = Draws(seed, stratified=stratified)
        self.process = process
        self.loss_weight = loss_weight
        num_bins = min(count("num_bins", num_bins, at_least=2), getattr(process, "num_steps", num_bins))
        centres = (torch.arange(num_bins, dtype=torch.float64) + 0.5) / num_bins
        log_snr = self.bounded_log_snr(centres)
        self.register_buffer("log_snr", log_snr.float(), persistent=False)
        self.register_buffer("log_width", torch.gradient(-log_snr / 2)[0].log().float(), persistent=False)
        self.register_buffer("log_weight", loss_weight(log_snr).log().float(), persistent=False)
        self.register_buffer("error", torch.zeros(num_bins, dtype=torch.float32))
        self.register_buffer("num_seen", torch.zeros(num_bins, dtype=torch.int64))
        self.register_buffer("num_skipped", torch.tensor(0))

    def bounded_log_snr(self, t: Tensor) -> Tensor:
        """Return log-SNR kept in the range of usual processes: a flow starts and ends at infinity."""
        return self.process.log_snr(t).clamp(-20, 20)

    def mass(self) -> Tensor:
        """Return the mass of each bin (K,)."""
        log_error = self.error.clamp(min=1e-30).log()
        log_error = F.avg_pool1d(F.pad(log_error[None], (1, 1), mode="replicate"), 3, 1)[0]  # smooth over neighbours
        log_sigma = -self.log_snr / 2
        log_rate = log_error - 3 * log_sigma  # per sigma
        reached = log_rate >= log_rate.max() + math.log(self.onset)
        log_onset = torch.where(reached, log_sigma, -torch.inf).max()
        log_gate = F.logsigmoid(self.gate_power * (log_sigma - log_onset))
        learned = (log_rate + log_sigma + log_gate - self.log_weight + self.log_width).softmax(0)
        ready = (self.num_seen >= self.warmup).all()
        return with_floor(torch.where(ready, learned, 1 / len(learned)), self.floor)

    def sample(self, x0: Tensor) -> Timesteps:
        """Return one time and one weight for each row of x0 (B, ...)."""
        return draw(self.mass(), self.draws(x0), unbiased=self.unbiased)

    @learns_from_step
    def observe(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt) -> Iterator[None]:
        """Record the losses of all ranks."""
        self.record(drawn.t, losses)
        yield

    @torch.no_grad()
    def record(self, t: Tensor, losses: Tensor) -> None:
        """Move each bin's mean error toward that of its new losses (B,), as if the batches of all ranks were one."""
        num_bins = len(self.error)
        index, errors = finite_in_bins(t, losses / self.loss_weight(self.bounded_log_snr(t)), num_bins)
        new = errors.new_zeros(2, num_bins + 1)
        new.index_add_(1, index, torch.stack([errors, torch.ones_like(errors)]))
        total, num_new = sum_over_ranks(new)
        self.num_skipped += num_new[-1].long()
        total, num_new = total[:-1], num_new[:-1]
        mean = total / num_new.clamp(min=1)
        keep = torch.where(self.num_seen > 0, self.decay**num_new, (num_new == 0).float())
        self.error.copy_(torch.lerp(mean, self.error, keep))
        self.num_seen += num_new.long()

    def density(self, num_bins: int = 100) -> Tensor:
        """Return where the draws go now: (num_bins,), summing to 1."""
        return rebin(self.mass(), num_bins)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return how many losses were skipped, being NaN or infinite."""
        return {"skipped_losses": self.num_skipped}


class GradientVariance(TimestepSampler):
    """Draws in proportion to the variance of the stochastic gradient, which Kim et al. show to fail (their Table 4).

    The paper names p_t ~ Var[grad L_t] over x0 and noise, and no estimator. The reading taken here: the trace of the
    covariance of a single row's gradient, E|g|^2 - |E g|^2, at the centre of each of `num_bins` bins, from gradients of
    `rows_per_gradient` rows of the current batch; one bin every `every` steps in turn, averaged over time by `decay`;
    the loss as it is trained (no extra c_t), not divided by the density unless `unbiased`. Uniform until each bin has
    been measured once. Costs one forward and backward of the batch every `every` steps.

    `loss_at` has to be differentiable; under DDP let it call the wrapped `model.module`.
    """

    variance: Tensor  # (K,)
    num_measured: Tensor  # (K,)
    num_skipped: Tensor  # ()
    num_probes: Tensor  # () network evaluations, over all ranks

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        num_bins: int = 20,
        every: int = 10,
        rows_per_gradient: int = 16,
        decay: float = 0.9,
        floor: float = 0.0,
        unbiased: bool = False,
        stratified: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.parameters_of_model = [p for p in parameters if p.requires_grad]  # a list: not parameters of this module
        if not self.parameters_of_model:
            raise ValueError("parameters must hold at least one that requires a gradient: pass model.parameters()")
        self.every = count("every", every)
        self.rows_per_gradient = count("rows_per_gradient", rows_per_gradient)
        self.decay = below_one("decay", decay)
        self.floor = max(share("floor", floor), UNBIASED_FLOOR if unbiased else 0.0)
        self.unbiased = unbiased
        self.draws = Draws(seed, stratified=stratified)
        self.num_observed, self.seed = 0, seed
        self.register_buffer("variance", torch.zeros(count("num_bins", num_bins), dtype=torch.float32))
        self.register_buffer("num_measured", torch.zeros(num_bins, dtype=torch.int64))
        self.register_buffer("num_skipped", torch.tensor(0))
        self.register_buffer("num_probes", torch.tensor(0))

    def get_extra_state(self) -> Tensor:
        """Return the number of steps seen and the seed, kept on the host: whether a probe is due costs no sync."""
        return torch.tensor([self.num_observed, self.seed])

    def set_extra_state(self, state: Tensor) -> None:
        """Take up the number of steps seen and the seed."""
        self.num_observed, self.seed = state.tolist()

    def mass(self) -> Tensor:
        """Return the mass of each bin (K,)."""
        ready = (self.num_measured > 0).all() & (self.variance.sum() > 0)
        return with_floor(torch.where(ready, self.variance, 1.0), self.floor)

    def sample(self, x0: Tensor) -> Timesteps:
        """Return one time and one weight for each row of x0 (B, ...)."""
        return draw(self.mass(), self.draws(x0), unbiased=self.unbiased)

    @learns_from_step
    def observe(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt) -> Iterator[None]:
        """Measure the next bin if it is time."""
        if self.num_observed % self.every == 0:
            bin_ = self.num_observed // self.every % len(self.variance)
            with isolated_randomness(x0.device, probe_seed(self.seed, self.num_observed)), torch.enable_grad():
                self.record(bin_, *self.measure(bin_, x0, loss_at))
        self.num_observed += 1
        yield

    def measure(self, bin_: int, x0: Tensor, loss_at: LossAt) -> tuple[Tensor, Tensor]:
        """Return the variance of one row's gradient at the centre of the bin and the rows used, over all ranks."""
        rows = torch.arange(len(x0), device=x0.device)
        rows_per_gradient = min(self.rows_per_gradient, max(1, len(x0) // 2))
        num_gradients = square = total = torch.zeros((), device=x0.device)
        for chunk in torch.split(rows, rows_per_gradient):
            t = torch.full((len(chunk),), (bin_ + 0.5) / len(self.variance), device=x0.device)
            losses = loss_at(chunk, t)
            if not losses.requires_grad:
                raise ValueError("GradientVariance needs a differentiable loss_at: take it out of torch.no_grad()")
            gradients = torch.autograd.grad(losses.mean(), self.parameters_of_model, materialize_grads=True)
            gradient = torch.cat([g.detach().flatten().float() for g in gradients])  # (P,)
            num_gradients = num_gradients + 1
            square = square + len(chunk) * gradient.square().sum()
            total = total + len(chunk) * gradient
        num_rows = torch.full_like(square, len(x0))
        num_gradients, num_rows, square = sum_over_ranks(torch.stack([num_gradients, num_rows, square]))
        between = square - sum_over_ranks(total).square().sum() / num_rows
        return between / (num_gradients - 1), num_rows

    @torch.no_grad()
    def record(self, bin_: int, variance: Tensor, num_rows: Tensor) -> None:
        """Move the bin's variance toward the measured one; what is not finite is skipped, as of one gradient alone."""
        finite = variance.abs() < LARGEST**2
        keep = torch.where(self.num_measured[bin_] > 0, self.decay, 0.0)
        new = torch.lerp(variance.clamp(min=0), self.variance[bin_], keep)
        self.variance[bin_] = torch.where(finite, new, self.variance[bin_])
        self.num_measured[bin_] += finite
        self.num_skipped += ~finite
        self.num_probes += num_rows.long()

    def density(self, num_bins: int = 100) -> Tensor:
        """Return where the draws go now: (num_bins,), summing to 1."""
        return rebin(self.mass(), num_bins)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the network evaluations spent on probes and how many of them gave no finite variance."""
        return {"probe_evaluations": self.num_probes, "skipped_probes": self.num_skipped}
