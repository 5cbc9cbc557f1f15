"""Samplers in k-diffusion's training loop: `sample_density([batch_size], device=device)` gives sigmas.

sample_density = SampleDensity.from_config(ks.RootLoss(), config["model"])  # was K.config.make_sample_density
...
sigma = sample_density([reals.shape[0]], device=device)
losses = sample_density.weighted(model.loss(reals, noise, sigma))  # was model.loss(reals, noise, sigma)
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kairostep.integrations.noise_levels import DrawnLevels, LogNormal, OfTime, ReadProcess
from kairostep.timesteps import TimestepSampler

WITHOUT_WEIGHTING = ("DenoiserWithVariance", "SimpleLossDenoiser")  # their losses never ask for it


class SampleDensity(DrawnLevels):
    """Draws sigmas by a sampler. t is the share of k-diffusion's own draws that are smaller.

    `Uniform` draws as k-diffusion does; `RootLoss` keeps its objective.
    """

    def __init__(self, sampler: TimestepSampler, quantile: OfTime) -> None:
        super().__init__(sampler, quantile, "k-diffusion's sample_density")
        self._in_denoiser = False

    @classmethod
    def from_config(cls, sampler: TimestepSampler, config: dict[str, Any]) -> "SampleDensity":
        """Return the density for the `model` part of a k-diffusion config, as `make_sample_density` reads it."""
        return cls(sampler, quantile_of(config))

    @property
    def process(self) -> ReadProcess:
        """x0 + sigma noise, for samplers and weightings that take a process."""
        return ReadProcess(torch.ones_like, self.quantile, time=self.quantile)

    def __call__(
        self,
        shape: Sequence[int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return one sigma per row, (batch_size,)."""
        if len(shape) != 1:
            raise ValueError(f"shape must be (batch_size,), one sigma per row, got {tuple(shape)}")
        return self.draw(shape[0], device, dtype)

    def weighted(self, losses: Tensor) -> Tensor:
        """Return the losses (B,) of the sigmas drawn last, weighted, and show them to the sampler."""
        if self._in_denoiser:
            raise RuntimeError("losses must be weighted once, but weigh(denoiser) does it already: call learn(losses)")
        return losses * self.learn(losses, weighted=False)

    def weigh(self, denoiser: Any) -> None:
        """Put the sampler's weights into `denoiser.weighting`, for loops that compute their loss out of your reach.

        Show the losses with `learn(losses, weighted=True)`. The constructor of Denoiser refuses a callable.
        """
        own: Callable[[Tensor], Tensor] | None = getattr(denoiser, "weighting", None)
        name = type(denoiser).__name__
        if own is None or name in WITHOUT_WEIGHTING:
            raise ValueError(
                f"denoiser must weigh its loss by `weighting`, as k-diffusion's Denoiser does, got {name}: "
                "use losses = sample_density.weighted(losses)"
            )
        weighting = own

        def both(sigma: Tensor) -> Tensor:
            return weighting(sigma) * self.weight(sigma)

        denoiser.weighting, self._in_denoiser = both, True


def quantile_of(config: dict[str, Any]) -> OfTime:
    """Return the sigma at each t for the `sigma_sample_density` of a model's config."""
    density = config["sigma_sample_density"]
    kind, sigma_data = density["type"], config.get("sigma_data", 1.0)
    if kind == "lognormal":
        return LogNormal(density.get("mean", density.get("loc")), density.get("std", density.get("scale")))
    if kind == "loglogistic":
        loc, scale = density.get("loc", math.log(sigma_data)), density.get("scale", 0.5)
        return _log_logistic(loc, scale, density.get("min_value", 0.0), density.get("max_value", math.inf))
    if kind == "loguniform":
        low = density.get("min_value", config.get("sigma_min"))
        return _log_uniform(low, density.get("max_value", config.get("sigma_max")))
    if kind in ("v-diffusion", "cosine"):
        return _v_diffusion(sigma_data, density.get("min_value", 1e-3), density.get("max_value", 1e3))
    if kind == "split-lognormal":
        loc, left = density.get("mean", density.get("loc")), density.get("std_1", density.get("scale_1"))
        return _split_log_normal(loc, left, density.get("std_2", density.get("scale_2")))
    if kind == "cosine-interpolated":
        return _cosine_interpolated(config, density)
    raise ValueError(
        "sigma_sample_density must be of type 'lognormal', 'loglogistic', 'loguniform', 'v-diffusion', 'cosine', "
        f"'split-lognormal' or 'cosine-interpolated', got {kind!r}: pass SampleDensity(sampler, quantile=...) "
        "the sigma under which a share t of the draws lies"
    )


def _log_logistic(loc: float, scale: float, min_value: float, max_value: float) -> OfTime:
    low, high = (
        float(torch.sigmoid((torch.tensor(value, dtype=torch.float64).log() - loc) / scale))
        for value in (min_value, max_value)
    )

    def quantile(t: Tensor) -> Tensor:
        return ((low + t * (high - low)).logit() * scale + loc).exp()

    return quantile


def _log_uniform(min_value: float, max_value: float) -> OfTime:
    low, high = math.log(min_value), math.log(max_value)

    def quantile(t: Tensor) -> Tensor:
        return (low + t * (high - low)).exp()

    return quantile


def _v_diffusion(sigma_data: float, min_value: float, max_value: float) -> OfTime:
    low, high = math.atan(min_value / sigma_data), math.atan(max_value / sigma_data)

    def quantile(t: Tensor) -> Tensor:
        return (low + t * (high - low)).tan() * sigma_data

    return quantile


def _split_log_normal(loc: float, left: float, right: float) -> OfTime:
    share = left / (left + right)  # of draws below exp(loc)

    def quantile(t: Tensor) -> Tensor:
        below = left * torch.special.ndtri((t / (2 * share)).clamp(max=0.5))
        above = right * torch.special.ndtri(((t - share) / (2 * (1 - share)) + 0.5).clamp(min=0.5))
        sigma: Tensor = (loc + torch.where(t < share, below, above)).exp()
        return sigma

    return quantile


def _cosine_interpolated(config: dict[str, Any], density: dict[str, Any]) -> OfTime:
    """Return simple diffusion's shifted cosine, which moves from one shift at low noise to another at high noise."""
    sigma_data, size = config.get("sigma_data", 1.0), max(config["input_size"])
    ends = [
        density.get("min_value", min(config["sigma_min"], 1e-3)),
        density.get("max_value", max(config["sigma_max"], 1e3)),
    ]
    image_d = density.get("image_d", size)
    ratios = [density.get("noise_d_high", size) / image_d, density.get("noise_d_low", 32) / image_d]

    def shifted(t: Tensor, ratio: float) -> Tensor:
        low, high = (math.atan(end / sigma_data * ratio) for end in ends)
        return (low + t * (high - low)).tan().log() - math.log(ratio)

    def quantile(t: Tensor) -> Tensor:
        sigma: Tensor = torch.lerp(shifted(t, ratios[0]), shifted(t, ratios[1]), t).exp() * sigma_data
        return sigma

    return quantile
