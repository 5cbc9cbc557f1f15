"""SpeeD (Wang et al., CVPR 2025, 2405.17403): fewer draws where the process has almost stopped changing."""

import torch
from torch import Tensor

from kairostep.checks import choice, positive, share
from kairostep.ranks import own_rows, world_size
from kairostep.registry import samplers
from kairostep.timesteps.draws import Draws, check_batch
from kairostep.timesteps.fixed import LogSNR
from kairostep.timesteps.histogram import BELOW_ONE, bin_index, quantile, rebin
from kairostep.timesteps.sampler import Timesteps, TimestepSampler

NUM_STEPS = 1000  # in which a continuous process is read
SLOPE_THRESHOLD = 0.1  # of sigma over the whole of [0, 1]: SpeeD's 1e-4 per step of 1000. Below, it counts as converged
CONVERGENCE_START = 0.7  # tau / T of the paper's version: 700 of 1000
LAMBDA = 0.6  # of the change-aware weight


def slope(values: Tensor) -> Tensor:
    """Return the change per step: central differences, one-sided at both ends."""
    return torch.gradient(values)[0]


def num_meaningful_steps(sigma: Tensor) -> int:
    """Return M, one more than the first step at which sigma (T,) has almost stopped rising, or T if it never does.

    Only steps after the fastest rise count: EDM's sigma has hardly begun to rise at first.
    """
    num_steps, rise = len(sigma), slope(sigma)
    after_fastest = torch.arange(num_steps) > rise.argmax()
    converged = (after_fastest & (rise * num_steps < SLOPE_THRESHOLD)).nonzero()
    return min(int(converged[0]) + 1, num_steps) if converged.numel() else num_steps


def v1_mass(sigma: Tensor, k: float) -> Tensor:
    """Return the asymmetric density of the first public version (T,): k where sigma rises, 1 where it does not."""
    excess = slope(sigma) * len(sigma) - SLOPE_THRESHOLD
    mass = (k - 1) * torch.tanh(1e3 * excess) + (k + 1)
    return mass / mass.sum()


def v1_weight(sigma: Tensor) -> Tensor:
    """Return 1 - alpha_bar (T,), P2 with gamma = k = 1, the weight of the first public version."""
    return sigma.square()


def paper_mass(sigma: Tensor, k: float, tau: float) -> Tensor:
    """Return the asymmetric density of the paper (T,): k below tau, 1 from there on."""
    mass = torch.where(is_before(tau, sigma), k, 1.0).to(sigma)
    return mass / mass.sum()


def paper_weight(sigma: Tensor, tau: float, lam: float) -> Tensor:
    """Return the change-aware weight (T,): from 1 - lambda to lambda with the slope of 1 - alpha_bar, 1 from tau on."""
    change = slope(sigma.square())
    span = change.max() - change.min()
    relative = (change - change.min()) / torch.where(span > 0, span, 1.0)  # all alike in a process of two steps
    return torch.where(is_before(tau, sigma), (1 - lam) + (2 * lam - 1) * relative, 1.0)


def is_before(tau: float, sigma: Tensor) -> Tensor:
    """Return which steps (T,) lie before the paper's convergence area, which starts at step tau T."""
    return torch.arange(len(sigma)) < round(tau * len(sigma))


@samplers.register("speed")
class Speed(TimestepSampler):
    """Draws noisy times less often, with SpeeD's own loss weight.

    Times come in pairs: a step t of the asymmetric density and its mirror M - t (t - M from M on). A coin decides which
    of the two comes first, so that every row, and a batch of one, follows `density()`. The weight is meant for an
    epsilon loss and part of the method, so there is no `unbiased`. Defaults are the published values (Wang et al. 2025,
    arXiv 2405.17403).

    Args:
        process: The process whose steps are drawn.
        version: "paper" is the method of the paper, in its repository since October 2024. "v1" is the code that was
            public before, which Kim et al. compare with.
        k: How many times as often a step before the convergence area is drawn as one in it.
        tau: Where the paper's convergence area starts, as a share of the steps. "v1" finds it by the slope of sigma.
        lam: Lambda of the paper's weight, which goes from 1 - lam to lam. "v1" has another weight.
        mirrored: Draw in pairs. False draws every row by the asymmetric density.
        stratified: Draw one time in each of N equal parts of the distribution, N being the batch over all ranks.
        seed: Of the draws.
    """

    own_weights = True
    mass: Tensor
    step_weight: Tensor  # (T,)

    def __init__(
        self,
        process: LogSNR,
        version: str = "paper",
        *,
        k: float = 5.0,
        tau: float = CONVERGENCE_START,
        lam: float = LAMBDA,
        mirrored: bool = True,
        stratified: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        choice("version", version, ("paper", "v1"))
        if version == "v1" and (tau, lam) != (CONVERGENCE_START, LAMBDA):
            raise ValueError(f'tau and lam belong to version="paper", got {tau} and {lam} with "v1": leave them out')
        num_steps = getattr(process, "num_steps", NUM_STEPS)
        t = (torch.arange(num_steps, dtype=torch.float64) + 0.5) / num_steps
        sigma = torch.sigmoid(-process.log_snr(t)).sqrt()  # of the variance-preserving process with the same SNR
        positive("k", k)
        if version == "paper":
            mass, weight = paper_mass(sigma, k, share("tau", tau)), paper_weight(sigma, tau, share("lam", lam))
        else:
            mass, weight = v1_mass(sigma, k), v1_weight(sigma)
        self.process, self.version, self.k, self.tau, self.lam = process, version, k, tau, lam
        self.mirrored = mirrored
        self.num_meaningful_steps = num_meaningful_steps(sigma)
        self.draws = Draws(seed, stratified=stratified)
        self.register_buffer("mass", mass.float(), persistent=False)
        self.register_buffer("step_weight", weight.float(), persistent=False)

    def mirror(self, index: Tensor) -> Tensor:
        """Return the other step of each pair (N,)."""
        mirrored = (index - self.num_meaningful_steps).abs()  # M - t below M, t - M from there on
        return mirrored.clamp(max=self.mass.shape[0] - 1)

    def sample(self, x0: Tensor) -> Timesteps:
        """Return one time and one weight for each row of x0 (B, ...)."""
        check_batch(x0)
        t = self.draw_pairs(x0) if self.mirrored else quantile(self.mass, self.draws(x0))[0]
        return Timesteps(t, self.loss_weight(t))

    def loss_weight(self, t: Tensor) -> Tensor:
        """Return the method's own weight (N,) of an epsilon loss at t (N,)."""
        return self.step_weight[bin_index(t, len(self.step_weight))].to(t.dtype)

    def draw_pairs(self, x0: Tensor) -> Tensor:
        """Return times (B,) for the rows of x0; rows i and i + N / 2 of the batch over all ranks are mirrors."""
        num_rows, num_steps = x0.shape[0] * world_size(), self.mass.shape[0]
        num_pairs = (num_rows + 1) // 2
        t, index = quantile(self.mass, self.draws.draw_for_all_ranks(x0, num_pairs))
        mirrored = t + (self.mirror(index) - index).to(t.dtype) / num_steps
        swap = self.draws.draw_for_all_ranks(x0, num_pairs) < 0.5
        pairs = torch.cat([torch.where(swap, mirrored, t), torch.where(swap, t, mirrored)])
        return own_rows(pairs[:num_rows], x0.shape[0]).clamp(0, BELOW_ONE)

    def density(self, num_bins: int = 100) -> Tensor:
        """Return where the draws go, both of each pair: (num_bins,), summing to 1."""
        if not self.mirrored:
            return rebin(self.mass, num_bins)
        mirrored = self.mirror(torch.arange(self.mass.shape[0], device=self.mass.device))
        pairs = self.mass.scatter_add(0, mirrored, self.mass)  # a step and what is mirrored onto it
        return rebin(pairs, num_bins)
