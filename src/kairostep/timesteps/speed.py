"""SpeeD (Wang et al., CVPR 2025, 2405.17403): fewer draws where the process has almost stopped changing."""

import torch
from torch import Tensor

from kairostep.timesteps.arguments import choice
from kairostep.timesteps.draws import Draws
from kairostep.timesteps.fixed import LogSNR
from kairostep.timesteps.histogram import BELOW_ONE, bin_index, quantile, rebin
from kairostep.timesteps.sampler import Timesteps, TimestepSampler

NUM_STEPS = 1000  # in which a continuous process is read
SLOPE_THRESHOLD = 1e-4  # of sigma per step: under it the process counts as converged
SUPPRESSION = 5.0  # k: how much rarer the convergence area is drawn
CONVERGENCE_START = 0.7  # tau / T of the paper's version
LAMBDA = 0.6  # of the change-aware weight


def slope(values: Tensor) -> Tensor:
    """Return the change per step: central differences, one-sided at both ends."""
    return torch.gradient(values)[0]


def num_meaningful_steps(sigma: Tensor) -> int:
    """Return M, one more than the first step at which sigma (T,) has almost stopped rising, or T if it never does.

    Only steps after the fastest rise count: EDM's sigma has hardly begun to rise at first.
    """
    rise = slope(sigma)
    after_fastest = torch.arange(len(sigma)) > rise.argmax()
    converged = (after_fastest & (rise < SLOPE_THRESHOLD)).nonzero()
    return min(int(converged[0]) + 1, sigma.shape[0]) if converged.numel() else sigma.shape[0]


def v1_mass(sigma: Tensor) -> Tensor:
    """Return the asymmetric density of the first public version (T,): 2.5 where sigma rises, 0.5 where it does not."""
    mass = torch.tanh(1e6 * (slope(sigma) - SLOPE_THRESHOLD)) + 1.5
    return mass / mass.sum()


def paper_mass(sigma: Tensor) -> Tensor:
    """Return the asymmetric density of the paper (T,): k below tau, 1 from there on."""
    before = torch.arange(sigma.shape[0]) < convergence_start(sigma)
    mass = torch.where(before, SUPPRESSION, 1.0).to(sigma)
    return mass / mass.sum()


def v1_weight(sigma: Tensor) -> Tensor:
    """Return 1 - alpha_bar (T,), P2 with gamma = k = 1, the weight of the first public version."""
    return sigma.square()


def paper_weight(sigma: Tensor) -> Tensor:
    """Return the change-aware weight (T,): from 1 - lambda to lambda with the slope of 1 - alpha_bar, 1 from tau on."""
    change = slope(sigma.square())
    relative = (change - change.min()) / (change.max() - change.min())
    weight = (1 - LAMBDA) + (2 * LAMBDA - 1) * relative
    return torch.where(torch.arange(sigma.shape[0]) < convergence_start(sigma), weight, 1.0)


def convergence_start(sigma: Tensor) -> int:
    """Return tau, the first step of the paper's convergence area: 700 of 1000."""
    return round(CONVERGENCE_START * sigma.shape[0])


class Speed(TimestepSampler):
    """Asymmetric draws in mirrored pairs, with SpeeD's own loss weight for an epsilon loss.

    version="paper" is the method of the paper, merged into its repository in October 2024; version="v1" the code that
    was public before, which Kim et al. compare with. A pair is a step t of the asymmetric density and its mirror M - t
    (t - M from M on); which of the two comes first is a coin toss, so that every row, and a batch of one, follows
    `density()`. There is no `unbiased`: the weight is part of the method.
    """

    mass: Tensor
    loss_weight: Tensor

    def __init__(self, process: LogSNR, version: str = "paper", *, stratified: bool = True, seed: int = 0) -> None:
        super().__init__()
        choice("version", version, ("paper", "v1"))
        num_steps = getattr(process, "num_steps", NUM_STEPS)
        t = (torch.arange(num_steps, dtype=torch.float64) + 0.5) / num_steps
        sigma = torch.sigmoid(-process.log_snr(t)).sqrt()  # of the variance-preserving process with the same SNR
        mass, weight = (paper_mass, paper_weight) if version == "paper" else (v1_mass, v1_weight)
        self.num_meaningful_steps = num_meaningful_steps(sigma)
        self.draws = Draws(seed, stratified=stratified)
        self.register_buffer("mass", mass(sigma).float(), persistent=False)
        self.register_buffer("loss_weight", weight(sigma).float(), persistent=False)

    def mirror(self, index: Tensor) -> Tensor:
        """Return the other step of each pair (N,)."""
        mirrored = (index - self.num_meaningful_steps).abs()  # M - t below M, t - M from there on
        return mirrored.clamp(max=self.mass.shape[0] - 1)

    def sample(self, x0: Tensor) -> Timesteps:
        """Return one time and one weight for each row of x0 (B, ...)."""
        num_rows, num_steps = x0.shape[0], self.mass.shape[0]
        one_per_pair = x0[: (num_rows + 1) // 2]
        t, index = quantile(self.mass, self.draws(one_per_pair))
        mirrored = t + (self.mirror(index) - index) / num_steps
        swap = self.draws(one_per_pair) < 0.5
        pairs = torch.cat([torch.where(swap, mirrored, t), torch.where(swap, t, mirrored)])
        t = pairs[:num_rows].clamp(0, BELOW_ONE)
        return Timesteps(t, self.loss_weight[bin_index(t, num_steps)].to(t.dtype))

    def density(self, num_bins: int = 100) -> Tensor:
        """Return where the draws go, both of each pair: (num_bins,), summing to 1."""
        mirrored = self.mirror(torch.arange(self.mass.shape[0], device=self.mass.device))
        pairs = self.mass.scatter_add(0, mirrored, self.mass)  # a step and what is mirrored onto it
        return rebin(pairs, num_bins)
