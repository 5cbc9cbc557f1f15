"""How much gradient noise a density saves: the accounting behind root-loss and least-noise draws.

For draws with mass q_k in K equal bins and weights 1/(K q_k), the noise of a step's gradient is, up to 1/batch,
V(q) = sum_k m_k / (K**2 q_k), where m_k is the second moment of a single row's gradient in bin k. Uniform draws have
V = mean(m), and no density has less than that of q ~ sqrt(m), (mean sqrt(m))**2. The square of the mean gradient, which
is to be subtracted from each, is left out: it is 1 to 2 % of uniform's noise where it was measured.
"""

import math

import torch
from torch import Tensor

from kairostep.timesteps.histogram import rebin


def noise_ratio(density: Tensor, moments: Tensor) -> Tensor:
    """Return the gradient noise of unbiased draws over that of uniform draws, a scalar: 0.5 is half the noise.

    Args:
        density: Mass of equal bins of t, as `sampler.density()` returns it; rebinned to those of `moments`.
        moments: Second moment of a single row's gradient in each of K equal bins, (K,), in any unit. Squared losses
            do not belong here: for a squared error, the loss itself goes with the moment.
    """
    moments, density = _checked("moments", moments), _checked("density", density)
    return _noise_ratio(density if len(density) == len(moments) else rebin(density, len(moments)), moments)


def least_noise_density(moments: Tensor) -> Tensor:
    """Return the density of least gradient noise, (K,), summing to 1: in proportion to the root of the moments (K,)."""
    root = _checked("moments", moments).sqrt()
    return root / root.sum()


SAVINGS = ("noise_ratio", "equivalent_batch", "gate", "warming_up")  # keys of `noise_savings`


def noise_savings(mass: Tensor, moments: Tensor, batch_size: int, *, warming_up: bool) -> dict[str, Tensor]:
    """Return what draws of this mass (K,) save, as scalars for `diagnostics`.

    `noise_ratio`: gradient noise over that of uniform draws. `equivalent_batch`: the batch that uniform draws need for
    as little. `gate`: 0 if draws are uniform, else 1. `warming_up`: 1 until the sampler has measured what it draws by;
    uniform draws after that mean that the moments are nearly flat in t.
    """
    ratio = _noise_ratio(mass, moments)
    return {
        "noise_ratio": ratio,
        "equivalent_batch": (batch_size or math.nan) / ratio,  # a sampler that was just loaded has seen no batch yet
        "gate": (mass != mass[0]).any().float(),
        "warming_up": torch.full_like(ratio, float(warming_up)),
    }


def _noise_ratio(mass: Tensor, moments: Tensor) -> Tensor:
    """Return the noise ratio without waiting for the device: `noise_ratio` has checked its arguments."""
    mass = (mass / mass.sum()).to(moments)
    noise = (moments / mass).where(moments > 0, 0.0)  # a bin without gradient may go without draws
    return noise.sum() / (len(moments) * moments.sum())


def _checked(name: str, values: Tensor) -> Tensor:
    """Return one value per bin (K,) as floats. Raise unless all are finite and at least 0, and some above."""
    fix = {"moments": "pass the mean of each bin", "density": "pass sampler.density()"}[name]
    if not isinstance(values, Tensor) or values.ndim != 1 or len(values) == 0:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
        raise ValueError(f"{name} must be a tensor with one value per bin, (K,), got {got}: {fix}")
    values = values if values.is_floating_point() else values.float()
    if not (values.isfinite().all() and (values >= 0).all() and (values > 0).any()):
        raise ValueError(f"{name} must be finite, at least 0 and somewhere above it, got {values.tolist()}: {fix}")
    return values
