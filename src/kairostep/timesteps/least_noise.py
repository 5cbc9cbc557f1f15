"""A sampler that follows the size of gradients in the optimizer's metric: the least noise that a choice of t allows."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from kairostep.checks import count, function_of_t, positive_share, share
from kairostep.counters import RowRandom, key_tensor
from kairostep.ranks import rank, sum_over_ranks, world_size
from kairostep.registry import samplers
from kairostep.timesteps.bin_means import BinMeans
from kairostep.timesteps.context import SamplerContext
from kairostep.timesteps.draw_table import TableSampler
from kairostep.timesteps.gradient_size import (
    gradients_of,
    scaled_gradient,
    signed_size,
    trained_parameters,
    warn_of_plain_norm,
    warn_of_useless_probes,
)
from kairostep.timesteps.histogram import with_floor
from kairostep.timesteps.noise import noise_savings
from kairostep.timesteps.probes import Borrowed, check_losses, probe_randomness
from kairostep.timesteps.root_loss import FORGETTING, gated, loss_moments
from kairostep.timesteps.sampler import LARGEST, LossAt, Timesteps, learns_from_step

SWEEP = 10  # probes that sweep t, one in each step
FIRST_SWEEP, SECOND_SWEEP = 4, 40  # begin after so many warm-ups; each further sweep at twice the step
SILVER = math.sqrt(2) - 1  # multiples of it spread evenly over [0, 1)
KERNEL_WIDTH = 0.075  # of t, over which the ratio of gradient to loss is averaged
PRIOR = 0.5  # probes' worth of no correction in that average
MAX_VALUES = 8.0  # probes of a bin that count in that average: later ones replace earlier ones
MAX_CORRECTION = 4.0  # of the density, either way
PROBED_ROWS = 2  # what a seed is for


@samplers.register("least_noise")
class LeastNoise(TableSampler):
    """Draws by the size of single gradients: the least gradient noise.

    Draws are weighted by 1/density, so that the objective stays. `RootLoss` guesses that size from the loss
    alone. This sampler measures what it misses: now and then it takes the gradient of a few rows of the batch at one
    bin of t, with random signs, so that its squared size is that of the single rows' gradients on average, and learns
    the ratio of gradient to loss, smoothed over t. Until then, and where nothing was measured, it draws as `RootLoss`.

    Ten probes in ten steps sweep t, from step 160, 1600, 3200, 6400 and so on: 160 network evaluations in the first
    1000 steps, 0.13 % of those of training at batch 128, and 0.05 % in 10,000. Density / uniform stays within `floor`
    and (1 - floor) num_bins + floor.

        sampler = ks.LeastNoise(optimizer)
        with sampler.observe(x, drawn, losses.detach(), loss_at):
            optimizer.step()

    Args:
        optimizer: Its parameters are probed, and what it divides gradients by makes the metric. The state of Adam and
            its kin, RMSprop, Adagrad, Adadelta and Adamax is read. All others count by the plain norm; a warning says
            so unless they keep momentum alone, as SGD. The built-in trainer names it for you.
        num_bins: Equal bins of t.
        decay: Of the running mean square of the losses, per loss in a bin.
        floor: Share of uniform draws.
        loss_weight: The function of t that the shown losses were multiplied by (`objective.weight`); None where they
            were not.
        rows_per_probe: Rows of a probe, at most those of the batch.
        warmup: Steps of uniform draws. Probes begin after four times as many.
        refresh: Steps between changes of the density.
        gate: Uniform where the density's effective share of bins, 1 / (K sum q**2), is above it.
        stratified: Whether a batch spreads evenly over the quantiles of the density.
        seed: Of the draws and probes.
    """

    uses_loss_at = True
    learns_from_all = True
    num_probes: Tensor  # () network evaluations, over all ranks

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        num_bins: int = 20,
        decay: float = 0.99,
        floor: float = 0.1,
        *,
        loss_weight: Callable[[Tensor], Tensor] | None = None,
        rows_per_probe: int = 16,
        warmup: int = 40,
        refresh: int = 10,
        gate: float = 0.97,
        stratified: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(num_bins, beta=1.0, stratified=stratified, seed=seed)
        self.set_optimizer(optimizer)
        self.floor = positive_share("floor", floor)
        self.loss_weight = (
            None if loss_weight is None else function_of_t("loss_weight", loss_weight, "objective.weight")
        )
        self.rows_per_probe = count("rows_per_probe", rows_per_probe)
        self.warmup = count("warmup", warmup, at_least=0, example=100)
        self.refresh = count("refresh", refresh)
        self.gate = share("gate", gate)
        self.squares = BinMeans(num_bins, decay, power=2)
        self.log_ratios = BinMeans(num_bins, decay=0.9)  # of gradient to loss, both squared
        self.num_shown = 0  # rows of the last step, over all ranks
        self.register_buffer("num_probes", torch.tensor(0))

    @classmethod
    def from_experiment(cls, experiment: SamplerContext, **options: Any) -> Self:
        """Return the sampler for the loss that is trained; the trainer names its optimizer."""
        return cls(loss_weight=experiment.loss_weight(), seed=experiment.seed, **options)

    def set_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Name the optimizer whose parameters and metric count; a copy of a sampler leaves its own behind."""
        if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
            raise ValueError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}: pass the one that trains "
                "the model, ks.LeastNoise(optimizer)"
            )
        self.optimizer = Borrowed(optimizer)
        self.checked_metric = False  # until the first probe, when the optimizer has a state

    @learns_from_step
    def observe(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None) -> Iterator[None]:
        """Record the losses of all ranks and micro-batches, and probe rows of the last micro-batch if it is time."""
        self._named_optimizer()  # raises at the first step if there is none, not at the first probe
        num_before, probed = self.steps.num_steps, None
        number = probe_number(num_before, self.warmup)
        if number is not None:
            assert loss_at is not None  # `learns_from_step` checked it
            shared = probe_randomness(x0.device, self.steps.seed, num_before, shared=True)  # whoever has the rows
            with shared, torch.enable_grad():
                probed = number, self.probe(x0, loss_at, number)
        yield
        self.record(drawn.t, losses, probed)

    def probe(self, x0: Tensor, loss_at: LossAt, number: int) -> Tensor:
        """Return this rank's part of the squared size, the sum of losses and the number of rows of a probe, (3,).

        Its times lie in the bin whose turn it is. The gradient of the losses with random signs has the size of all
        rows' gradients, since products between rows cancel on average: one backward pass of a few rows is enough. One
        rank holds these rows, or several may: then the size is 0, and their gradient follows, (3 + P,).
        """
        optimizer = self._named_optimizer()
        if not self.checked_metric:
            self.checked_metric = True
            warn_of_plain_norm(optimizer)
        rows = self.probed_rows(len(x0), number)
        index = torch.arange(rows.start, rows.start + len(rows), device=x0.device)
        key = key_tensor(self.steps.seed, PROBED_ROWS, number, device=x0.device)
        random = RowRandom(key, index + rank() * len(x0))
        t = (self.probed_bin(number) + random.uniform()) / self.num_bins
        signs = torch.where(random.uniform() < 0.5, -1.0, 1.0)
        measure = getattr(loss_at, "gradient_size", None)  # of the built-in trainer, whose ranks have equal batches
        losses, size, gradient = t, t.new_zeros(()), t.new_empty(0)  # of no rows
        if world_size() > 1 and (measure is None or len(x0) % self.rows_per_probe):
            losses, gradient = signed_gradient(loss_at, optimizer, index, t, signs)
        elif rows:
            losses, size = (measure or partial(gradient_size, loss_at, optimizer))(index, t, signs)
        moments = self._moments(t, losses.float()).sum().to(size.device)
        found = torch.stack([size.float(), moments.float(), torch.full_like(size, len(rows)).float()])
        return torch.cat([found, gradient.float()])

    def probed_bin(self, number: int) -> int:
        """Return the bin of a probe. A sweep spreads its probes over t; the next one has those in between."""
        sweep, place = divmod(number, SWEEP)
        return int((place + (0.25 if sweep % 2 else 0.75)) / SWEEP * self.num_bins)

    def probed_rows(self, num_rows: int, number: int) -> range:
        """Return this rank's rows of a probe: those it holds of the rows that one rank would take of the batch."""
        num_parts = max(1, num_rows * world_size() // self.rows_per_probe)
        first = int((number * SILVER % 1) * num_parts) * self.rows_per_probe - rank() * num_rows
        return range(max(first, 0), max(0, min(first + self.rows_per_probe, num_rows)))

    @torch.no_grad()
    def record_probe(self, number: int, probed: Tensor) -> None:
        """Take in the sum of what `probe` returns on all ranks; what is not finite is skipped and counted."""
        size, moments, num_rows = probed[:3]
        size = size + probed[3:].square().sum()
        self.num_probes += num_rows.long()
        size, loss = size / num_rows, moments / num_rows / loss_moments(self.squares).mean().clamp(min=1e-30)
        usable = (size < LARGEST) & (loss < LARGEST) & (size > 0) & (loss > 0)
        log_ratio = torch.where(usable, (size / loss).log(), torch.nan)[None]
        centre = torch.full_like(log_ratio, (self.probed_bin(number) + 0.5) / self.num_bins)
        self.log_ratios.merge(self.log_ratios.sums(centre, log_ratio), keep=(1 - 1 / (number + 1)) ** FORGETTING)

    def _moments(self, t: Tensor, losses: Tensor) -> Tensor:
        return losses if self.loss_weight is None else losses * self.loss_weight(t)

    def _named_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer.value is None:
            raise ValueError(
                "LeastNoise must know the optimizer, got none: make it by ks.LeastNoise(optimizer), or call "
                "sampler.set_optimizer(optimizer), also on a copy"
            )
        return self.optimizer.value

    @torch.no_grad()
    def record(self, t: Tensor, losses: Tensor, probed: tuple[int, Tensor] | None = None) -> None:
        """Take in the losses (B,) at t (B,), and change the density if it is time.

        The number of a probe and what this rank found in it travel in the same message.
        """
        num_steps = self.steps.advance()
        self.num_shown = len(t) * world_size()
        sums = self.squares.sums(t, self._moments(t, losses))
        if probed is None:
            sums = sum_over_ranks(sums)
        else:
            number, found = probed
            message = sum_over_ranks(torch.cat([sums.flatten(), found]))
            self.record_probe(number, message[sums.numel() :])
            if number == SWEEP - 1 and t.device.type == "cpu":
                warn_of_useless_probes(self.log_ratios.num_skipped, SWEEP)
            sums = message[: sums.numel()].view_as(sums)
        self.squares.merge(sums, (1 - 1 / num_steps) ** FORGETTING)
        if num_steps >= self.warmup and num_steps % self.refresh == 0:
            self.table.set(with_floor(self.learned_mass(), self.floor))

    def learned_mass(self) -> Tensor:
        """Return what the estimated gradients ask for, (K,), summing to 1."""
        root = self.moments().sqrt()
        return gated(root / root.sum(), self.gate)

    def moments(self) -> Tensor:
        """Return the estimated second moment of single gradients in each bin, (K,), in units of their mean."""
        moments = loss_moments(self.squares)
        relative = moments / moments.mean() * self.correction()
        return relative / relative.mean()

    def correction(self) -> Tensor:
        """Return the ratio of gradient to loss in each bin, (K,), about 1: what the loss alone misses."""
        num = self.log_ratios.num_seen[:-1].float().clamp(max=MAX_VALUES)  # (K,)
        log_ratio = torch.where(num > 0, self.log_ratios.total / self.log_ratios.weight.clamp(min=1e-30), 0.0)
        mean = (num * log_ratio).sum() / num.sum().clamp(min=1)
        centres = (torch.arange(self.num_bins, dtype=num.dtype, device=num.device) + 0.5) / self.num_bins
        kernel = (-((centres[:, None] - centres) / KERNEL_WIDTH).square() / 2).exp()  # (K, K)
        weight = kernel * num
        smooth = (weight @ (log_ratio - mean)) / (weight.sum(1) + PRIOR)
        limit = 2 * math.log(MAX_CORRECTION)  # of the squared size
        return smooth.clamp(-limit, limit).exp()

    def diagnostics(self) -> dict[str, Tensor]:
        """Return what the draws save (`noise_savings`), what probes cost, and how much was skipped."""
        warming_up = not self.steps.refreshed_since(first_sweep(self.warmup) + SWEEP, self.refresh)
        return {
            **noise_savings(self.mass(), self.moments(), self.num_shown, warming_up=warming_up),
            "probe_evaluations": self.num_probes,
            "skipped_losses": self.squares.num_skipped,
            "skipped_probes": self.log_ratios.num_skipped,
        }


def gradient_size(
    loss_at: LossAt, optimizer: torch.optim.Optimizer, rows: Tensor, t: Tensor, signs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the losses (N,) of rows at t, detached, and the squared size () of their gradient with these signs.

    The `loss_at` of the built-in trainer has this as a method of its own, which it can replay as a CUDA graph.
    """
    losses = differentiable(loss_at, rows, t)
    return losses.detach(), signed_size(losses, signs.to(losses), optimizer)


def signed_gradient(
    loss_at: LossAt, optimizer: torch.optim.Optimizer, rows: Tensor, t: Tensor, signs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the losses of this rank's rows, if any, and their gradient (P,) with these signs, scaled."""
    parameters, losses = trained_parameters(optimizer), t
    gradients: Sequence[Tensor] = [torch.zeros_like(p) for p in parameters]
    if len(rows):
        losses = differentiable(loss_at, rows, t)
        gradients = gradients_of((signs.to(losses) * losses).sum(), parameters)
    return losses.detach(), scaled_gradient(gradients, optimizer)


def differentiable(loss_at: LossAt, rows: Tensor, t: Tensor) -> Tensor:
    """Return the losses (N,) of rows at t; raise unless they can be differentiated."""
    losses = check_losses(loss_at(rows, t), rows)
    if not losses.requires_grad:
        raise ValueError("LeastNoise needs a differentiable loss_at: take it out of torch.no_grad()")
    return losses


def first_sweep(warmup: int) -> int:
    """Return the step at which the first sweep begins."""
    return FIRST_SWEEP * max(1, warmup)


def probe_number(step: int, warmup: int) -> int | None:
    """Return the number of the probe at this step, None if there is none."""
    first, second = first_sweep(warmup), SECOND_SWEEP * max(1, warmup)
    if step < first:
        return None
    sweep = (step // second).bit_length()
    start = second * 2 ** (sweep - 1) if sweep else first
    place = step - start
    return sweep * SWEEP + place if place < SWEEP else None
