"""REINFORCE: what each draw is paid for the drop in loss, and how the policy moves by it (Kim et al., Eq. 13)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kairostep.ranks import rank, sum_over_ranks, world_size
from kairostep.timesteps.sampler import LARGEST

BASELINE_DECAY = 0.9  # of the running mean that credit="batch" compares with


def check_reward_weight(reward_weight: Callable[[Tensor], Tensor], t: Tensor) -> None:
    """Raise unless the weight of rewards is a finite function of t (N,)."""
    try:
        weight = reward_weight(t)
        finite = weight.shape == t.shape and bool(weight.isfinite().all())
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"reward_weight must take t (N,) and return (N,), got {reward_weight!r}: pass process.vlb_weight "
            "for an unweighted epsilon loss, objective.reweighting(ks.vlb(process)) for any other"
        ) from error
    if not finite:
        raise ValueError(f"reward_weight must be finite for every t, got {weight}: bound it or leave it out")


def keep_finite(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return rewards (R,) with 0 for what is not finite, and which were: (R,), 0 or 1."""
    finite = rewards.abs() < LARGEST
    return torch.where(finite, rewards, 0.0), finite.float()


@dataclass(frozen=True, slots=True)
class RewardSummary:
    """The valid rewards of all ranks."""

    num: Tensor  # ()
    mean: Tensor  # ()
    spread: Tensor  # () standard deviation


@dataclass(frozen=True, slots=True)
class Findings:
    """What all ranks found in a probe."""

    drops: Tensor  # (M,) in loss, at the swept timesteps
    rewards: RewardSummary
    num_paid: Tensor  # () rows with a reward, valid or not
    num_evaluations: Tensor  # () of the network
    slopes: Tensor  # (3, P) of the policy's objective: see `policy_slopes`
    latest: Tensor  # (N, 2) a and b of rows of the batch


def gather_findings(
    drops: Tensor, rewards: Tensor, valid: Tensor, num_evaluations: int, slopes: Tensor, latest: Tensor
) -> Findings:
    """Return the findings of all ranks, by one message.

    Args:
        drops: (M,), 0 where another rank swept.
        rewards: (R,) of this rank's rows, 0 where not valid.
        valid: (R,), 0 or 1.
        num_evaluations: Of the network, by this rank.
        slopes: (3, P) of this rank's rows.
        latest: (N, 2), 0 for rows of other ranks.
    """
    moments = reward_moments(rewards, valid)
    counts = [torch.full_like(moments[0], num) for num in (len(rewards), num_evaluations)]
    slots = moments.new_zeros(world_size(), 5)  # one for each rank: adding them up gathers them
    slots[rank()] = torch.cat([moments, torch.stack(counts)])
    parts = (drops, slots, slopes, latest)
    message = sum_over_ranks(torch.cat([part.flatten() for part in parts]))
    sums = torch.split(message, [part.numel() for part in parts])
    drops, slots, slopes, latest = (some.view_as(part).to(part) for some, part in zip(sums, parts, strict=True))
    num_paid, num_evaluated = slots[:, 3:].sum(0)
    return Findings(drops, summarise_rewards(slots[:, :3]), num_paid, num_evaluated, slopes, latest)


def reward_moments(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return number, sum and squares around their mean, (3,), of rewards (R,) that are 0 where not valid, 0 or 1."""
    num, total = valid.sum(), rewards.sum()
    around = (rewards - total / num.clamp(min=1)) * valid
    return torch.stack([num, total, around.square().sum()])


def summarise_rewards(moments: Tensor) -> RewardSummary:
    """Return number, mean and spread of all rewards, from the `reward_moments` of each rank, (W, 3)."""
    nums, totals, squares = moments.unbind(1)
    num = nums.sum()
    mean = totals.sum() / num.clamp(min=1)
    between = nums * (totals / nums.clamp(min=1) - mean).square()  # exactly 0 on one rank
    return RewardSummary(num, mean, ((squares + between).sum() / num.clamp(min=1)).sqrt())


def payment(
    summary: RewardSummary, baseline: Tensor | None, first: Tensor, *, standardised: bool
) -> tuple[Tensor, Tensor]:
    """Return scale and shift, (), from the reward of a draw to what it is paid: nothing if all are alike.

    Args:
        summary: Of the rewards of all ranks.
        baseline: Where all draws are paid alike, for the mean reward, what it is compared with, (2,), which is brought
            up to date. None pays each draw for its own reward.
        first: Whether there is no baseline yet, ().
        standardised: In spreads above what was expected, or as rewards are.
    """
    nothing = torch.zeros_like(summary.mean)
    if baseline is None:
        scale = torch.where(summary.spread > 0, 1 / summary.spread, 0.0) if standardised else nothing + 1
        return scale, -summary.mean * scale if standardised else nothing
    if not standardised:
        return nothing, summary.mean
    surprise, updated = compare_with_baseline(summary.mean, baseline, first)
    baseline.copy_(torch.where(summary.num > 0, updated, baseline))
    return nothing, surprise


def compare_with_baseline(mean: Tensor, baseline: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far a batch's mean reward () lies above what was expected, in spreads, and the new baseline (2,).

    Args:
        mean: Of the batch's rewards.
        baseline: Running mean of such means, and of the square of their surprise.
        first: Whether there is no baseline yet, ().
    """
    expected = torch.where(first, mean, baseline[0])
    surprise = mean - expected
    variance = torch.lerp(surprise.square(), baseline[1], BASELINE_DECAY)
    updated = torch.stack([torch.lerp(mean, expected, BASELINE_DECAY), variance])
    return torch.where(variance > 0, surprise / variance.sqrt(), 0.0), updated


def policy_slopes(policy: nn.Module, *objectives: Tensor) -> Tensor:
    """Return the gradient (P,) of the sum of each objective (R,) by the policy's parameters: (num_objectives, P)."""
    parameters, slopes = list(policy.parameters()), []
    for objective in objectives:
        gradients = torch.autograd.grad(objective.sum(), parameters, retain_graph=True, materialize_grads=True)
        slopes.append(torch.cat([g.flatten().float() for g in gradients]))
    return torch.stack(slopes)


class PolicyOptimizer(nn.Module):
    """Adam with a clipped gradient, whose moments are buffers: a sampler's state_dict has to hold all of it.

    `per_input` divides the rate of each weight by the number of inputs it is summed with. A step of Adam moves every
    weight alike, whatever its gradient: at 1e-2 a layer of 2048 inputs would be thrown far out by one update, and
    stay there, its units dead. Divided, a step moves the output of each layer by about the rate.
    """

    BETAS, EPSILON, MAX_NORM = (0.9, 0.999), 1e-8, 1.0

    rates: Tensor  # (P,)
    moments: Tensor  # (2, P) running means of the gradient and its square
    num_updates: Tensor  # ()

    def __init__(self, policy: nn.Module, learning_rate: float, *, per_input: bool) -> None:
        super().__init__()
        num_inputs = [p[0].numel() if per_input and p.ndim > 1 else 1 for p in policy.parameters()]
        rates = [
            torch.full((p.numel(),), learning_rate / n, dtype=torch.float32)
            for p, n in zip(policy.parameters(), num_inputs, strict=True)
        ]
        self.register_buffer("rates", torch.cat(rates), persistent=False)
        self.register_buffer("moments", torch.zeros(2, len(self.rates), dtype=torch.float32))
        self.register_buffer("num_updates", torch.tensor(0))

    @torch.no_grad()
    def step(self, policy: nn.Module, gradient: Tensor, usable: Tensor) -> Tensor:
        """Move the policy against the gradient (P,) if it is usable, (), and finite; return whether it was, ()."""
        norm = gradient.norm()
        finite: Tensor = norm.isfinite() & usable
        gradient = torch.where(finite, gradient * (self.MAX_NORM / norm.clamp(min=self.MAX_NORM)), 0.0)
        self.num_updates += finite
        corrected = []
        for moment, new, decay in zip(self.moments, (gradient, gradient.square()), self.BETAS, strict=True):
            moment.copy_(torch.where(finite, torch.lerp(new, moment, decay), moment))
            corrected.append(moment / (1 - decay ** self.num_updates.clamp(min=1).float()))
        mean, square = corrected
        change = torch.where(finite, self.rates * mean / (square.sqrt() + self.EPSILON), 0.0)
        parameters = list(policy.parameters())
        sizes = [p.numel() for p in parameters]
        for parameter, some in zip(parameters, torch.split(change, sizes), strict=True):
            parameter.sub_(some.view_as(parameter))  # in place: a CUDA graph of `sample` reads the same memory on
        return finite
