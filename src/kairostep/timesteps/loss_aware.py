"""Samplers that learn from the training losses, without extra network evaluations."""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from kairostep.checks import count, function_of_t, positive, positive_share, renamed_arguments
from kairostep.ranks import gather_over_ranks, world_size
from kairostep.registry import samplers
from kairostep.timesteps.bin_means import BinMeans
from kairostep.timesteps.context import SamplerContext
from kairostep.timesteps.draw_table import TableSampler, add_table
from kairostep.timesteps.fixed import UNBIASED_FLOOR, LogSNR
from kairostep.timesteps.histogram import bin_index, with_floor
from kairostep.timesteps.sampler import LARGEST, LossAt, Timesteps, learns_from_step

MAX_LOG_SNR = 20.0  # of bins: beyond, a process is as good as at its end


@samplers.register("loss_second_moment")
class LossSecondMoment(TableSampler):
    """Draws by the root mean square of recent losses, weighted by 1/density.

    Nichol & Dhariwal 2021 introduced it for the variational bound. Draws are uniform until every bin has seen `history`
    losses. density / uniform stays between `floor` and (1 - floor) num_bins + floor.

    Args:
        num_bins: Equal bins of [0, 1].
        history: Losses that each bin remembers.
        floor: Share of draws that stay uniform.
        stratified: Draw one time in each of N equal parts of the distribution, N being the batch over all ranks.
        seed: Of the draws.
    """

    losses: Tensor  # (K, history), a ring per bin
    num_seen: Tensor  # (K,) pushed into the ring, of one step at most `history`
    num_skipped: Tensor  # ()
    num_shown: Tensor  # () losses of a step over all ranks; on several as known at the first step of each process
    num_gathered: int = 0  # losses that each rank sends of a step, known after the first of this process
    has_warned: bool = False  # of a larger batch

    @renamed_arguments(uniform_prob="floor")
    def __init__(
        self,
        num_bins: int = 1000,
        history: int = 10,
        floor: float = 0.001,
        *,
        stratified: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(num_bins, beta=1.0, stratified=stratified, seed=seed)
        self.history = count("history", history, at_most=10**5, example=10)
        self.floor = positive_share("floor", floor)
        self.register_buffer("losses", torch.zeros(num_bins, history, dtype=torch.float32))
        self.register_buffer("num_seen", torch.zeros(num_bins, dtype=torch.int64))
        self.register_buffer("num_skipped", torch.tensor(0))
        self.register_buffer("num_shown", torch.tensor(0))

    @learns_from_step
    def observe(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None) -> Iterator[None]:
        """Record the losses, those of all ranks in the order of ranks."""
        yield
        self.record(drawn.t, losses)

    @torch.no_grad()
    def record(self, t: Tensor, losses: Tensor) -> None:
        """Push each loss (B,) into the ring of its bin, as if the batches of all ranks were one."""
        num_bins = self.losses.shape[0]
        losses = losses.float()
        finite = losses.abs() < LARGEST
        index = torch.where(finite, bin_index(t, num_bins), num_bins)  # the last is for what is not finite
        index, losses, num_skipped = self.gather(index, torch.where(finite, losses, 0.0), (~finite).sum())
        index, order = index.sort(stable=True)
        num_of_bin, num_later = ranks_in_bins(index, num_bins + 2)
        num_new = num_of_bin.clamp(max=self.history)
        kept = (index < num_bins) & (num_later < self.history)  # the last few, should one bin get many
        place = num_new[index] - 1 - num_later
        slot = (self.num_seen[index.clamp(max=num_bins - 1)] + place) % self.history
        cell = torch.where(kept, index * self.history + slot, num_bins * self.history)  # (N,), the last a dustbin
        rings = F.pad(self.losses.flatten(), (0, 1))
        rings[cell] = losses[order]
        self.losses.copy_(rings[:-1].view_as(self.losses))
        self.num_seen += num_new[:num_bins]
        self.num_skipped += num_skipped
        self.steps.advance()
        self.table.set(self.learned_mass())

    def gather(self, index: Tensor, losses: Tensor, num_skipped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return bins and losses (B,) of all ranks, in their order, (N,) each, and the sum of what they skipped.

        The first message of a process has room for all losses that the rings remember, and says how many a rank has:
        later ones are as long as the largest of them, or of those before a resume. A batch that is smaller, as the last
        of an epoch, is filled up with losses of no bin, K + 1; of one that is larger the last losses are sent.
        """
        num_own = len(losses)
        if world_size() == 1:
            if num_own > self.num_gathered:
                self.num_gathered = num_own
                self.num_shown.clamp_(min=num_own)
            return index, losses, num_skipped
        room = self.num_gathered or self.losses.numel()
        if room < min(num_own, self.losses.numel()) and not self.has_warned:
            self.has_warned = True
            warnings.warn(
                f"LossSecondMoment has room for {room} losses of each process in a step, fixed when processes started, "
                f"got {num_own}, of which only the last count: save a checkpoint and resume with the larger batch",
                stacklevel=4,
            )
        if num_own > room:
            index, losses = self.remembered(index, losses)
        message = losses.new_full((2, 1 + room), len(self.losses) + 1)
        message[:, 0] = torch.stack([torch.full_like(losses[0], num_own), num_skipped.to(losses)])
        message[:, 1 : 1 + num_own] = torch.stack([index.to(losses.dtype), losses])[:, -room:]
        messages = gather_over_ranks(message)  # (W, 2, 1 + room)
        if not self.num_gathered:
            self.num_shown.clamp_(min=world_size() * int(messages[:, 0, 0].max()))
            self.num_gathered = min(room, -(-int(self.num_shown) // world_size()))
        index_of_all, losses_of_all = messages[:, :, 1:].transpose(0, 1).flatten(1)
        return index_of_all.long(), losses_of_all, messages[:, 1, 0].sum().long()

    def remembered(self, index: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Return bins and losses (B,) with those last that a ring of this batch alone would hold."""
        num_bins = len(self.losses)
        sorted_index, order = index.sort(stable=True)
        num_later = torch.empty_like(index).scatter(0, order, ranks_in_bins(sorted_index, num_bins + 2)[1])
        kept = (index < num_bins) & (num_later < self.history)
        use = kept.long().sort(stable=True).indices
        return torch.where(kept, index, num_bins + 1)[use], losses[use]

    def learned_mass(self) -> Tensor:
        """Return what the losses ask for, (K,), summing to 1."""
        root_mean_square = self.losses.square().mean(1).sqrt()
        ready = (self.num_seen >= self.history).all() & (root_mean_square.sum() > 0)
        return with_floor(torch.where(ready, root_mean_square, 1.0), self.floor)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load states of version 0.1 too, which have no table and do not say how many losses a step had."""
        if f"{prefix}losses" in state_dict:
            state_dict.setdefault(f"{prefix}num_shown", torch.tensor(0))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}losses" in state_dict and f"{prefix}table.rows" not in state_dict:
            add_table(state_dict, prefix, self, self.learned_mass())

    def diagnostics(self) -> dict[str, Tensor]:
        """Return how many losses were skipped, being NaN or infinite."""
        return {"skipped_losses": self.num_skipped}


def ranks_in_bins(index: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    """Return how many of the sorted bins (N,) are each bin, (num_bins,), and how many of its bin follow each, (N,)."""
    num = index.new_zeros(num_bins).index_add(0, index, torch.ones_like(index))
    return num, num.cumsum(0)[index] - 1 - torch.arange(len(index), device=index.device)


@samplers.register("infonoise")
class InfoNoise(TableSampler):
    """Draws where noise hides most about the data.

    It estimates the entropy rate from the losses (Raya et al. 2026, arXiv 2602.18647). The rate per sigma is
    q = MMSE / sigma**3. A gate sigma**n / (sigma**n + c**n) multiplies it, where the onset c is the largest sigma at
    which q still reaches `onset` times its peak. The density is the gated rate over the loss weight, so that density
    times weight follows the gated rate. density / uniform stays between `floor` and (1 - floor) num_bins + floor.

    Args:
        process: The process that is trained.
        loss_weight: The function of t that the loss puts on the squared error of x0 (`objective.x0_weight`). None for
            an unweighted epsilon loss.
        num_bins: Equal bins of [0, 1]. A process of fewer steps has one bin per step.
        decay: Of the running mean error, per loss in a bin.
        warmup: Losses that every bin must have seen before the density changes. Until then draws are uniform.
        refresh: Steps between changes of the density.
        onset: The share of the peak that defines c.
        gate_power: The power n of the gate.
        floor: Share of draws that stay uniform.
        unbiased: Weight by 1/density.
        stratified: Draw one time in each of N equal parts of the distribution, N being the batch over all ranks.
        seed: Of the draws.
    """

    log_snr: Tensor  # (K,)
    log_width: Tensor  # (K,) of the bin in log(sigma)
    log_weight: Tensor  # (K,) log of the factor that the loss puts on the squared error in x0

    def __init__(
        self,
        process: LogSNR,
        loss_weight: Callable[[Tensor], Tensor] | None = None,
        *,
        num_bins: int = 100,
        decay: float = 0.99,  # of the running mean error, per loss in a bin
        warmup: int = 10,
        refresh: int = 10,  # steps between changes of the density
        onset: float = 0.002,
        gate_power: float = 3.0,
        floor: float = 0.1,
        unbiased: bool = False,
        stratified: bool = True,
        seed: int = 0,
    ) -> None:
        num_bins = min(
            count("num_bins", num_bins, at_least=2, at_most=10**6, example=20), getattr(process, "num_steps", num_bins)
        )
        super().__init__(num_bins, beta=float(unbiased), stratified=stratified, seed=seed)
        self.warmup = count("warmup", warmup, example=100)
        self.refresh = count("refresh", refresh)
        self.onset = positive_share("onset", onset)
        self.gate_power = positive("gate_power", gate_power)
        self.floor = max(positive_share("floor", floor), UNBIASED_FLOOR if unbiased else 0.0)
        self.process = process
        self.loss_weight = None if loss_weight is None else check_loss_weight(loss_weight)
        centres = (torch.arange(num_bins, dtype=torch.float64) + 0.5) / num_bins
        log_snr = self.bounded_log_snr(centres)
        self.register_buffer("log_snr", log_snr.float(), persistent=False)
        self.register_buffer("log_width", log_widths(log_snr).float(), persistent=False)
        weight = self.weight_on_x0(centres)
        if not bool((weight.isfinite() & (weight > 0)).all()):
            raise ValueError(f"loss_weight must be positive and finite at every bin, got {weight}: add a little to it")
        self.register_buffer("log_weight", weight.log().float(), persistent=False)
        self.errors = BinMeans(num_bins, decay)  # squared, in x0

    @classmethod
    def from_experiment(cls, experiment: SamplerContext, **options: Any) -> Self:
        """Return the sampler for the loss that is trained."""
        return cls(experiment.process, experiment.objective.x0_weight, seed=experiment.seed, **options)

    def bounded_log_snr(self, t: Tensor) -> Tensor:
        """Return log-SNR kept in the range of usual processes: a flow starts and ends at infinity."""
        return self.process.log_snr(t).clamp(-MAX_LOG_SNR, MAX_LOG_SNR)

    def weight_on_x0(self, t: Tensor) -> Tensor:
        """Return the factor (N,) that the loss puts on the squared error of x0 at t (N,)."""
        return self.bounded_log_snr(t).exp() if self.loss_weight is None else self.loss_weight(t)

    @learns_from_step
    def observe(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None) -> Iterator[None]:
        """Record the losses of all ranks."""
        yield
        self.record(drawn.t, losses)

    @torch.no_grad()
    def record(self, t: Tensor, losses: Tensor) -> None:
        """Take in the losses (B,) at t (B,), and change the density if it is time."""
        self.errors.add(t, losses / self.weight_on_x0(t))
        if self.steps.advance() % self.refresh == 0:
            ready = (self.errors.num_seen[:-1] >= self.warmup).all()
            learned = self.learned_mass()
            self.table.set(with_floor(torch.where(ready, learned, 1 / len(learned)), self.floor))

    def learned_mass(self) -> Tensor:
        """Return what the losses ask for, (K,), summing to 1."""
        log_error = self.errors.read().clamp(min=1e-30).log()
        log_error = F.avg_pool1d(F.pad(log_error[None], (1, 1), mode="replicate"), 3, 1)[0]  # smooth over neighbours
        log_sigma = -self.log_snr / 2
        log_rate = log_error - 3 * log_sigma  # per sigma
        reached = log_rate >= log_rate.max() + math.log(self.onset)
        log_onset = torch.where(reached, log_sigma, -torch.inf).max()
        log_gate = F.logsigmoid(self.gate_power * (log_sigma - log_onset))
        return (log_rate + log_sigma + log_gate - self.log_weight + self.log_width).softmax(0)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return how many losses were skipped, being NaN or infinite."""
        return {"skipped_losses": self.errors.num_skipped}


def check_loss_weight(loss_weight: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return InfoNoise's loss weight if it can be one: it was a function of log-SNR once, `torch.exp` by default."""
    if loss_weight is torch.exp:
        raise ValueError(
            "loss_weight must be a function of t, got torch.exp, of log-SNR: leave it out, it means the same"
        )
    return function_of_t("loss_weight", loss_weight, "objective.x0_weight")


def log_widths(log_snr: Tensor) -> Tensor:
    """Return the log of each bin's width in log(sigma), (K,); a bin at an infinite end has that of its neighbour."""
    known = log_snr.abs() < MAX_LOG_SNR
    between = known[1:] & known[:-1]
    if not bool(between.any()):
        raise ValueError(
            f"log-SNR must be within {MAX_LOG_SNR} of 0 at two neighbouring bins, got {log_snr}: pass another process"
        )
    steps = (-log_snr.diff() / 2).where(between, 0.0)  # (K-1,) from one centre to the next
    widths, num = (F.pad(part, (1, 0)) + F.pad(part, (0, 1)) for part in (steps, between.to(steps.dtype)))
    measured = num.nonzero()
    nearest = torch.arange(len(log_snr)).clamp(int(measured[0]), int(measured[-1]))
    return (widths / num)[nearest].log()
