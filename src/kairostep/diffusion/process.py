"""What x_t is: x_t = alpha(t) x0 + sigma(t) noise.

Time runs the same way everywhere: t = 0 is clean data, t = 1 is pure noise. A process with T steps reads t as step
floor(t T), at most T - 1; step 0 is the least noisy one.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from kairostep.checks import choice, count, positive
from kairostep.diffusion.prediction import Prediction, VPrediction
from kairostep.timesteps.histogram import bin_index
from kairostep.timesteps.representation import represent


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The values of a process at times t that a loss needs, each (N,)."""

    alpha: Tensor
    sigma: Tensor
    log_snr: Tensor
    time: Tensor  # what the network is told
    input_scale: Tensor | None  # of x_t before the network; None leaves it alone


class Process(ABC):
    """A Gaussian noising process over t in [0, 1]; each method takes t (N,) and returns (N,) on its device."""

    __repr__ = represent  # the call that makes it, such as `FlowProcess(time_scale=1.0)`

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor:
        """Return the factor of the data."""

    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor:
        """Return the factor of the noise."""

    @abstractmethod
    def log_snr(self, t: Tensor) -> Tensor:
        """Return log(alpha**2 / sigma**2), which falls with t."""

    @abstractmethod
    def t_at(self, log_snr: Tensor) -> Tensor:
        """Return the t at which the process is nearest to this log-SNR."""

    @abstractmethod
    def vlb_weight(self, t: Tensor) -> Tensor:
        """Return the factor that turns the mean squared error of the noise into a term of the variational bound."""

    def time(self, t: Tensor) -> Tensor:
        """Return the time that the network gets."""
        return t

    def input_scale(self, t: Tensor) -> Tensor:
        """Return the factor on x_t before the network, 1 unless a process has its own."""
        return torch.ones_like(t)

    def at(self, t: Tensor) -> Coefficients:
        """Return all of this at once."""
        scale = None if type(self).input_scale is Process.input_scale else self.input_scale(t)
        return Coefficients(self.alpha(t), self.sigma(t), self.log_snr(t), self.time(t), scale)


class DiscreteProcess(Process):
    """A variance-preserving chain of T steps (Ho et al. 2020), in float64: alpha**2 = alphas_cumprod."""

    def __init__(self, betas: Tensor) -> None:
        betas = torch.as_tensor(betas, dtype=torch.float64, device="cpu")
        if betas.ndim != 1 or len(betas) < 2 or not bool(((betas > 0) & (betas <= 1)).all()):
            span = f"from {betas.min()} to {betas.max()}" if betas.numel() else "none"
            raise ValueError(
                f"betas must be a vector of at least 2 numbers in (0, 1], got shape {tuple(betas.shape)}, {span}: "
                "see DiscreteProcess.linear() for an example"
            )
        if bool((betas[:-1] == 1).any()):
            raise ValueError("betas may reach 1 (zero terminal SNR) in the last step only, got 1 before: lower them")
        self.betas = betas
        self.alphas_cumprod = (1 - betas).cumprod(0)
        self._tables: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    @classmethod
    def from_betas(cls, betas: Tensor) -> "DiscreteProcess":
        """Return the process with these noise variances per step (T,)."""
        return cls(betas)

    @classmethod
    def linear(cls, num_steps: int = 1000, beta_start: float = 1e-4, beta_end: float = 0.02) -> "DiscreteProcess":
        """Return Ho et al.'s schedule."""
        _check_range(num_steps, beta_start, beta_end)
        return cls(torch.linspace(beta_start, beta_end, num_steps, dtype=torch.float64))

    @classmethod
    def quadratic(cls, num_steps: int = 1000, beta_start: float = 1e-4, beta_end: float = 0.02) -> "DiscreteProcess":
        """Return the schedule whose square root of beta is linear."""
        _check_range(num_steps, beta_start, beta_end)
        return cls(torch.linspace(beta_start**0.5, beta_end**0.5, num_steps, dtype=torch.float64).square())

    @classmethod
    def scaled_linear(
        cls, num_steps: int = 1000, beta_start: float = 0.00085, beta_end: float = 0.012
    ) -> "DiscreteProcess":
        """Return the quadratic schedule with Stable Diffusion's range."""
        return cls.quadratic(num_steps, beta_start, beta_end)

    @classmethod
    def cosine(cls, num_steps: int = 1000, offset: float = 0.008, max_beta: float = 0.999) -> "DiscreteProcess":
        """Return Nichol & Dhariwal's schedule."""
        count("num_steps", num_steps, at_least=2, at_most=10**7, example=1000)
        positive("offset", offset, example=0.008)
        if not 0 < max_beta < 1:
            raise ValueError(f"max_beta must be in (0, 1), got {max_beta}: the usual value is 0.999")
        t = torch.linspace(0, 1, num_steps + 1, dtype=torch.float64)
        alpha_bar = ((t + offset) / (1 + offset) * math.pi / 2).cos().square()
        return cls((1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=max_beta))

    def with_zero_terminal_snr(self) -> "DiscreteProcess":
        """Return this process stretched to end in pure noise (Lin et al. 2024); predict v or x0 with it, not noise."""
        root = self.alphas_cumprod.sqrt()
        root = (root - root[-1]) * root[0] / (root[0] - root[-1])
        ratio = root.square()[1:] / root.square()[:-1]
        return DiscreteProcess(1 - torch.cat([root[:1].square(), ratio]))

    @property
    def num_steps(self) -> int:
        """The number of steps T."""
        return len(self.betas)

    def alpha(self, t: Tensor) -> Tensor:
        """Return the factor of the data."""
        return self._read("alpha", t)

    def sigma(self, t: Tensor) -> Tensor:
        """Return the factor of the noise."""
        return self._read("sigma", t)

    def log_snr(self, t: Tensor) -> Tensor:
        """Return log(alpha**2 / sigma**2); -inf where a zero terminal SNR is reached."""
        return self._read("log_snr", t)

    def time(self, t: Tensor) -> Tensor:
        """Return the step 0..T-1, int64."""
        return bin_index(t, self.num_steps)

    def at(self, t: Tensor) -> Coefficients:
        """Return all of this at once: one look-up of the step, where on a GPU each costs several kernels."""
        index = self._index(t)
        alpha, sigma, log_snr = (self._table(name, t)[index] for name in ("alpha", "sigma", "log_snr"))
        return Coefficients(alpha, sigma, log_snr, time=index, input_scale=None)

    def t_at(self, log_snr: Tensor) -> Tensor:
        """Return the middle of the step whose log-SNR is nearest."""
        falling = self._table("log_snr", log_snr)
        between = ((falling[1:] + falling[:-1]) / 2).neg()
        return (torch.searchsorted(between, -log_snr, right=True).to(log_snr.dtype) + 0.5) / self.num_steps

    def vlb_weight(self, t: Tensor, variance: str = "fixed_large") -> Tensor:
        """Return c_t = beta**2 / (2 s**2 (1 - beta) (1 - alpha_bar)): Kim et al., Eq. 7, on the mean squared error.

        The model's variance s**2 is beta ("fixed_large") or the posterior's ("fixed_small"); in step 0, where the
        posterior's is 0, both take the posterior's of step 1.
        """
        choice("variance", variance, ("fixed_large", "fixed_small"))
        if float(self.betas[-1]) == 1:
            raise ValueError(
                "vlb_weight must be finite, but with zero terminal SNR the error of the noise counts infinitely in the "
                "last step: use a process whose last beta is below 1, or another weight"
            )
        return self._read(f"vlb_{variance}", t)

    def _read(self, name: str, t: Tensor) -> Tensor:
        return self._table(name, t)[self._index(t)]

    def _index(self, t: Tensor) -> Tensor:
        if not t.is_floating_point():
            raise ValueError(f"t must be a float in [0, 1], got {t.dtype}: for step i of T pass (i + 0.5) / T")
        return bin_index(t, self.num_steps)

    def _table(self, name: str, like: Tensor) -> Tensor:
        """Return one column of the schedule (T,), copied once to the device and dtype that ask for it."""
        key = (name, like.device, like.dtype)
        if key not in self._tables:
            self._tables[key] = self._column(name).to(like.device, like.dtype)
        return self._tables[key]

    def _column(self, name: str) -> Tensor:
        alpha_bar = self.alphas_cumprod
        if name == "alpha":
            return alpha_bar.sqrt()
        if name == "sigma":
            return (1 - alpha_bar).sqrt()
        if name == "log_snr":
            return alpha_bar.log() - (1 - alpha_bar).log()
        before = torch.cat([alpha_bar.new_ones(1), alpha_bar[:-1]])
        posterior = self.betas * (1 - before) / (1 - alpha_bar)
        variance = (self.betas if name == "vlb_fixed_large" else posterior).clone()
        variance[0] = posterior[1]
        return self.betas.square() / (2 * variance * (1 - self.betas) * (1 - alpha_bar))


class FlowProcess(Process):
    """The straight path x_t = (1 - t) x0 + t noise of flow matching and rectified flow.

    The network gets t * time_scale; diffusers' flow schedulers take 1000.
    """

    END = 1e-4  # how near to both ends, where the bound diverges, `vlb_weight` goes

    def __init__(self, time_scale: float = 1.0) -> None:
        self.time_scale = positive("time_scale", time_scale, example=1000.0)

    def time(self, t: Tensor) -> Tensor:
        """Return t * time_scale."""
        return t * self.time_scale

    def alpha(self, t: Tensor) -> Tensor:
        """Return the factor of the data."""
        return 1 - t

    def sigma(self, t: Tensor) -> Tensor:
        """Return the factor of the noise."""
        return t

    def log_snr(self, t: Tensor) -> Tensor:
        """Return log(alpha**2 / sigma**2): +inf at 0, -inf at 1."""
        return 2 * ((1 - t).log() - t.log())

    def t_at(self, log_snr: Tensor) -> Tensor:
        """Return the t of this log-SNR."""
        return (-log_snr / 2).sigmoid()

    def vlb_weight(self, t: Tensor) -> Tensor:
        """Return half the slope of -log-SNR (Kingma et al. 2021): 1 / (t (1 - t))."""
        t = t.clamp(self.END, 1 - self.END)
        return 1 / (t * (1 - t))


class EDMProcess(Process):
    """x_t = x0 + sigma noise, sigma growing exponentially from `sigma_min` to `sigma_max` (Karras et al. 2022).

    The network is given x_t / sqrt(sigma**2 + sigma_data**2) and log(sigma) / 4; with `process.prediction` as its
    target this is EDM's preconditioning, so that a plain network can be trained.
    """

    def __init__(self, sigma_data: float = 0.5, sigma_min: float = 0.002, sigma_max: float = 80.0) -> None:
        self.sigma_data = positive("sigma_data", sigma_data, example=0.5)
        self.sigma_min = positive("sigma_min", sigma_min, example=0.002)
        self.sigma_max = positive("sigma_max", sigma_max, example=80.0)
        if sigma_min >= sigma_max:
            raise ValueError(f"sigma_min must be below sigma_max, got {sigma_min}, {sigma_max}: EDM's are 0.002, 80")

    @property
    def prediction(self) -> Prediction:
        """EDM's network target: `V` for data of standard deviation `sigma_data`."""
        return VPrediction(self.sigma_data)

    def alpha(self, t: Tensor) -> Tensor:
        """Return the factor of the data, 1."""
        return torch.ones_like(t)

    def sigma(self, t: Tensor) -> Tensor:
        """Return the factor of the noise."""
        return self._log_sigma(t).exp()

    def log_snr(self, t: Tensor) -> Tensor:
        """Return -2 log(sigma)."""
        return -2 * self._log_sigma(t)

    def t_at(self, log_snr: Tensor) -> Tensor:
        """Return the t of this log-SNR."""
        return ((-log_snr / 2 - math.log(self.sigma_min)) / math.log(self.sigma_max / self.sigma_min)).clamp(0, 1)

    def vlb_weight(self, t: Tensor) -> Tensor:
        """Return half the slope of -log-SNR (Kingma et al. 2021), here a constant."""
        return torch.full_like(t, math.log(self.sigma_max / self.sigma_min))

    def time(self, t: Tensor) -> Tensor:
        """Return log(sigma) / 4."""
        return self._log_sigma(t) / 4

    def input_scale(self, t: Tensor) -> Tensor:
        """Return 1 / sqrt(sigma**2 + sigma_data**2), which gives the network's input unit variance."""
        return (self.sigma(t).square() + self.sigma_data**2).rsqrt()

    def _log_sigma(self, t: Tensor) -> Tensor:
        return math.log(self.sigma_min) + t * math.log(self.sigma_max / self.sigma_min)


def _check_range(num_steps: int, beta_start: float, beta_end: float) -> None:
    count("num_steps", num_steps, at_least=2, at_most=10**7, example=1000)
    if not 0 < beta_start <= beta_end < 1:
        raise ValueError(
            f"betas must satisfy 0 < beta_start <= beta_end < 1, got {beta_start} and {beta_end}: "
            "the usual range is 1e-4 to 0.02"
        )
