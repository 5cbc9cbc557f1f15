"""Progress: following where the model learns, through a probe that costs about one forward pass in 40 steps."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kairostep.timesteps.arguments import below_one, choice, count, function, positive, positive_share, share
from kairostep.timesteps.distributed import rank, sum_over_ranks, world_size
from kairostep.timesteps.draw_table import TableSampler
from kairostep.timesteps.fixed import Uniform
from kairostep.timesteps.histogram import bin_index
from kairostep.timesteps.probes import Borrowed, eval_mode, evaluate_losses, isolated_randomness, model_of, probe_seed
from kairostep.timesteps.sampler import LARGEST, LossAt, Timesteps, TimestepSampler, learns_from_step

UNKNOWN = 2 * LARGEST  # stands for a loss that was not finite, or not measured yet
MAX_RELATIVE = 10.0  # progress of a bin in one window, either way: a loss that was 0 may rise without bound
NUM_BISECTIONS = 40  # to fit bounds: far below float32's resolution


class Progress(TableSampler):
    """Draws from prior * exp(progress / temperature): more where the loss of a fixed probe set has been falling.

    Every `every` steps the losses of `num_probes` rows at times spread over [0, 1) are measured with the same noise as
    ever, and their drop since the last time is the progress of each bin, smoothed over windows. Only its shape over
    bins counts: it is divided by its mean size. To be studied: no setting was found that beats uniform draws.

    prior: a sampler whose density, in `num_bins` bins, is the starting point; `Uniform()` unless given.
    num_probes: rows in the probe, all in one call of the network without gradient.
    every: steps between probes: with 64 of them, 40 cost at most two forward passes of a batch of 32 or more.
    probe: probe(rows, t) -> losses (N,) of rows (N,) of a set of `num_probes` rows that never changes, as `loss_at` is
        for the batch: `lambda rows, t: losses_at(x_fixed[rows], t)`. Costs num_probes network evaluations each time.
        Without it, the batch at hand is measured before and after one step by the loop's own `loss_at`: twice the cost
        and a weaker signal, since one step often makes a loss worse that forty make better.
    measure: "relative" to the bin's loss, "absolute", or "per_draw": absolute for as many draws as the bin gets.
    smoothing: share of the progress known so far that survives a window.
    floor, cap: bounds of density / prior.
    max_move: how far the logarithm of a bin's density moves in one window, at most, before all are scaled to sum to 1.
    beta: weights are 1/density to this power: 1 keeps the objective, 0 moves it to where the draws go.
    relax_steps: back to the prior between half of these steps and all of them, and no more probes then.
    model: put into eval mode while probing. Copies and pickles of the sampler leave it behind; see `set_model`.
    """

    prior: Tensor  # (K,)
    learned: Tensor  # (K,) the mass before relaxing
    progress: Tensor  # (K,)
    num_measured: Tensor  # (K,) windows
    last: Tensor  # (N,) losses at the last probe of the fixed set, UNKNOWN before the first
    num_skipped: Tensor  # () losses that were not finite
    num_evaluations: Tensor  # () of the network, over all ranks

    def __init__(
        self,
        prior: TimestepSampler | None = None,
        *,
        probe: LossAt | None = None,
        num_bins: int = 20,
        num_probes: int = 64,
        every: int = 40,
        measure: str = "relative",
        temperature: float = 4.0,
        smoothing: float = 0.9,
        floor: float = 0.5,
        cap: float = 2.0,
        max_move: float = 0.1,
        beta: float = 1.0,
        relax_steps: int | None = None,
        model: nn.Module | None = None,
        stratified: bool = True,
        seed: int = 0,
    ) -> None:
        count("num_probes", num_probes, at_least=count("num_bins", num_bins))
        super().__init__(num_bins, beta=share("beta", beta), stratified=stratified, seed=seed)
        self.probe = None if probe is None else function("probe", probe, "lambda rows, t: losses_at(x_fixed[rows], t)")
        self.uses_loss_at = probe is None
        self.set_model(model)
        self.every = count("every", every)
        self.measure = choice("measure", measure, ("relative", "absolute", "per_draw"))
        self.temperature = positive("temperature", temperature)
        self.smoothing = below_one("smoothing", smoothing)
        self.floor = positive_share("floor", floor)
        if not 1 <= cap < float("inf"):
            raise ValueError(f"cap must be a finite number of at least 1, got {cap}: pass for instance cap=2.0")
        self.cap = positive("cap", cap)
        self.max_move = positive("max_move", max_move)
        self.relax_steps = None if relax_steps is None else count("relax_steps", relax_steps)
        self.num_ranks = 0  # that measured `last`; on the host, so that comparing costs no sync
        if prior is not None and not isinstance(prior, TimestepSampler):
            raise ValueError(f"prior must be a sampler, got {prior!r}: pass for instance ks.Uniform()")
        density = (prior or Uniform()).density(num_bins)
        if not bool((density > 0).all()):
            raise ValueError(
                f"the prior must draw from every one of {num_bins} bins, got {density}: pass fewer bins or ks.Uniform()"
            )
        self.register_buffer("prior", density.float(), persistent=False)
        self.register_buffer("learned", self.prior.clone())
        self.register_buffer("progress", torch.zeros(num_bins, dtype=torch.float32))
        self.register_buffer("num_measured", torch.zeros(num_bins, dtype=torch.int64))
        self.register_buffer("last", torch.full((num_probes,), UNKNOWN, dtype=torch.float32))
        self.register_buffer("num_skipped", torch.tensor(0))
        self.register_buffer("num_evaluations", torch.tensor(0))
        self.table.set(self.learned)

    def set_model(self, model: nn.Module | None) -> None:
        """Name the model to hold in eval mode while probing, as `model=` does: after a copy, which has none."""
        self.model = Borrowed(model)

    @learns_from_step
    def observe(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None) -> Iterator[None]:
        """Probe if it is time, and move the density toward where the losses fell."""
        num_steps = self.steps.advance()
        done = self.relax_steps is not None and num_steps >= self.relax_steps
        if done or (num_steps - 1) % self.every:
            yield
        elif self.probe is not None:
            yield
            after = self.evaluate(self.probe, len(self.last), len(x0))
            if self.num_ranks != world_size():  # each rank has noise of its own: that before was another
                self.last.fill_(UNKNOWN)
                self.num_ranks = world_size()
            self.learn(self.last.clone(), after)
            self.last.copy_(after)
        else:
            assert loss_at is not None  # `learns_from_step` checked it
            num_rows = len(x0) * world_size()
            before = self.evaluate(loss_at, num_rows, len(x0))
            yield
            self.learn(before, self.evaluate(loss_at, num_rows, len(x0)))
        if num_steps == self.relax_steps or (num_steps - 1) % self.every == 0:
            self.table.set(torch.lerp(self.learned, self.prior, self.share_relaxed(num_steps)))

    def share_relaxed(self, num_steps: int) -> float:
        """Return how much of the density is the prior again after so many steps."""
        return 0.0 if self.relax_steps is None else min(1.0, max(0.0, 2 * num_steps / self.relax_steps - 1))

    def evaluate(self, loss_at: LossAt, num_rows: int, batch_size: int) -> Tensor:
        """Return the losses (N,) at N times spread evenly, of rows spread over `num_rows` on all ranks.

        Each rank looks at its part of the times.
        """
        num_probes, device = len(self.last), self.last.device
        start, end = (part * num_probes // world_size() for part in (rank(), rank() + 1))
        mine = torch.arange(start, end, device=device)
        rows = mine * num_rows // num_probes
        if loss_at is not self.probe:
            rows = (rows - rank() * batch_size).clamp(0, batch_size - 1)  # those of this rank's batch
        seed = probe_seed(self.steps.seed, 0)  # the noise of ever
        with eval_mode(model_of(self.model)), isolated_randomness(device, seed):
            losses = evaluate_losses(loss_at, rows, self.probe_t()[mine], max_rows=num_probes).float()
        losses = torch.where(losses.abs() < LARGEST, losses, UNKNOWN)
        self.num_evaluations += num_probes
        return sum_over_ranks(torch.zeros_like(self.last).index_copy(0, mine, losses))

    def probe_t(self) -> Tensor:
        """Return the times of the probes (N,)."""
        return (torch.arange(len(self.last), dtype=torch.float32, device=self.last.device) + 0.5) / len(self.last)

    @torch.no_grad()
    def learn(self, before: Tensor, after: Tensor) -> None:
        """Move the density by what the losses (N,) did; those that are not finite are left out."""
        valid = (before < LARGEST) & (after < LARGEST)
        self.num_skipped += (after >= LARGEST).sum()
        seen = torch.stack([before - after, before, torch.ones_like(after)]).where(valid, 0.0)
        index = bin_index(self.probe_t(), len(self.learned))
        drop, loss, num = seen.new_zeros(3, len(self.learned)).index_add(1, index, seen)
        new = self.measured(drop / num.clamp(min=1), loss / num.clamp(min=1))
        keep = self.smoothing * (self.num_measured > 0).float()
        self.progress.copy_(torch.where(num > 0, torch.lerp(new, self.progress, keep), self.progress))
        self.num_measured += num > 0
        self.learned.copy_(torch.where((num > 0).any(), self.moved(), self.learned))

    def measured(self, drop: Tensor, loss: Tensor) -> Tensor:
        """Return the progress of one window (K,) from mean drops and losses of the bins."""
        if self.measure == "relative":
            return (drop / loss.abs().clamp(min=1e-30)).clamp(-MAX_RELATIVE, MAX_RELATIVE)
        return drop if self.measure == "absolute" else drop / self.mass()

    def moved(self) -> Tensor:
        """Return the mass (K,) one move further toward prior * exp(progress / temperature), within its bounds."""
        shape = self.progress / self.progress.abs().mean().clamp(min=1e-30)
        target = self.prior.log() + shape / self.temperature
        target = target - target.logsumexp(0)
        here = self.learned.log()
        wanted = here + (target - here).clamp(-self.max_move, self.max_move)
        return self.prior * bounded((wanted - self.prior.log()).exp(), self.prior, self.floor, self.cap)

    def get_extra_state(self) -> Tensor:
        """Return on how many ranks the probe set was measured."""
        return torch.tensor(self.num_ranks)

    def set_extra_state(self, state: Tensor) -> None:
        """Take up on how many ranks the probe set was measured."""
        self.num_ranks = int(state)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the network evaluations spent on probes, and how many losses were not finite."""
        return {"probe_evaluations": self.num_evaluations, "skipped_probes": self.num_skipped}


def bounded(ratio: Tensor, prior: Tensor, floor: float, cap: float) -> Tensor:
    """Return ratio (K,) scaled by one factor and cut to [floor, cap], so that its mean under the prior (K,) is 1."""
    low, high = floor / ratio.max(), cap / ratio.min()  # all at the floor, all at the cap
    for _ in range(NUM_BISECTIONS):
        factor = (low * high).sqrt()
        over = (prior * (factor * ratio).clamp(floor, cap)).sum() > 1
        low, high = torch.where(over, low, factor), torch.where(over, factor, high)
    return ((low * high).sqrt() * ratio).clamp(floor, cap)
