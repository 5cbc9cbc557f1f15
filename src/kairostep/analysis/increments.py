"""SpeeD's process increments and three areas, for any schedule: how much a process changes from step to step.

Wang et al. (CVPR 2025, 2405.17403) look at x_{t+1} - x_t. Early steps change faster and faster (acceleration), then
slower (deceleration), and at last hardly at all (convergence), where many of the steps lie.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kairostep.checks import count, positive
from kairostep.diffusion.process import Process
from kairostep.timesteps.speed import CONVERGENCE_START, SLOPE_THRESHOLD, slope

NUM_STEPS = 1000  # in which a continuous process is divided


@dataclass(frozen=True, slots=True)
class Area:
    """Steps from `start` to before `end`."""

    name: str
    start: int
    end: int
    steps: float  # share of all steps
    change: float  # share of the whole rise of the noise's variance


@dataclass(frozen=True, slots=True)
class ProcessIncrements:
    """Moments of x_{t+1} - x_t given x0 for T steps, each (T - 1,) in float64, of the variance-preserving process."""

    t: Tensor  # in the middle of each step, (T,)
    sigma: Tensor  # (T,)
    mean: Tensor  # factor on x0, negative
    variance: Tensor  # with independent noises at both steps, as SpeeD has it: 2 - alpha_bar_t (1 + alpha_{t+1})
    chain_variance: Tensor  # along one path of the process, where both steps share noise
    areas: list[Area]  # acceleration, deceleration, convergence
    speed_convergence_start: int  # where SpeeD's released sampler has it, whatever the schedule

    @property
    def num_steps(self) -> int:
        """The number of steps T."""
        return len(self.t)


def process_increments(
    process: Process, *, num_steps: int | None = None, threshold: float = SLOPE_THRESHOLD
) -> ProcessIncrements:
    """Return the increments and areas of a process, treated as the variance-preserving process of the same SNR.

    Acceleration ends where the variance of the noise rises fastest. Convergence starts at the first later step where
    sigma rises by less than `threshold` per unit of t.

    Args:
        process: The noising process.
        num_steps: Number of steps. Default: that of a discrete process, or 1000.
        threshold: Slope of sigma where convergence starts.
    """
    positive("threshold", threshold, example=0.1)
    default: int = getattr(process, "num_steps", NUM_STEPS)
    num_steps = count("num_steps", default if num_steps is None else num_steps, at_least=3, at_most=10**7, example=1000)
    t = (torch.arange(num_steps, dtype=torch.float64) + 0.5) / num_steps
    log_snr = process.log_snr(t)
    alpha, sigma = torch.sigmoid(log_snr).sqrt(), torch.sigmoid(-log_snr).sqrt()
    before, after = sigma[:-1].square(), sigma[1:].square()
    return ProcessIncrements(
        t,
        sigma,
        alpha.diff(),
        before + after,
        after + before - 2 * alpha[1:] / alpha[:-1] * before,
        areas_of(sigma, threshold),
        round(CONVERGENCE_START * num_steps),
    )


def areas_of(sigma: Tensor, threshold: float = SLOPE_THRESHOLD) -> list[Area]:
    """Return the three areas of a process with these noise levels sigma (T,)."""
    num_steps = len(sigma)
    fastest = int(slope(sigma.square()).argmax())
    slow = (slope(sigma)[fastest:] * num_steps < threshold).nonzero()
    converged = fastest + int(slow[0]) if slow.numel() else num_steps
    edges = (0, fastest, converged, num_steps)
    variance = torch.cat([sigma.new_zeros(1), sigma.square()])  # before each step, and at the end
    names = ("acceleration", "deceleration", "convergence")
    return [
        Area(name, start, end, (end - start) / num_steps, float((variance[end] - variance[start]) / variance[-1]))
        for name, start, end in zip(names, edges[:-1], edges[1:], strict=True)
    ]
