"""The adaptive sampler of Kim et al., CVPR 2025: a policy over t, paid for the loss that each step took away.

docs/method.md walks through the equations, each with the line that implements it.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kairostep.timesteps.arguments import below_one, choice, count, nonnegative
from kairostep.timesteps.distributed import gather_over_ranks, rank, sum_over_ranks, world_size
from kairostep.timesteps.draws import Draws, random_bits
from kairostep.timesteps.fixed import UNBIASED_FLOOR
from kairostep.timesteps.policy import Beta, BetaPair, BetaPolicy, PolicyOptimizer
from kairostep.timesteps.probes import Borrowed, eval_mode, evaluate_losses, isolated_randomness, model_of, probe_seed
from kairostep.timesteps.sampler import LARGEST, LossAt, StepCount, Timesteps, TimestepSampler, learns_from_step
from kairostep.timesteps.selection import DropQueue, SelectionRule, f_statistic

NUM_REMEMBERED = 256  # rows of the latest probed batch that `density()` averages over
BASELINE_DECAY = 0.9  # of the running mean that credit="batch" compares with
DEFAULT_FLOOR = 0.5  # less harms the squared error: results/adaptive_digits
DEFAULT_REWARD_ROWS = 64
DEFAULT_SWEEP = 128  # selects as well as all 1000 do: results/selection_quality


@dataclass(frozen=True, slots=True)
class Probe:
    """Where to evaluate the loss before and after a step: first the sweep, then the paid rows at each selected time."""

    rows: Tensor  # (n + |S| R,) of the batch
    t: Tensor  # (n + |S| R,)
    paid: Tensor  # (R,) the rows that are rewarded
    swept: Tensor  # (n,) this rank's positions in the sweep


class Adaptive(TimestepSampler):
    """Learns where a training step lowers the objective most, by REINFORCE on Beta(a, b) = policy(x0).

    Every `every` steps it measures, before and after the optimizer's step and with the same noise, the loss of rows of
    the batch at `num_selected` timesteps, and a sweep over timesteps that decides which ones those are. That costs
    2 (num_selected * reward_rows + sweep) network evaluations: 5 forward passes of a batch of 128 with the defaults.

    policy: BetaPolicy.for_input(x0.shape[1:]), or BetaPair(), which ignores x0.
    reward_weight: a function of t that turns the loss into the objective that counts; None takes the loss itself. The
        paper's is process.vlb_weight, for an unweighted epsilon loss; for any other prediction or weighting the same
        is objective.reweighting(ks.vlb(process)).
    num_steps: T; a continuous process is read in as many steps.
    sweep: timesteps in the sweep, 128 of them unless given; num_steps is the paper's.
    sweep_x0: rows that share the sweep, one per rank unless given, so that ranks share its cost; the paper has one.
    reward_rows: rows of the batch, over all ranks, that are rewarded, 64 unless given; the paper rewards all.
    rule: scores timesteps by how well they explain the whole; see `SelectionRule`.
    credit: "sample" pays each draw for the drop on its own row, standardised within the batch; "batch" pays all draws
        for the mean drop, compared with a running mean: slower, but it also sees what a step does for other rows, and
        with one row per batch it alone can learn.
    floor: share of uniform draws, 0.5 unless given: no density falls under floor times uniform, and no part of [0, 1]
        gets more than 1 - floor of all draws beyond its uniform share of the rest.
    standardised: False pays the reward as it is, as the paper writes it: no mean taken off, no division by the spread.
    model: put into eval mode while probing; without it, probes share dropout masks before and after the step, and
        layers that keep statistics in train mode, such as BatchNorm, count them too. Copies and pickles of the sampler
        leave it behind and warn when they probe: name it again by `set_model`.
    as_published: what the released code does where it differs from the paper, for comparison: fresh noise in train
        mode, rewards summed in bits, no baseline, undetached entropy, round(u (T - 1)), all T swept, no floor, and the
        policy's `use_released_map`, softplus, where it has one. Its hidden layers had 256 units.
    unbiased: weight by 1/density.
    stratified: True unless credit is "batch", where strata would hide from the reward what the policy did.

    Keep autocast inside `loss_at`, so that probes run as training does, and draw its noise from torch's global
    generators, which probes fix and put back. With gradient accumulation, observe the last micro-batch.
    `time_probes = True` adds the seconds spent to the diagnostics and makes the host wait for the device.
    """

    uses_loss_at = True
    latest: Tensor  # (NUM_REMEMBERED, 2) a and b for rows of the latest probed batch
    reward: Tensor  # (2,) mean and spread of the latest rewards
    baseline: Tensor  # (2,) running mean and mean square of the batch's mean reward
    num_skipped: Tensor  # () rewards, sweeps and gradients that were not finite
    num_probes: Tensor  # () network evaluations, over all ranks

    def __init__(
        self,
        policy: nn.Module,
        reward_weight: Callable[[Tensor], Tensor] | None = None,
        *,
        num_steps: int = 1000,
        every: int = 40,
        sweep: int | None = None,
        sweep_x0: int | None = None,
        queue_size: int = 20,
        num_selected: int = 3,
        reward_rows: int | None = None,
        rule: SelectionRule = f_statistic,
        credit: str = "sample",
        entropy: float = 1e-2,
        learning_rate: float = 1e-2,
        floor: float | None = None,
        standardised: bool = True,
        model: nn.Module | None = None,
        as_published: bool = False,
        unbiased: bool = False,
        stratified: bool | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(policy, nn.Module):
            raise ValueError(f"policy must be a Module, got {policy!r}: pass BetaPolicy.for_input(x0.shape[1:])")
        count("num_steps", num_steps, at_least=2)
        count("num_selected", num_selected)
        count("queue_size", queue_size, at_least=3)
        if as_published and (floor, sweep, reward_rows, credit, unbiased) != (None, None, None, "sample", False):
            raise ValueError("as_published fixes floor, sweep, reward_rows, credit and unbiased: leave them out")
        if sweep is None:
            sweep = num_steps if as_published else min(num_steps, DEFAULT_SWEEP)
        self.uses_x0 = not isinstance(policy, BetaPair)
        self.policy, self.reward_weight = policy, reward_weight or torch.ones_like
        self.num_steps, self.every = num_steps, count("every", every)
        self.sweep_x0 = None if sweep_x0 is None else count("sweep_x0", sweep_x0)  # None: one per rank
        self.reward_rows = DEFAULT_REWARD_ROWS if reward_rows is None else count("reward_rows", reward_rows)
        self.credit = choice("credit", credit, ("sample", "batch"))
        self.entropy = nonnegative("entropy", entropy)
        floor = DEFAULT_FLOOR if floor is None else below_one("floor", floor)
        self.floor = 0.0 if as_published else max(floor, UNBIASED_FLOOR if unbiased else 0.0)
        self.set_model(model)
        self.as_published, self.unbiased, self.time_probes = as_published, unbiased, False
        self.standardised = standardised and not as_published
        self.steps, self.probe_seconds = StepCount(seed), 0.0
        if stratified and credit == "batch":
            raise ValueError('credit="batch" needs independent draws, got stratified=True: leave `stratified` out')
        independent = as_published or credit == "batch"
        self.draws = Draws(seed, stratified=not independent if stratified is None else stratified)
        self.queue = DropQueue(num_steps, sweep, queue_size, num_selected, rule=rule, min_rows=2 if as_published else 3)
        self.check_reward_weight()
        if as_published:
            self.queue.selected.copy_(torch.arange(num_selected))
            if isinstance(policy, BetaPolicy | BetaPair):
                policy.use_released_map()
        learning_rate = nonnegative("learning_rate", learning_rate)
        self.optimizer = PolicyOptimizer(policy, learning_rate, per_input=not as_published)
        self.register_buffer("latest", torch.ones(NUM_REMEMBERED, 2, dtype=torch.float32))
        self.register_buffer("reward", torch.zeros(2, dtype=torch.float32))
        self.register_buffer("baseline", torch.zeros(2, dtype=torch.float32))
        self.register_buffer("num_skipped", torch.tensor(0))
        self.register_buffer("num_probes", torch.tensor(0))

    def check_reward_weight(self) -> None:
        """Raise unless the reward's weight is a finite function of t."""
        try:
            weight = self.reward_weight(self.queue.step_t)
            finite = weight.shape == self.queue.step_t.shape and bool(weight.isfinite().all())
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"reward_weight must take t (N,) and return (N,), got {self.reward_weight!r}: pass process.vlb_weight "
                "for an unweighted epsilon loss, objective.reweighting(ks.vlb(process)) for any other"
            ) from error
        if not finite:
            raise ValueError(f"reward_weight must be finite for every t, got {weight}: bound it or leave it out")

    def set_model(self, model: nn.Module | None) -> None:
        """Name the model to hold in eval mode while probing, as `model=` does: after a copy, which has none."""
        self.model = Borrowed(model)

    def distribution(self, x0: Tensor) -> Beta:
        """Return the policy's Beta(a, b) for each row of x0, in float32 or better whatever the policy computes in."""
        beta: Beta = self.policy(x0)
        return Beta(*(value.to(torch.promote_types(value.dtype, torch.float32)) for value in (beta.a, beta.b)))

    # Algorithm 1: drawing

    def sample(self, x0: Tensor) -> Timesteps:
        """Return one time and one weight for each row of x0 (B, ...)."""
        self._count_draw()
        with torch.no_grad():
            return self._draw(x0)

    def _draw(self, x0: Tensor) -> Timesteps:
        v = self.draws(x0)
        beta = self.distribution(x0)
        learned = beta.quantile(((v - self.floor) / (1 - self.floor)).clamp(min=2**-25).to(beta.a.dtype)).to(v.dtype)
        u = torch.where(v < self.floor, v / max(self.floor, 2**-25), learned) if self.floor else learned
        weight = (-self.log_prob(beta, u)).exp().to(v.dtype) if self.unbiased else torch.ones_like(u)
        return Timesteps(self.to_t(u), weight)

    def log_prob(self, beta: Beta, u: Tensor) -> Tensor:
        """Return the log-density of the policy with its floor at u (B,)."""
        log_prob = beta.log_prob(u.to(beta.a.dtype))
        if not self.floor:
            return log_prob
        return torch.logaddexp(log_prob + math.log1p(-self.floor), torch.full_like(log_prob, math.log(self.floor)))

    def to_t(self, u: Tensor) -> Tensor:
        """Return t for the policy's u; as published, so that floor(t T) is round(u (T - 1))."""
        return (u * (self.num_steps - 1) + 0.5) / self.num_steps if self.as_published else u

    def to_u(self, t: Tensor) -> Tensor:
        """Return the policy's u for t, the inverse of `to_t`."""
        return (t * self.num_steps - 0.5) / (self.num_steps - 1) if self.as_published else t

    # Algorithm 2: what a step was worth

    @learns_from_step
    def observe(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None) -> Iterator[None]:
        """Measure the loss before and after the optimizer's step if it is time, and learn from the difference."""
        update, rest = divmod(self.steps.advance() - 1, self.every)
        if rest:
            yield
            return
        assert loss_at is not None  # `learns_from_step` checked it
        probe = self.plan(x0, update)
        before = self.evaluate(probe, loss_at, len(x0), noise=2 * update)
        yield
        after = self.evaluate(probe, loss_at, len(x0), noise=2 * update + self.as_published)
        self.learn(x0, drawn, probe, (before - after).float(), update)

    def plan(self, x0: Tensor, update: int) -> Probe:
        """Return what this rank evaluates: its share of the sweep, and the paid ones of its rows at S.

        The sweep's timesteps are dealt out to `sweep_x0` rows, one from each equal part of the batch over all ranks.
        """
        num_rows, num_selected, num_swept = len(x0), len(self.queue.selected), len(self.queue.sweep_t)
        sweep_x0 = self.sweep_x0 or world_size()
        num_local, rest = divmod(sweep_x0, world_size())
        if rest:
            raise ValueError(f"sweep_x0 must be a multiple of the {world_size()} ranks, got {sweep_x0}: leave it out")
        bits = random_bits(~self.draws.key, torch.full_like(self.draws.key, update), sweep_x0)
        part, first = torch.arange(num_local, device=x0.device), rank() * num_local
        here = bits[first + part] & 0x7FFFFFFF
        row = ((part << 31) + here) * num_rows // (num_local << 31)  # (num_local,)
        starts = [min(first + k, num_swept) for k in range(num_local)]  # more x0 than timesteps: nothing left for some
        swept = [torch.arange(start, num_swept, sweep_x0, device=x0.device) for start in starts]
        sweep_rows = torch.cat([row[k].expand_as(positions) for k, positions in enumerate(swept)])
        num_paid = len(x0) if self.as_published else min(num_rows, -(-self.reward_rows // world_size()))
        paid = torch.arange(num_paid, device=x0.device) * num_rows // num_paid  # (R,)
        selected_t = self.queue.sweep_t[self.queue.selected].repeat_interleave(num_paid)
        return Probe(
            rows=torch.cat([sweep_rows, paid.repeat(num_selected)]),
            t=torch.cat([self.queue.sweep_t[torch.cat(swept)], selected_t]),
            paid=paid,
            swept=torch.cat(swept),
        )

    def evaluate(self, probe: Probe, loss_at: LossAt, num_rows: int, noise: int) -> Tensor:
        """Return the losses at the probe; the number `noise` fixes noise and dropout.

        Four batches go into one call: without a graph they need less memory than one in training, and on a GPU few
        large calls cost less than many small ones.
        """
        device = probe.t.device
        start = self.seconds_now(device)
        model = None if self.as_published else model_of(self.model)
        with eval_mode(model), isolated_randomness(device, probe_seed(self.steps.seed, noise)):
            losses = evaluate_losses(loss_at, probe.rows, probe.t, max_rows=4 * num_rows)
        self.probe_seconds += self.seconds_now(device) - start
        return losses

    def seconds_now(self, device: torch.device) -> float:
        """Return the time once the device is idle, or 0 unless probes are timed."""
        if not self.time_probes:
            return 0.0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def learn(self, x0: Tensor, drawn: Timesteps, probe: Probe, drop: Tensor, update: int) -> None:
        """Queue the sweep's drops, choose S for the next update, and move the policy by the batch's rewards."""
        num_swept = len(probe.swept)
        swept = sum_over_ranks(torch.zeros_like(self.queue.sweep_t).index_copy(0, probe.swept, drop[:num_swept]))
        pushed = self.queue.push(swept, self.reward_weight(self.queue.step_t), update % len(self.queue.drops))
        weighted = drop[num_swept:] * self.reward_weight(probe.t[num_swept:])
        rewards = weighted.view(-1, len(probe.paid)).mean(0)  # (R,), Eq. 14
        if self.as_published:
            rewards = rewards * (len(self.queue.selected) / math.log(2))  # the sum over S, in bits
        valid = rewards.abs() < LARGEST
        advantages = self.advantages(torch.where(valid, rewards, 0.0), valid.float())
        gradient = self.policy_gradient(x0[probe.paid], drawn.t[probe.paid], advantages)
        stepped = self.optimizer.step(self.policy, gradient, usable=sum_over_ranks(valid.sum()) > 0)
        num_evaluated = torch.full_like(self.num_probes, 2 * len(drop))
        counts = sum_over_ranks(torch.stack([(~valid).sum(), num_evaluated]))
        self.num_skipped += counts[0] + ~pushed + ~stepped
        self.num_probes += counts[1]
        self.remember(x0)

    def advantages(self, rewards: Tensor, valid: Tensor) -> Tensor:
        """Return what each draw is paid (R,): 0 where its reward is not valid (0 or 1), or all rewards are alike."""
        count_, total = sum_over_ranks(torch.stack([valid.sum(), rewards.sum()]))
        mean = total / count_.clamp(min=1)
        around = (rewards - mean) * valid
        spread = (sum_over_ranks(around.square().sum()) / count_.clamp(min=1)).sqrt()
        self.reward.copy_(torch.stack([mean, spread]))
        if not self.standardised:
            return rewards if self.credit == "sample" else mean * valid
        if self.credit == "sample":
            return torch.where(spread > 0, around / spread, 0.0)
        first = self.optimizer.num_updates == 0
        expected = torch.where(first, mean, self.baseline[0])
        surprise = mean - expected
        variance = torch.lerp(surprise.square(), self.baseline[1], BASELINE_DECAY)
        baseline = torch.stack([torch.lerp(mean, expected, BASELINE_DECAY), variance])
        self.baseline.copy_(torch.where(count_ > 0, baseline, self.baseline))
        return torch.where(variance > 0, surprise / variance.sqrt(), 0.0) * valid

    def policy_gradient(self, x0: Tensor, t: Tensor, advantages: Tensor) -> Tensor:
        """Return the gradient (P,) of the policy's loss over the batches of all ranks (Eq. 13, Algorithm 1 line 8)."""
        num_rows = sum_over_ranks(torch.ones_like(advantages).sum())
        with torch.enable_grad():
            beta = self.distribution(x0)
            log_prob = self.log_prob(beta, self.to_u(t))
            if self.as_published:
                objective = log_prob * (advantages + self.entropy * beta.entropy())
            else:
                objective = log_prob * advantages + self.entropy * beta.entropy_with_exact_slope()
            loss = -objective.sum() / num_rows
        gradients = torch.autograd.grad(loss, list(self.policy.parameters()), materialize_grads=True)
        return sum_over_ranks(torch.cat([g.flatten().float() for g in gradients]))

    @torch.no_grad()
    def remember(self, x0: Tensor) -> None:
        """Keep a and b for rows of this batch, the same number from each rank, as `density()` averages over them."""
        num_local = -(-NUM_REMEMBERED // world_size())
        beta = self.distribution(x0)
        row = torch.arange(num_local, device=x0.device) * len(x0) // num_local
        latest = gather_over_ranks(torch.stack([beta.a, beta.b], dim=1)[row].float())
        self.latest.copy_(latest.flatten(0, 1)[:NUM_REMEMBERED])

    # What can be asked

    def density(self, num_bins: int = 100) -> Tensor:
        """Return where the draws go now, over the rows of the latest probed batch: (num_bins,), summing to 1."""
        edges = torch.arange(1, num_bins, dtype=torch.float32, device=self.latest.device) / num_bins
        learned = Beta(*self.latest.unbind(1)).cdf(self.to_u(edges).clamp(0, 1)).mean(0)  # (num_bins - 1,)
        cdf = (1 - self.floor) * learned + self.floor * edges
        return nn.functional.pad(nn.functional.pad(cdf, (1, 0)), (0, 1), value=1.0).diff().clamp(min=0)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the policy's a, b and entropy, the selected times, the latest rewards, and what probing cost."""
        beta = Beta(*self.latest.unbind(1))
        values = {
            "a_mean": beta.a.mean(),
            "a_std": beta.a.std(),
            "b_mean": beta.b.mean(),
            "b_std": beta.b.std(),
            "entropy": beta.entropy().mean(),
            "reward_mean": self.reward[0],
            "reward_std": self.reward[1],
            "skipped_rewards": self.num_skipped,
            "probe_evaluations": self.num_probes,
        }
        selected_t = self.queue.sweep_t[self.queue.selected]
        values |= {f"selected_t_{i}": t for i, t in enumerate(selected_t.unbind())}
        seconds = torch.tensor(self.probe_seconds, dtype=torch.float32)
        return values | ({"probe_seconds": seconds} if self.time_probes else {})
