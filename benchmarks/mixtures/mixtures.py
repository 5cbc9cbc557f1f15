"""Gaussian mixtures whose best prediction is known at every t, and what a network falls short of it by."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

import kairostep as ks
from kairostep.diffusion.process import Process

NUM_COMPONENTS, SMALLEST_SCALE, LARGEST_SCALE = 8, 0.1, 0.6  # scales of each component and axis, before unit variance
LOG_SNR_LIMIT = 10.0  # of the average over log-SNR: flow goes on to infinity
NUM_LEVELS = 16  # of log-SNR
METRICS = ("noise", "bound", "log-SNR")
"""Excess of the mean squared error of the noise: averaged over uniform t; with the weights of the variational bound;
its geometric mean over levels of log-SNR, which counts all levels alike (a plain mean would be the bound again)."""

Predict = Callable[[Tensor, Tensor], Tensor]
"""`predict(xt, time)`: outputs (S, N, D) for x_t (S, N, D) at what the network is told of the time (S, N)."""


@dataclass(frozen=True)
class Mixture:
    """A mixture of K Gaussians with diagonal covariances: zero mean and unit variance along each axis."""

    share: Tensor  # (K,)
    mean: Tensor  # (K, D)
    variance: Tensor  # (K, D)

    @classmethod
    def random(cls, num_axes: int, seed: int = 0) -> "Mixture":
        """Return the mixture of this seed."""
        generator = torch.Generator().manual_seed(1000 * seed + num_axes)
        share = (0.5 + torch.rand(NUM_COMPONENTS, generator=generator)).double()
        share = share / share.sum()
        mean = torch.randn(NUM_COMPONENTS, num_axes, generator=generator).double()
        scale = torch.rand(NUM_COMPONENTS, num_axes, generator=generator).double()
        variance = (SMALLEST_SCALE * (LARGEST_SCALE / SMALLEST_SCALE) ** scale).square()
        mean = mean - share @ mean
        total = share @ (mean.square() + variance)  # (D,)
        return cls(share, mean / total.sqrt(), variance / total)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return data (*shape, D) in float32."""
        uniform = torch.rand(shape, generator=generator)
        component = torch.searchsorted(self.share.cumsum(0).float(), uniform).clamp(max=len(self.share) - 1)
        noise = torch.randn(*shape, self.mean.shape[1], generator=generator)
        return torch.addcmul(self._mean[component], self._scale[component], noise)

    def posterior_mean(self, xt: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return E[x0 | x_t] for x_t (N, D) at alpha and sigma (N,), in float64."""
        xt, alpha, sigma = xt.double(), alpha.double()[:, None, None], sigma.double()[:, None, None]
        total = alpha.square() * self.variance + sigma.square()  # (N, K, D) of x_t given the component
        around = xt[:, None] - alpha * self.mean
        log_share = self.share.log() - (around.square() / total + total.log()).sum(2) / 2  # (N, K)
        means = self.mean + alpha * self.variance / total * around
        return (log_share.softmax(1)[..., None] * means).sum(1)  # (N, D)

    @cached_property
    def _mean(self) -> Tensor:
        return self.mean.float()

    @cached_property
    def _scale(self) -> Tensor:
        return self.variance.sqrt().float()


@dataclass(frozen=True)
class Setting:
    """A process on a mixture."""

    name: str
    process: Process
    prediction: ks.Prediction
    mixture: Mixture

    @property
    def num_axes(self) -> int:
        """The number of dimensions D."""
        return self.mixture.mean.shape[1]

    def best(self, xt: Tensor, t: Tensor) -> Tensor:
        """Return the prediction (N, D) of least error for x_t (N, D) at t (N,)."""
        alpha, sigma = self.process.alpha(t), self.process.sigma(t)
        x0 = self.mixture.posterior_mean(xt, alpha, sigma)
        alpha, sigma = alpha.double()[:, None], sigma.double()[:, None]
        return self.prediction.target(x0, (xt.double() - alpha * x0) / sigma, alpha, sigma)


def setting_of(name: str) -> Setting:
    """Return the setting of a name such as "linear-8" or "flow-32"."""
    kind, _, num_axes = name.partition("-")
    processes = {"linear": ks.DiscreteProcess.linear, "cosine": ks.DiscreteProcess.cosine, "flow": ks.FlowProcess}
    if kind not in processes or not num_axes.isdigit():
        raise ValueError(f"a setting must be linear, cosine or flow and a dimension, got {name!r}: for instance flow-8")
    prediction = ks.VELOCITY if kind == "flow" else ks.EPSILON
    return Setting(name, processes[kind](), prediction, Mixture.random(int(num_axes)))


# Where the excess is measured: for each metric its own stratified times, so that each is a plain mean.


@dataclass(frozen=True)
class Examination:
    """Fixed x_t, another draw for each seed, and the best predictions of them: N rows for each of the three metrics."""

    xt: Tensor  # (S, 3 N, D)
    time: Tensor  # (S, 3 N) what the network is told
    best: Tensor  # (S, 3 N, D)
    factor: Tensor  # (S, 3 N) from the mean square of the prediction's excess to a summand of its metric

    @classmethod
    def of(cls, setting: Setting, num_seeds: int, num_rows: int) -> "Examination":
        """Return the examination of a setting."""
        generator = torch.Generator().manual_seed(1)
        parts = [part(setting, num_seeds, num_rows, generator) for part in (_noise, _bound, _log_snr)]
        t, factor = (torch.cat(columns, 1) for columns in zip(*parts, strict=True))  # (S, 3 N)
        x0 = setting.mixture.draw(tuple(t.shape), generator)
        noise = torch.randn(x0.shape, generator=generator)
        at = setting.process.at(t.flatten())
        xt = at.alpha.view(*t.shape, 1) * x0 + at.sigma.view(*t.shape, 1) * noise
        chunks = zip(xt.flatten(0, 1).split(4096), t.flatten().split(4096), strict=True)
        best = torch.cat([setting.best(*chunk).float() for chunk in chunks]).view_as(xt)
        return cls(xt, at.time.view_as(t), best, factor.float())

    @torch.no_grad()
    def excess(self, predict: Predict) -> Tensor:
        """Return the three metrics of each seed, (S, 3)."""
        error = (predict(self.xt, self.time) - self.best).square().mean(2) * self.factor
        noise, bound, by_log_snr = error.view(len(error), len(METRICS), -1).unbind(1)  # (S, N) each
        by_level = by_log_snr.view(len(error), NUM_LEVELS, -1).mean(2)  # (S, L)
        return torch.stack([noise.mean(1), bound.mean(1), by_level.log().mean(1).exp()], 1)


def _strata(num_seeds: int, num_rows: int, generator: torch.Generator) -> Tensor:
    """Return (S, N) numbers, one in each of N equal parts of [0, 1]."""
    jitter = torch.rand(num_seeds, num_rows, generator=generator, dtype=torch.float64)
    return (torch.arange(num_rows) + jitter) / num_rows


def _error_in(metric: ks.Prediction, setting: Setting, t: Tensor) -> Tensor:
    """Return the squared error of `metric` that comes with a squared error of 1 in what is predicted, at t."""
    log_snr = setting.process.log_snr(t)
    return (setting.prediction.log_x0_error(log_snr) - metric.log_x0_error(log_snr)).exp()


def _noise(setting: Setting, num_seeds: int, num_rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return times and factors of the squared error of the noise, averaged over uniform t."""
    t = _strata(num_seeds, num_rows, generator).float().clamp(1e-6, 1 - 1e-6)
    return t, _error_in(ks.EPSILON, setting, t)


def _bound(setting: Setting, num_seeds: int, num_rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return times in proportion to the weights of the variational bound, and factors that make the mean the bound."""
    edge = torch.linspace(-14, 14, 20001, dtype=torch.float64).sigmoid()  # fine at both ends, where flow's weights grow
    mass = setting.process.vlb_weight((edge[1:] + edge[:-1]) / 2) * edge.diff()
    below = torch.nn.functional.pad(mass.cumsum(0), (1, 0))
    u = _strata(num_seeds, num_rows, generator) * below[-1]
    cell = torch.searchsorted(below, u, right=True).clamp(1, len(mass)) - 1
    t = torch.lerp(edge[cell], edge[cell + 1], ((u - below[cell]) / mass[cell]).clamp(0, 1)).float()
    return t, below[-1] * _error_in(ks.EPSILON, setting, t)


def _log_snr(setting: Setting, num_seeds: int, num_rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return times uniform in log-SNR, within what the process reaches, and factors for the noise."""
    ends = setting.process.log_snr(torch.tensor([1 - 1e-9, 1e-9], dtype=torch.float64))
    low, high = ends.clamp(-LOG_SNR_LIMIT, LOG_SNR_LIMIT)
    t = setting.process.t_at(torch.lerp(low, high, _strata(num_seeds, num_rows, generator))).float()
    return t, _error_in(ks.EPSILON, setting, t)


# What is generated, against data.


@torch.no_grad()
def generate(setting: Setting, predict: Predict, x: Tensor, num_steps: int) -> Tensor:
    """Return samples (S, N, D) from noise x (S, N, D) by DDIM, which for a flow is Euler's method."""
    for i in range(num_steps):
        t = torch.tensor([1 - i / num_steps, 1 - (i + 1) / num_steps]).clamp(0, 1 - 1e-6)
        at = setting.process.at(t)
        alpha, sigma = at.alpha, at.sigma
        output = predict(x, at.time[0].expand(x.shape[:2]))
        x0 = setting.prediction.to_x0(output, x, alpha[0], sigma[0])
        x = x0 if i + 1 == num_steps else alpha[1] * x0 + sigma[1] / sigma[0] * (x - alpha[0] * x0)
    return x


@dataclass(frozen=True)
class Slices:
    """The data as seen along fixed directions: what the sliced Wasserstein distance compares with."""

    direction: Tensor  # (D, P) of unit length
    quantiles: Tensor  # (P, N) of the data along each

    @classmethod
    def of(cls, mixture: Mixture, num_samples: int, num_directions: int = 64, num_draws: int = 16) -> "Slices":
        """Return the slices to compare `num_samples` with, from `num_draws` times as many data."""
        generator = torch.Generator().manual_seed(2)
        direction = torch.randn(mixture.mean.shape[1], num_directions, generator=generator)
        direction = direction / direction.norm(dim=0)
        ordered = (mixture.draw((num_draws * num_samples,), generator) @ direction).T.sort(dim=1).values
        return cls(direction, ordered.view(num_directions, num_samples, num_draws).mean(2))

    def distance(self, samples: Tensor) -> Tensor:
        """Return the sliced 2-Wasserstein distance of the samples (S, N, D) of each seed, (S,)."""
        ordered = (samples @ self.direction).transpose(1, 2).sort(dim=2).values  # (S, P, N)
        return (ordered - self.quantiles).square().mean((1, 2)).sqrt()
