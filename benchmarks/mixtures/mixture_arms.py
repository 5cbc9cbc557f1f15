"""The arms of exact_mixture.py: what the library offers, and the controls that tell a gain from an accident."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from mixture_training import Arm, Training
from mixtures import Setting
from torch import Tensor

import kairostep as ks
from kairostep.diffusion.process import Coefficients, Process

NUM_BINS = 20
ORACLE_EVERY, ORACLE_ROWS, ORACLE_FLOOR = 40, 32, 0.1


# Noise.


@dataclass(frozen=True)
class SeedsApart:
    """A process told t plus the number of the seed: times of one seed are neighbours in t of no other's."""

    process: Process

    def at(self, t: Tensor) -> Coefficients:
        """Return the coefficients at t without the seed."""
        return self.process.at(t.frac().float())


def antithetic(setting: Setting, x0: Tensor, drawn: ks.Timesteps) -> tuple[Tensor, Tensor]:
    """Return data and noise in antithetic pairs, those of all seeds by one call."""
    t = drawn.t.double() + torch.arange(len(x0))[:, None]
    flat = x0.flatten(0, 1)  # (S B, D)
    pairs = ks.antithetic_pairs(SeedsApart(setting.process), flat, ks.Timesteps(t.flatten(), drawn.weight.flatten()))
    return flat[pairs.rows].view_as(x0), pairs.noise.view_as(x0)


def same_data(setting: Setting, x0: Tensor, drawn: ks.Timesteps) -> tuple[Tensor, Tensor]:
    """Return data in the same pairs, each with noise of its own: a control."""
    noise = torch.randn(x0.shape)
    return antithetic(setting, x0, drawn)[0], noise


# Samplers that only a benchmark can have.


class Misfiled(ks.TimestepSampler):
    """A sampler that is shown each loss as if it came from another bin, the same one throughout: a control."""

    def __init__(self, sampler: ks.TimestepSampler, seed: int) -> None:
        super().__init__()
        self.sampler = sampler
        self.register_buffer("elsewhere", permutation(seed))

    def sample(self, x0: Tensor) -> ks.Timesteps:
        """Return what the sampler draws."""
        return self.sampler.sample(x0)

    def observe(
        self, x0: Tensor, drawn: ks.Timesteps, losses: Tensor, loss_at: ks.LossAt | None = None
    ) -> AbstractContextManager[None]:
        """Show the losses under other times."""
        other = ks.Timesteps(misfiled(drawn.t, self.elsewhere), drawn.weight)
        return self.sampler.observe(x0, other, losses, loss_at)


class Misattributed(Misfiled):
    """A sampler that is paid for each draw what another row of the batch earned: a control."""

    def observe(
        self, x0: Tensor, drawn: ks.Timesteps, losses: Tensor, loss_at: ks.LossAt | None = None
    ) -> AbstractContextManager[None]:
        """Answer for another row whenever one is asked for."""
        other = torch.randperm(len(x0))
        at = loss_at and (lambda rows, t: loss_at(other[rows], t))
        return self.sampler.observe(x0, drawn, losses, at)


class Oracle(ks.Tabulated):
    """Draws in proportion to the true excess of its network in each bin, which no one is charged for."""

    def __init__(self, training: Training, seed: int) -> None:
        super().__init__(torch.ones(NUM_BINS), seed=seed)
        self.excess = partial(_excess_by_bin, training, seed)
        self.num_observed = 0

    def observe(
        self, x0: Tensor, drawn: ks.Timesteps, losses: Tensor, loss_at: ks.LossAt | None = None
    ) -> AbstractContextManager[None]:
        """Look at the excess if it is time."""
        self.num_observed += 1
        if self.num_observed % ORACLE_EVERY == 0:
            excess = self.excess()
            self.mass.copy_((1 - ORACLE_FLOOR) * excess / excess.sum() + ORACLE_FLOOR / NUM_BINS)
        return super().observe(x0, drawn, losses, loss_at)


@torch.no_grad()
def _excess_by_bin(training: Training, seed: int) -> Tensor:
    """Return the mean squared excess of one seed's predictions in each bin, (K,)."""
    setting = training.setting
    t = ((torch.arange(NUM_BINS * ORACLE_ROWS) + 0.5) / (NUM_BINS * ORACLE_ROWS)).clamp(max=1 - 1e-6)
    x0 = setting.mixture.draw((len(t),), torch.Generator().manual_seed(training.num_steps))
    at = setting.process.at(t)
    xt = at.alpha[:, None] * x0 + at.sigma[:, None] * torch.randn(x0.shape)
    error = training.predict_one(seed, xt, at.time) - setting.best(xt, t)
    return error.square().mean(1).view(NUM_BINS, -1).mean(1).float()


def permutation(seed: int) -> Tensor:
    """Return which bin stands for each, (K,)."""
    return torch.randperm(NUM_BINS, generator=torch.Generator().manual_seed(seed))


def misfiled(t: Tensor, elsewhere: Tensor) -> Tensor:
    """Return the time at the same place in another bin."""
    place = t * NUM_BINS
    index = place.floor().clamp(max=NUM_BINS - 1)
    return ((elsewhere[index.long()] + (place - index)) / NUM_BINS).clamp(max=1 - 2**-24)


# Builders that need more than a seed.


def root_loss(training: Training, seed: int, *, weighted: bool = False) -> ks.TimestepSampler:
    """Return root-loss importance sampling, told the weight of the loss or not."""
    return ks.RootLoss(loss_weight=training.objective.weight if weighted else None, seed=seed)


def adaptive(training: Training, seed: int, *, bound: bool, permuted: bool = False) -> ks.TimestepSampler:
    """Return the adaptive sampler of Kim et al., paid by the bound or by the loss."""
    policy = ks.BetaPolicy.for_input((training.setting.num_axes,), seed=seed)
    reward = training.objective.reweighting(ks.vlb(training.setting.process)) if bound else None
    sampler = ks.Adaptive(policy, reward, seed=seed)
    return Misattributed(sampler, seed) if permuted else sampler


def infonoise(training: Training, seed: int) -> ks.TimestepSampler:
    """Return InfoNoise for the loss as it is trained."""
    return ks.InfoNoise(training.setting.process, training.objective.x0_weight, seed=seed)


def uniform(training: Training, seed: int) -> ks.TimestepSampler:
    """Return the baseline."""
    return ks.Uniform(seed=seed)


ARMS: dict[str, Arm] = {
    "uniform": Arm(uniform),
    "root-loss": Arm(root_loss),
    "least-noise": Arm(lambda training, seed: ks.LeastNoise(training.optimizer, seed=seed), observe_at_once=False),
    "pairs": Arm(uniform, noising=antithetic),
    "root-loss + pairs": Arm(root_loss, noising=antithetic),
    "stable target": Arm(uniform, stable_target=True),
    "root-loss + pairs + stable target": Arm(root_loss, noising=antithetic, stable_target=True),
    "infonoise": Arm(infonoise),
    "loss second moment": Arm(
        lambda training, seed: ks.LossSecondMoment(100, seed=seed), sample_at_once=False, observe_at_once=False
    ),
    "logit-normal": Arm(lambda training, seed: ks.LogitNormal(seed=seed)),
    "min-SNR-5": Arm(uniform, weighting=ks.min_snr(5.0)),
    "min-SNR-5, root-loss": Arm(partial(root_loss, weighted=True), weighting=ks.min_snr(5.0)),
    "min-SNR-5, root-loss not told": Arm(root_loss, weighting=ks.min_snr(5.0)),
    "adaptive, bound": Arm(partial(adaptive, bound=True), sample_at_once=False, observe_at_once=False),
    "adaptive, loss": Arm(partial(adaptive, bound=False), sample_at_once=False, observe_at_once=False),
    "independent times": Arm(lambda training, seed: ks.Uniform(stratified=False, seed=seed)),
    "control: root-loss, permuted": Arm(lambda training, seed: Misfiled(root_loss(training, seed), seed)),
    "control: adaptive, permuted": Arm(
        partial(adaptive, bound=True, permuted=True), sample_at_once=False, observe_at_once=False
    ),
    "control: pairs, independent noise": Arm(uniform, noising=same_data),
    "oracle": Arm(Oracle, observe_at_once=False),
}
BASELINE = "uniform"
DEFAULT = (
    "uniform",
    "root-loss",
    "pairs",
    "root-loss + pairs",
    "root-loss + pairs + stable target",
    "infonoise",
    "control: root-loss, permuted",
    "control: pairs, independent noise",
    "oracle",
)
