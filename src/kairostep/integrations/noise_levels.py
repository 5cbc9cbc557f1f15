"""Noise levels and processes as other libraries have them, read as functions of t.

A trainer may draw noise levels from a distribution of its own, as EDM does from a log-normal. Then t is the share of
its draws that are less noisy. So `Uniform` draws as the trainer does, and an unbiased sampler such as `RootLoss` keeps
the trainer's objective.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kairostep.diffusion.process import FlowProcess, Process
from kairostep.integrations.foreign_loop import check_needs, learn_without_step
from kairostep.timesteps import Timesteps, TimestepSampler
from kairostep.timesteps.histogram import ABOVE_ZERO, bin_index

OfTime = Callable[[Tensor], Tensor]
"""A function of times (N,) that returns (N,)."""

END = 1e-4  # how near to both ends, where slopes may be infinite, they are taken
NUM_BISECTIONS = 50


class ReadProcess(Process):
    """A process given by functions of t: the factors of data and noise, and the time that networks get.

    Args:
        is_flow: The network predicts the velocity of alpha(t) x0 + sigma(t) noise, as `prediction` says.
    """

    def __init__(self, alpha: OfTime, sigma: OfTime, time: OfTime, *, is_flow: bool = False) -> None:
        self._alpha, self._sigma, self._time, self._is_flow = alpha, sigma, time, is_flow
        ends = self.log_snr(torch.tensor([END, 1 - END], dtype=torch.float64))
        if not bool(ends[0] > ends[1]):
            raise ValueError(
                f"log-SNR must fall from t = 0 to t = 1, got {float(ends[0])} and {float(ends[1])}: "
                "check the direction of time, 0 being clean data here"
            )

    @property
    def prediction(self) -> "PathVelocity":
        """What a flow network predicts: the velocity toward the data, opposite to t."""
        if not self._is_flow:
            raise ValueError(
                "what is predicted must be known, but this process is no flow, or has noise on top that its velocity "
                "leaves out: name the prediction, for instance ks.X0"
            )
        return PathVelocity(self)

    def alpha(self, t: Tensor) -> Tensor:
        """Return the factor of the data."""
        return self._alpha(t)

    def sigma(self, t: Tensor) -> Tensor:
        """Return the factor of the noise."""
        return self._sigma(t)

    def time(self, t: Tensor) -> Tensor:
        """Return what the network is told."""
        return self._time(t)

    def log_snr(self, t: Tensor) -> Tensor:
        """Return log(alpha**2 / sigma**2)."""
        return log_snr_of(self._alpha(t), self._sigma(t))

    @torch.no_grad()
    def t_at(self, log_snr: Tensor) -> Tensor:
        """Return the t of this log-SNR, by bisection."""
        wanted = precise(log_snr)
        low, high = torch.zeros_like(wanted), torch.ones_like(wanted)
        for _ in range(NUM_BISECTIONS):
            t = (low + high) / 2
            too_clean = self.log_snr(t) > wanted
            low, high = torch.where(too_clean, t, low), torch.where(too_clean, high, t)
        return ((low + high) / 2).to(log_snr.dtype)

    def vlb_weight(self, t: Tensor) -> Tensor:
        """Return half the slope of -log-SNR (Kingma et al. 2021)."""
        return -slope(self.log_snr, t.clamp(END, 1 - END)) / 2


class FlowSteps(Process):
    """The straight path in the steps of a flow scheduler: step i has noise `sigmas[i]` and network time `times[i]`.

    Both (T,) rise, whereas diffusers' tables fall. Draws are over steps, so a scheduler's shift is part of the process:
    uniform draws take each step equally often, as diffusers' scripts do.
    """

    def __init__(self, sigmas: Tensor, times: Tensor) -> None:
        self.sigmas, self.times = sigmas.detach().cpu(), times.detach().cpu()
        self._tables: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    @property
    def num_steps(self) -> int:
        """The number of steps T."""
        return len(self.sigmas)

    def alpha(self, t: Tensor) -> Tensor:
        """Return the factor of the data."""
        return 1 - self.sigma(t)

    def sigma(self, t: Tensor) -> Tensor:
        """Return the factor of the noise."""
        return self._table("sigmas", t)[bin_index(t, self.num_steps)]

    def log_snr(self, t: Tensor) -> Tensor:
        """Return log(alpha**2 / sigma**2), -inf in the last step, which is pure noise."""
        sigma = self.sigma(t)
        return 2 * ((1 - sigma).log() - sigma.log())

    def time(self, t: Tensor) -> Tensor:
        """Return the scheduler's timestep."""
        return self._table("times", t)[bin_index(t, self.num_steps)]

    def t_at(self, log_snr: Tensor) -> Tensor:
        """Return the middle of the step whose log-SNR is nearest."""
        falling = self.log_snr((torch.arange(self.num_steps, device=log_snr.device) + 0.5).to(log_snr) / self.num_steps)
        between = ((falling[1:] + falling[:-1]) / 2).neg()
        return (torch.searchsorted(between, -log_snr, right=True).to(log_snr.dtype) + 0.5) / self.num_steps

    def vlb_weight(self, t: Tensor) -> Tensor:
        """Return the flow's: a shift multiplies sigma / alpha by a constant, which leaves the slope of log-SNR."""
        return FlowProcess().vlb_weight((bin_index(t, self.num_steps) + 1).to(t.dtype) / self.num_steps)

    def _table(self, name: str, like: Tensor) -> Tensor:
        key = (name, like.device, like.dtype)
        if key not in self._tables:
            self._tables[key] = getattr(self, name).to(like.device, torch.promote_types(like.dtype, torch.float32))
        return self._tables[key]


@dataclass(frozen=True)
class PathVelocity:
    """The velocity of x toward the data: minus the slope of alpha(t) x0 + sigma(t) noise."""

    process: ReadProcess

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return the velocity."""
        alpha_slope, sigma_slope = self._slopes(log_snr_of(alpha, sigma))
        return -(alpha_slope * x0 + sigma_slope * noise)

    def to_x0(self, output: Tensor, xt: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return the clean data that this velocity stands for."""
        alpha_slope, sigma_slope = self._slopes(log_snr_of(alpha, sigma))
        return (sigma * output + sigma_slope * xt) / (sigma_slope * alpha - alpha_slope * sigma)

    def log_x0_error(self, log_snr: Tensor) -> Tensor:
        """Return the log of the squared error in x0 that comes with a squared error of 1 in the velocity."""
        t = self.process.t_at(precise(log_snr))
        alpha_slope, sigma_slope = self._slopes(precise(log_snr))
        alpha, sigma = self.process.alpha(t), self.process.sigma(t)
        return (2 * (sigma / (sigma_slope * alpha - alpha_slope * sigma)).log()).to(log_snr.dtype)

    def _slopes(self, log_snr: Tensor) -> tuple[Tensor, Tensor]:
        t = self.process.t_at(precise(log_snr))
        alpha, sigma = slope(self.process.alpha, t), slope(self.process.sigma, t)
        return alpha.to(log_snr.dtype), sigma.to(log_snr.dtype)


def log_snr_of(alpha: Tensor, sigma: Tensor) -> Tensor:
    """Return log(alpha**2 / sigma**2), infinite at the ends: a cosine may end a rounding error below 0, never NaN."""
    return 2 * (alpha.clamp(min=0).log() - sigma.clamp(min=0).log())


def level_at(quantile: OfTime, t: Tensor) -> Tensor:
    """Return the level of each drawn t (N,), always above 0, in the best precision of the device."""
    return quantile(precise(t).clamp(min=ABOVE_ZERO))


def precise(value: Tensor) -> Tensor:
    """Return the value in float64, or float32 on Apple's GPUs, which lack it."""
    return value if value.device.type == "mps" else value.double()


def slope(function: OfTime, t: Tensor) -> Tensor:
    """Return the derivative at each t (N,)."""
    with torch.enable_grad():
        t = t.detach().clone().requires_grad_()
        value = function(t)
        if not value.requires_grad:
            return torch.zeros_like(t)
        (derivative,) = torch.autograd.grad(value.sum(), t)
        return derivative


@dataclass(frozen=True)
class LogNormal:
    """The quantiles of exp(N(mean, std**2)), EDM's noise levels."""

    mean: float
    std: float

    def __call__(self, t: Tensor) -> Tensor:
        """Return the level under which a share t of them lies."""
        level: Tensor = (self.mean + self.std * torch.special.ndtri(t)).exp()
        return level


class DrawnLevels:
    """Noise levels drawn by a sampler, for trainers that draw levels first and compute weights and losses later.

    Args:
        quantile: The level at each t, where t is the share of the trainer's own draws that are less noisy.
    """

    def __init__(self, sampler: TimestepSampler, quantile: OfTime, where: str) -> None:
        check_needs(sampler, where, x0=False, loss_at=False)
        self.sampler, self.quantile, self._where = sampler, quantile, where
        sampler.how_to_show = "show those of each draw, by learn(losses, weighted=...) or weighted(losses)"
        self._drawn: Timesteps | None = None
        self._levels = torch.empty(0)

    def draw(self, num: int, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
        """Return one level for each of `num` rows, (num,), and move the sampler to that device."""
        rows = torch.empty(num, 0, device=device)
        follow(self.sampler, rows.device)
        self._drawn = self.sampler.sample(rows)
        self._levels = level_at(self.quantile, self._drawn.t).to(dtype or torch.get_default_dtype())
        return self._levels

    def weight(self, levels: Tensor) -> Tensor:
        """Return the sampler's weight of each of these levels (N,): 1 for a level that was not drawn last."""
        if self._drawn is None:
            return torch.ones_like(levels)
        drawn, order = self._levels.to(levels).sort()
        place = torch.searchsorted(drawn, levels.contiguous()).clamp(max=len(drawn) - 1)
        weight = self._drawn.weight.to(levels)[order[place]]
        return torch.where(drawn[place] == levels, weight, 1.0)

    def learn(self, losses: Tensor, *, weighted: bool) -> Tensor:
        """Show the losses (B, ...) of the last draw, with or without its weights in them, and return the weights."""
        drawn = self._drawn
        if drawn is None or len(losses) != len(drawn.t):
            expected = 0 if drawn is None else len(drawn.t)
            raise ValueError(
                f"{self._where} learns from the losses of its last draw, {expected} rows, got {tuple(losses.shape)}: "
                "draw once, then show one loss per row, before any mean"
            )
        weight = drawn.weight.to(losses.dtype)
        if torch.is_grad_enabled():  # an evaluation teaches nothing
            per_row = losses.detach().flatten(1).mean(1) if losses.ndim > 1 else losses.detach()
            learn_without_step(self.sampler, drawn, per_row / weight if weighted else per_row)
        return weight

    def state_dict(self) -> dict[str, Any]:
        """Return what the sampler learned."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what a sampler learned."""
        self.sampler.load_state_dict(state)


def follow(sampler: TimestepSampler, device: torch.device) -> None:
    """Move the sampler to the device of the batch."""
    at = next((tensor.device for tensor in sampler.buffers()), device)
    if at != device:
        sampler.to(device)
