"""Samplers that never change: a density stated once, drawn from by its inverse CDF."""

import math
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from kairostep.checks import finite, positive
from kairostep.registry import samplers
from kairostep.timesteps.draws import Draws
from kairostep.timesteps.histogram import rebin, with_floor
from kairostep.timesteps.sampler import Timesteps, TimestepSampler, draw

NUM_BINS = 4000  # of a continuous density: finer than any discrete process in use, a multiple of the usual 1000
UNBIASED_FLOOR = 0.1  # share of uniform draws under `unbiased`: without it, weights of 1/density have infinite variance


class LogSNR(Protocol):
    """The part of a diffusion process that a sampler needs: log-SNR, which falls as t goes from 0 to 1."""

    def log_snr(self, t: Tensor) -> Tensor:
        """Return log(alpha**2 / sigma**2) at t (N,)."""
        ...


class DrawOptions(TypedDict, total=False):
    """The options of every density sampler.

    Attributes:
        unbiased: Weight by 1/density, which keeps the objective. One draw in ten is then uniform, so that no weight
            exceeds 10.
        stratified: Spread each batch, over all ranks, evenly over the density.
        seed: Draws are a function of (seed, step, row of the batch over all ranks).
    """

    unbiased: bool
    stratified: bool
    seed: int


@samplers.register("tabulated")
class Tabulated(TimestepSampler):
    """Draws from any histogram over [0, 1].

    Args:
        mass: The mass of equal bins of [0, 1], (K,). It need not sum to 1.
        unbiased: As in `DrawOptions`, like the two below.
        stratified: Spread each batch evenly over the density.
        seed: Of the draws.
    """

    mass: Tensor

    def __init__(
        self,
        mass: Tensor | tuple[float, ...],
        *,
        unbiased: bool = False,
        stratified: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        mass = torch.as_tensor(mass).double()
        wrong = mass[~((mass >= 0) & (mass < math.inf))]
        if mass.ndim != 1 or len(wrong) or not float(mass.sum()) > 0:
            got = f"{float(wrong[0])}" if len(wrong) else f"shape {tuple(mass.shape)} with sum {float(mass.sum())}"
            raise ValueError(
                f"mass must be a vector of finite numbers, none negative and not all 0, got {got}: "
                "pass for instance torch.ones(100)"
            )
        self.unbiased = unbiased
        self.draws = Draws(seed, stratified=stratified)
        mass = with_floor(mass, UNBIASED_FLOOR if unbiased else 0.0)
        self.register_buffer("mass", mass.float(), persistent=False)  # an argument, not something learned

    def sample(self, x0: Tensor) -> Timesteps:
        """Return one time and one weight for each row of x0 (B, ...)."""
        return draw(self.mass, self.draws(x0), unbiased=self.unbiased)

    def density(self, num_bins: int = 100) -> Tensor:
        """Return where the draws go: (num_bins,), summing to 1."""
        return rebin(self.mass, num_bins)


@samplers.register("uniform")
class Uniform(Tabulated):
    """Draws every time alike: the baseline."""

    def __init__(self, **options: Unpack[DrawOptions]) -> None:
        super().__init__(torch.ones(1), **options)

    def sample(self, x0: Tensor) -> Timesteps:
        """Return one time for each row of x0 (B, ...), of weight 1."""
        t = self.draws(x0)
        return Timesteps(t, torch.ones_like(t))


@samplers.register("logit_normal")
class LogitNormal(Tabulated):
    """Draws the sigmoid of a normal, as Stable Diffusion 3 does.

    t = sigmoid(z) with z ~ N(mean, std**2) (Esser et al. 2024). Kim et al. call it "log-normal".
    """

    def __init__(self, mean: float = 0.0, std: float = 1.0, **options: Unpack[DrawOptions]) -> None:
        finite("mean", mean)
        positive("std", std)
        edges = torch.linspace(0, 1, NUM_BINS + 1, dtype=torch.float64)
        super().__init__(torch.special.ndtr((edges.logit() - mean) / std).diff(), **options)
        self.mean, self.std = mean, std


@samplers.register("mode")
class Mode(Tabulated):
    """Draws more or less often in the middle of [0, 1].

    t = 1 - u - scale (cos(pi u / 2)**2 - 1 + u) with u uniform (Esser et al. 2024). A positive scale favours the
    middle, a negative one both ends.
    """

    def __init__(self, scale: float = 1.29, **options: Unpack[DrawOptions]) -> None:
        if not -1 <= scale <= 2 / (math.pi - 2):
            raise ValueError(
                f"scale must be in [-1, 2 / (pi - 2) = 1.7519], where t falls as u rises, got {scale}: pass scale=1.29"
            )
        edges = torch.linspace(0, 1, NUM_BINS + 1, dtype=torch.float64)
        low, high = torch.zeros_like(edges), torch.ones_like(edges)
        for _ in range(60):  # t(u) falls: bisect for the u of each edge
            u = (low + high) / 2
            above = 1 - u - scale * ((math.pi * u / 2).cos().square() - 1 + u) > edges
            low, high = torch.where(above, u, low), torch.where(above, high, u)
        super().__init__(-((low + high) / 2).diff(), **options)
        self.scale = scale


@samplers.register("beta")
class FixedBeta(Tabulated):
    """Draws from Beta(a, b)."""

    def __init__(self, a: float, b: float, **options: Unpack[DrawOptions]) -> None:
        edges = torch.linspace(0, 1, NUM_BINS + 1, dtype=torch.float64)
        super().__init__(beta_cdf(edges, positive("a", a), positive("b", b)).diff(), **options)
        self.a, self.b = a, b


@samplers.register("log_normal_sigma")
class LogNormalSigma(Tabulated):
    """Draws log sigma from a normal, as EDM does, on any process.

    log(sigma / alpha) ~ N(mean, std**2) (Karras et al. 2022). Mass outside the range of the process goes to its
    nearest end.
    """

    def __init__(self, process: LogSNR, mean: float = -1.2, std: float = 1.2, **options: Unpack[DrawOptions]) -> None:
        finite("mean", mean)
        positive("std", std)
        between = log_snr_between_bins(process)
        super().__init__(mass_from_inner_cdf(torch.special.ndtr((-between / 2 - mean) / std)), **options)
        self.process, self.mean, self.std = process, mean, std


@samplers.register("laplace")
class Laplace(Tabulated):
    """Draws log-SNR from a Laplace density, on any process.

    log-SNR ~ Laplace(mean, scale) (Hang et al. 2024, arXiv 2407.03297). Mass outside the range of the process goes to
    its nearest end.
    """

    def __init__(self, process: LogSNR, mean: float = 0.0, scale: float = 0.5, **options: Unpack[DrawOptions]) -> None:
        finite("mean", mean)
        z = (mean - log_snr_between_bins(process)) / positive("scale", scale)
        super().__init__(mass_from_inner_cdf(torch.where(z < 0, z.exp() / 2, 1 - (-z).exp() / 2)), **options)
        self.process, self.mean, self.scale = process, mean, scale


def log_snr_between_bins(process: LogSNR) -> Tensor:
    """Return log-SNR at the inner edges of the bins (K-1,); for a process of steps, see `between_steps`."""
    if not hasattr(process, "log_snr"):
        raise ValueError(
            f"process must have log_snr(t), got {process!r}: pass for instance ks.DiscreteProcess.linear()"
        )
    num_steps = getattr(process, "num_steps", None)
    if num_steps is None:
        return process.log_snr(torch.arange(1, NUM_BINS, dtype=torch.float64) / NUM_BINS)
    log_snr = process.log_snr((torch.arange(num_steps, dtype=torch.float64) + 0.5) / num_steps)
    return between_steps(log_snr)


def between_steps(log_snr: Tensor) -> Tensor:
    """Return log-SNR halfway between neighbouring steps (T,) -> (T-1,).

    A first or last step at infinite log-SNR has no halfway. It begins as far beyond its finite neighbour as that one
    reaches on its other side, so that the infinite step gets the tail.
    """
    between = (log_snr[1:] + log_snr[:-1]) / 2
    known = log_snr.isfinite().nonzero().flatten().tolist()
    if not known:
        raise ValueError(f"log-SNR must be finite at one step at least, got {log_snr}: pass another process")
    first, last = known[0], known[-1]
    if first > 0:
        between[first - 1] = log_snr[first] + (log_snr[first] - log_snr[min(first + 1, last)]) / 2
    if last < len(between):
        between[last] = log_snr[last] + (log_snr[last] - log_snr[max(last - 1, first)]) / 2
    return between


def mass_from_inner_cdf(below: Tensor) -> Tensor:
    """Return the mass of K bins of t from the share of draws left of each inner edge (K-1,)."""
    return torch.cat([below.new_zeros(1), below, below.new_ones(1)]).diff().clamp(min=0)


def beta_cdf(x: Tensor, a: float, b: float) -> Tensor:
    """Return the regularised incomplete beta function I_x(a, b) for x in [0, 1], float64.

    In z = logit(x) the density is smooth and falls off exponentially on both sides: the trapezoidal rule is accurate.
    """
    log_norm = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    low = (math.log(1e-18 * a) + log_norm) / a  # below and above, less than 1e-18 of the mass
    high = -(math.log(1e-18 * b) + log_norm) / b
    z = torch.linspace(low, high, 200_001, dtype=torch.float64)
    pdf = (a * torch.nn.functional.logsigmoid(z) + b * torch.nn.functional.logsigmoid(-z) - log_norm).exp()
    cdf = torch.cumulative_trapezoid(pdf, z)
    cdf = torch.cat([cdf.new_zeros(1), cdf])
    position = ((x.logit() - low) / (high - low) * 200_000).clamp(0, 200_000)
    index = position.floor().clamp(max=199_999).long()
    return torch.lerp(cdf[index], cdf[index + 1], position - index) / cdf[-1]
