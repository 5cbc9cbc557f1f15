"""The adaptive sampler of Kim et al., CVPR 2025: a policy over t, rewarded for the loss that each step removes.

docs/method.md walks through the equations, each with the line that implements it.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Never, Self

import torch
from torch import Tensor, nn

from kairostep.checks import below_one, choice, count, nonnegative
from kairostep.ranks import place_spread_rows, world_size
from kairostep.registry import samplers
from kairostep.timesteps.context import SamplerContext
from kairostep.timesteps.draws import Draws
from kairostep.timesteps.policy import Beta, ConstantBeta, check_policy, hidden_units, make_policy
from kairostep.timesteps.probe_plan import Probe, Probing, check_probing, plan_probe
from kairostep.timesteps.probes import (
    Borrowed,
    eval_mode,
    evaluate_losses,
    model_of,
    probe_randomness,
    seconds_when_idle,
)
from kairostep.timesteps.published import Published
from kairostep.timesteps.reading import Reading
from kairostep.timesteps.reinforce import (
    Findings,
    PolicyOptimizer,
    check_reward_weight,
    gather_findings,
    keep_finite,
    payment,
    policy_slopes,
)
from kairostep.timesteps.sampler import LossAt, Timesteps, TimestepSampler, learns_from_step
from kairostep.timesteps.selection import DropQueue
from kairostep.timesteps.step_count import StepCount

NUM_REMEMBERED = 256  # rows of the latest probed batch that `density()` averages over
DEFAULT_PROBING = Probing()


@samplers.register("adaptive")
class Adaptive(TimestepSampler):
    """Learns where a training step lowers the objective most (Kim et al. 2025).

    A policy maps x0 to Beta(a, b), and REINFORCE trains it. Every 40 steps it measures, before and after the step and
    with the same noise, the loss of rows of the batch at three timesteps. A sweep over timesteps decides which three.
    With the defaults that costs 5 forward passes of a batch of 128; `Probing` has the options.

    Keep autocast inside `loss_at`, so that probes run as training does, and draw its noise from torch's global
    generators, which probes fix and put back. With gradient accumulation, observe the last micro-batch. Under DDP let
    `loss_at` call the bare `model.module`: a rank is asked for the probed rows that it has, which may be none.
    `time_probes = True` adds the seconds spent to the diagnostics and makes the host wait for the device.

    Args:
        policy: BetaPolicy.for_input(x0.shape[1:]), or ConstantBeta(), which ignores x0.
        reward_weight: A function of t that turns the loss into the objective that counts. None takes the loss itself.
            The paper's is process.vlb_weight, for an unweighted epsilon loss; for any other prediction or weighting
            the same is objective.reweighting(ks.vlb(process)).
        num_steps: T. A continuous process is read in as many steps.
        probing: How often and where the loss is measured, and how draws are paid for it.
        entropy: Coefficient of the entropy bonus.
        learning_rate: Of the policy.
        model: Held in eval mode while probing. Without it, probes share dropout masks before and after the step, and
            layers that keep statistics in train mode, such as BatchNorm, count them too. Copies and pickles of the
            sampler leave it behind and warn when they probe: name it again by `set_model`.
        as_published: Do what the released code does where it differs from the paper, for comparison: fresh noise in
            train mode, rewards summed in bits, no baseline, undetached entropy, round(u (T - 1)), all T swept, no
            floor, and the policy's `use_released_map`, softplus, where it has one. Its hidden layers had 256 units.
        floor: Share of uniform draws, 0.5 by default: density >= floor x uniform, and at most 1 - floor of the draws
            follow the policy.
        unbiased: Weight by 1/density.
        stratified: Default: True, but with credit="batch", where strata would hide from the reward what the policy did.
        seed: Of draws and probes.
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
        probing: Probing = DEFAULT_PROBING,
        entropy: float = 1e-2,
        learning_rate: float = 1e-2,
        model: nn.Module | None = None,
        as_published: bool = False,
        floor: float | None = None,  # this and what follows, as with other samplers
        unbiased: bool = False,
        stratified: bool | None = None,
        seed: int = 0,
        **moved: Never,
    ) -> None:
        super().__init__()
        check_policy(policy)
        check_probing(probing, moved)
        self.reading = Published() if as_published else Reading()
        self.reading.check(floor, probing, unbiased=unbiased)
        self.uses_x0 = not isinstance(policy, ConstantBeta)
        self.policy, self.reward_weight = policy, reward_weight or torch.ones_like
        self.num_steps, self.probing = count("num_steps", num_steps, at_least=2, at_most=10**7, example=1000), probing
        self.entropy = nonnegative("entropy", entropy)
        floor = None if floor is None else below_one("floor", floor, example=0.1)
        self.floor = self.reading.floor(floor, unbiased=unbiased)
        self.set_model(model)
        self.as_published, self.unbiased, self.time_probes = as_published, unbiased, False
        self.standardised = probing.standardised and self.reading.standardised
        self.steps, self.probe_seconds = StepCount(seed), 0.0
        self.draws = Draws(seed, stratified=self.reading.stratifies(stratified, probing.credit))
        sizes = (num_steps, self.reading.sweep(probing.sweep, num_steps), probing.queue_size, probing.num_selected)
        self.queue = DropQueue(*sizes, rule=probing.rule, min_rows=self.reading.min_rows)
        check_reward_weight(self.reward_weight, self.queue.step_t)
        self.reading.prepare(policy, self.queue)
        learning_rate = nonnegative("learning_rate", learning_rate, example=2e-4)
        self.optimizer = PolicyOptimizer(policy, learning_rate, per_input=self.reading.rates_per_input)
        self.register_records()

    @classmethod
    def from_experiment(
        cls,
        experiment: SamplerContext,
        *,
        policy: str = "network",  # or "pair", which ignores x0
        reward: str = "vlb",  # or "loss", the objective that is trained
        hidden: int | None = None,  # 128, as published 256
        depth: int = 2,
        bounded: bool = True,  # a and b within 1/50..50; else the released softplus, as with as_published
        num_steps: int | None = None,  # as many as the process has, or 1000
        as_published: bool = False,
        **options: Any,
    ) -> Self:
        """Return the paper's sampler; its policy sees x0 unless it is a pair, and is paid by the bound or the loss."""
        choice("sampler.reward", reward, ("vlb", "loss"))
        hidden = hidden_units(as_published) if hidden is None else hidden
        return cls(
            make_policy(policy, experiment.shape, hidden, depth, bounded=bounded, seed=experiment.seed),
            experiment.objective.bound_reweighting() if reward == "vlb" else None,
            num_steps=getattr(experiment.process, "num_steps", 1000) if num_steps is None else num_steps,
            model=experiment.model,
            as_published=as_published,
            seed=experiment.seed,
            **options,
        )

    @classmethod
    def complete_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Fill in the width of the policy, which `as_published` decides."""
        hidden = options.get("hidden") or hidden_units(str(options["as_published"]).lower() == "true")
        return {**options, "hidden": hidden}

    def register_records(self) -> None:
        """Register the buffers that are kept from one probe to the next."""
        self.register_buffer("latest", torch.ones(NUM_REMEMBERED, 2, dtype=torch.float32))
        self.register_buffer("reward", torch.zeros(2, dtype=torch.float32))
        self.register_buffer("baseline", torch.zeros(2, dtype=torch.float32))
        self.register_buffer("num_skipped", torch.tensor(0))
        self.register_buffer("num_probes", torch.tensor(0))

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
        with torch.no_grad():
            drawn = self._draw(x0)
        self._count_draw(x0)
        return drawn

    def _draw(self, x0: Tensor) -> Timesteps:
        v, beta = self.draws(x0), self.distribution(x0)
        learned = beta.quantile(((v - self.floor) / (1 - self.floor)).clamp(min=2**-25).to(beta.a.dtype)).to(v.dtype)
        u = torch.where(v < self.floor, v / max(self.floor, 2**-25), learned) if self.floor else learned
        weight = (-self.log_prob(beta, u)).exp().to(v.dtype) if self.unbiased else torch.ones_like(u)
        return Timesteps(self.reading.to_t(u, self.num_steps), weight)

    def log_prob(self, beta: Beta, u: Tensor) -> Tensor:
        """Return the log-density of the policy with its floor at u (B,)."""
        log_prob = beta.log_prob(u.to(beta.a.dtype))
        if not self.floor:
            return log_prob
        return torch.logaddexp(log_prob + math.log1p(-self.floor), torch.full_like(log_prob, math.log(self.floor)))

    # Algorithm 2: what a step was worth
    @learns_from_step
    def observe(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None) -> Iterator[None]:
        """Measure the loss before and after the optimizer's step if it is time, and learn from the difference."""
        update, rest = divmod(self.steps.advance() - 1, self.probing.every)
        if rest:
            yield
            return
        assert loss_at is not None  # `learns_from_step` checked it
        probe = self.plan(x0, update)
        before = self.evaluate(probe, loss_at, len(x0), self.reading.noise(update, after=False))
        yield
        after = self.evaluate(probe, loss_at, len(x0), self.reading.noise(update, after=True))
        self.learn(x0, drawn, probe, (before - after).float(), update)

    def plan(self, x0: Tensor, update: int) -> Probe:
        """Return what this rank evaluates at this update."""
        num_paid = self.reading.num_paid(self.probing.reward_rows, len(x0) * world_size())
        return plan_probe(self.queue, len(x0), num_paid, self.probing.sweep_x0 or 1, self.steps.seed, update)

    def evaluate(self, probe: Probe, loss_at: LossAt, num_rows: int, noise: int) -> Tensor:
        """Return the losses at the probe's rows, if any; the number `noise` fixes noise and dropout.

        Four batches go into one call: without a graph they need less memory than one in training, and on a GPU few
        large calls cost less than many small ones.
        """
        device = probe.t.device
        if len(probe.rows) == 0:
            return torch.empty_like(probe.t)
        start = seconds_when_idle(device) if self.time_probes else 0.0
        model = model_of(self.model) if self.reading.eval_mode else None
        with eval_mode(model), probe_randomness(device, self.steps.seed, noise):
            losses = evaluate_losses(loss_at, probe.rows, probe.t, max_rows=4 * num_rows)
        self.probe_seconds += seconds_when_idle(device) - start if self.time_probes else 0.0
        return losses

    def learn(self, x0: Tensor, drawn: Timesteps, probe: Probe, drop: Tensor, update: int) -> None:
        """Queue the sweep's drops, choose S for the next update, and move the policy by the batch's rewards."""
        num_swept = len(probe.swept)
        swept = torch.zeros_like(self.queue.sweep_t).index_copy(0, probe.swept, drop[:num_swept])
        weighted = drop[num_swept:] * self.reward_weight(probe.t[num_swept:])
        rewards, valid = keep_finite(self.reading.reward(weighted.view(len(self.queue.selected), len(probe.paid))))
        slopes = self.slopes(x0[probe.paid], drawn.t[probe.paid], (rewards - self.reward[0]) * valid, valid)
        latest = place_spread_rows(self.concentrations(x0), NUM_REMEMBERED)
        found = gather_findings(swept, rewards, valid, 2 * len(drop), slopes, latest)
        pushed = self.queue.push(found.drops, self.reward_weight(self.queue.step_t), update % len(self.queue.drops))
        stepped = self.optimizer.step(self.policy, self.policy_gradient(found), usable=found.rewards.num > 0)
        self.num_skipped += (found.num_paid - found.rewards.num).long() + ~pushed + ~stepped
        self.num_probes += found.num_evaluations.long()
        self.latest.copy_(found.latest if self.uses_x0 else self.concentrations(x0[:1]))

    def policy_gradient(self, found: Findings) -> Tensor:
        """Return the gradient (P,) of the policy's loss over the rows of all ranks (Eq. 13, Algorithm 1 line 8)."""
        pivot = self.reward[0].clone()  # of the rewards in `slopes`: near their mean, so that little cancels
        self.reward.copy_(torch.stack([found.rewards.mean, found.rewards.spread]))
        baseline = None if self.probing.credit == "sample" else self.baseline
        first = self.optimizer.num_updates == 0
        scale, shift = payment(found.rewards, baseline, first, standardised=self.standardised)
        by_reward, by_draw, by_bonus = found.slopes.unbind()
        return -(scale * by_reward + (shift + scale * pivot) * by_draw + by_bonus) / found.num_paid

    def slopes(self, x0: Tensor, t: Tensor, rewards: Tensor, valid: Tensor) -> Tensor:
        """Return this rank's gradients of log pi times reward, of log pi, and of the entropy bonus, (3, P).

        `policy_gradient` combines them once all ranks have told their rewards, so that one message does.
        """
        if len(x0) == 0:  # policies of your own may not know what to do with it
            return self.optimizer.rates.new_zeros(3, len(self.optimizer.rates))
        with torch.enable_grad():
            beta = self.distribution(x0)
            log_prob = self.log_prob(beta, self.reading.to_u(t, self.num_steps))
            bonus = self.reading.entropy_bonus(log_prob, beta, self.entropy)
            return policy_slopes(self.policy, rewards * log_prob, valid * log_prob, bonus)

    @torch.no_grad()
    def concentrations(self, x0: Tensor) -> Tensor:
        """Return a and b for each row of x0, (B, 2)."""
        beta = self.distribution(x0)
        return torch.stack([beta.a, beta.b], dim=1).float()

    # What can be asked
    def density(self, num_bins: int = 100) -> Tensor:
        """Return where the draws of the latest probed batch went, (num_bins,), or where they go if x0 is ignored."""
        edges = torch.arange(1, num_bins, dtype=torch.float32, device=self.latest.device) / num_bins
        u = self.reading.to_u(edges, self.num_steps).clamp(0, 1)
        learned = Beta(*self.latest.unbind(1)).cdf(u).mean(0)  # (num_bins - 1,)
        cdf = (1 - self.floor) * learned + self.floor * edges
        return nn.functional.pad(nn.functional.pad(cdf, (1, 0)), (0, 1), value=1.0).diff().clamp(min=0)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the policy's a, b and entropy, the selected times, the latest rewards, and what probing cost."""
        beta = Beta(*self.latest.unbind(1))
        values = {"a_mean": beta.a.mean(), "a_std": beta.a.std(), "b_mean": beta.b.mean(), "b_std": beta.b.std()}
        values |= {"entropy": beta.entropy().mean(), "reward_mean": self.reward[0], "reward_std": self.reward[1]}
        values |= {"skipped_rewards": self.num_skipped, "probe_evaluations": self.num_probes}
        selected_t = self.queue.sweep_t[self.queue.selected]
        values |= {f"selected_t_{i}": t for i, t in enumerate(selected_t.unbind())}
        seconds = torch.tensor(self.probe_seconds, dtype=torch.float32)
        return values | ({"probe_seconds": seconds} if self.time_probes else {})
