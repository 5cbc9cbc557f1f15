"""diffusers: a sampler that draws a noise scheduler's own timesteps, and diffusers' densities and weights with checks.

    sampler = Scheduled(ks.RootLoss(), noise_scheduler)
    ...
    drawn = sampler.sample(latents)
    noisy = noise_scheduler.add_noise(latents, noise, drawn.timesteps)
    losses = F.mse_loss(unet(noisy, drawn.timesteps).sample, noise, reduction="none").mean(dim=[1, 2, 3])
    (losses * drawn.weight).mean().backward()
    with sampler.observe(latents, drawn, losses):
        optimizer.step()

The noise schedule, the prediction type and the direction of time are read from the scheduler. If one of them cannot be
read, the adapter raises. The functions named compute_* are called like those of diffusers.training_utils.
"""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kairostep.checks import choice
from kairostep.diffusion import EPSILON, VELOCITY, X0, DiscreteProcess, Prediction, V, Weighting
from kairostep.diffusion.process import Process
from kairostep.diffusion.weighting import LOG_SNR_LIMIT
from kairostep.integrations.foreign_loop import give_loss_weight, require_sampler
from kairostep.integrations.noise_levels import FlowSteps
from kairostep.timesteps import LossAt, Tabulated, Timesteps, TimestepSampler
from kairostep.timesteps.histogram import BELOW_ONE
from kairostep.timesteps.shown import check_loss_at, check_shown

PREDICTIONS: dict[str, Prediction] = {"epsilon": EPSILON, "sample": X0, "v_prediction": V}
SCHEMES = ("sigma_sqrt", "logit_normal", "mode", "cosmap", "none")  # of diffusers' scripts for flow models
FRESH = "pass one fresh from its config, type(scheduler).from_config(scheduler.config)"


def process_of(scheduler: Any, *, mu: float | None = None) -> Process:
    """Return the process by which this scheduler adds noise, a step for each of its training timesteps.

    Args:
        scheduler: A scheduler of diffusers.
        mu: The shift of a flow scheduler with `use_dynamic_shifting`, as its `set_timesteps` takes it.
    """
    if _is_flow(scheduler):
        return _flow_steps(scheduler, mu)
    if mu is not None:
        raise ValueError(f"mu belongs to flows with dynamic shifting, got {mu} for {_name(scheduler)}: leave it out")
    alpha_bar = scheduler.alphas_cumprod.detach().cpu().double()
    betas = getattr(scheduler, "betas", None)
    if betas is not None:  # the better source, where they agree: alpha_bar has float32's errors, or 2**-24 for a last 0
        process = DiscreteProcess(betas)
        if torch.allclose(process.alphas_cumprod, alpha_bar, rtol=1e-4, atol=1e-7):
            return process
    ratio = alpha_bar / torch.cat([alpha_bar.new_ones(1), alpha_bar[:-1]])
    if not bool((ratio < 1).all()):
        raise ValueError(f"alphas_cumprod must fall from step to step, those of {_name(scheduler)} do not: {FRESH}")
    return DiscreteProcess(1 - ratio)


def prediction_of(scheduler: Any) -> Prediction:
    """Return what a network trained with this scheduler predicts: noise - x0 for flow schedulers."""
    if _is_flow(scheduler):
        return VELOCITY
    return PREDICTIONS[choice("prediction_type", scheduler.config.get("prediction_type"), PREDICTIONS)]


def _is_flow(scheduler: Any) -> bool:
    """Return whether this is a flow-matching scheduler, or False for one with alphas_cumprod; raise for any other."""
    config = getattr(scheduler, "config", {})
    if config.get("use_flow_sigmas") or config.get("prediction_type") == "flow_prediction":
        raise ValueError(
            f"a flow has to be read from its own scheduler: {_name(scheduler)} keeps the alphas_cumprod of another "
            "process beside its flow sigmas: train with FlowMatchEulerDiscreteScheduler(shift=...)"
        )
    if not hasattr(scheduler, "alphas_cumprod") and not hasattr(scheduler, "scale_noise"):
        raise ValueError(
            f"a scheduler must have alphas_cumprod or, for a flow, scale_noise, got {_name(scheduler)}, whose process "
            "cannot be read: say what it is yourself, for instance ks.Objective(ks.EDMProcess(), ...)"
        )
    return not hasattr(scheduler, "alphas_cumprod")


def _flow_steps(scheduler: Any, mu: float | None) -> FlowSteps:
    config, sigmas, times = scheduler.config, scheduler.sigmas, scheduler.timesteps
    num_steps: int = config.num_train_timesteps
    if config.get("invert_sigmas"):
        raise ValueError(
            f"time must run from data to noise, but invert_sigmas of {_name(scheduler)} turns it round where images "
            "are made and not in its training table: pass the network's times yourself, and use the sampler alone"
        )
    if times is None or len(times) != num_steps or len(sigmas) != num_steps:
        raise ValueError(f"{_name(scheduler)} must be as made, got one after set_timesteps, for making images: {FRESH}")
    if config.get("use_dynamic_shifting", False) != (mu is not None):
        raise ValueError(
            f"mu must be given exactly where use_dynamic_shifting is set, got mu={mu} for {_name(scheduler)}: pass "
            "that of your resolution, or the one that shifts nothing (exponential: 0, linear: 1), as Flux scripts do"
        )
    if mu is not None:
        sigmas = scheduler.time_shift(mu, 1.0, sigmas)
        times = sigmas * num_steps
    if not bool((sigmas.diff() < 0).all()) or float(sigmas[0]) > 1 or float(sigmas[-1]) <= 0:
        raise ValueError(f"sigmas must fall from at most 1 to above 0, those of {_name(scheduler)} do not: {FRESH}")
    return FlowSteps(sigmas.flip(0), times.flip(0))


def _name(scheduler: Any) -> str:
    return type(scheduler).__name__


@dataclass(frozen=True, slots=True)
class ScheduledTimesteps(Timesteps):
    """Drawn timesteps of a scheduler, with their weights."""

    timesteps: Tensor  # (B,) what the network and the scheduler's add_noise or scale_noise take
    sigmas: Tensor | None  # (B,) of a flow scheduler


class Scheduled(TimestepSampler):
    """A sampler that draws the timesteps of a noise scheduler, and calls `loss_at` with them.

    Args:
        sampler: The sampler that draws.
        scheduler: A scheduler of diffusers.
        mu: The shift of a flow scheduler with `use_dynamic_shifting`, as its `set_timesteps` takes it.
        snr_weighted: The squared error is multiplied by SNR if the network predicts the image
            (`prediction_type="sample"`), as in diffusers' train_unconditional.py. A `RootLoss` without a loss weight
            then gets this one.
    """

    def __init__(
        self, sampler: TimestepSampler, scheduler: Any, *, mu: float | None = None, snr_weighted: bool = False
    ) -> None:
        super().__init__()
        self.sampler = require_sampler(sampler)
        self.process, self.prediction = process_of(scheduler, mu=mu), prediction_of(scheduler)
        self.uses_x0, self.uses_loss_at, self.num_bins = sampler.uses_x0, sampler.uses_loss_at, sampler.num_bins
        if snr_weighted and self.prediction is X0:
            give_loss_weight(sampler, partial(_snr, self.process))
        if isinstance(self.process, DiscreteProcess):
            _check_added_noise(scheduler, self.process)
            if float(self.process.alphas_cumprod[-1]) == 0 and self.prediction is EPSILON:
                raise ValueError(
                    "at zero terminal SNR a prediction of the noise says nothing about the image: make the scheduler "
                    'with prediction_type="v_prediction", or without rescale_betas_zero_snr'
                )

    @property
    def inner(self) -> tuple[TimestepSampler, ...]:
        """The sampler that draws."""
        return (self.sampler,)

    def sample(self, x0: Tensor) -> ScheduledTimesteps:
        """Return one timestep and one weight for each row of the clean batch x0 (B, ...)."""
        drawn = self.sampler.sample(x0)
        sigmas = self.process.sigma(drawn.t) if isinstance(self.process, FlowSteps) else None
        return ScheduledTimesteps(drawn.t, drawn.weight, self.process.time(drawn.t), sigmas)

    def observe(
        self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None
    ) -> AbstractContextManager[None]:
        """Wrap the optimizer's step. Only samplers with `uses_loss_at` need `loss_at(rows, timesteps)`."""
        check_shown(x0, drawn, losses)
        check_loss_at(self.sampler, loss_at, "loss_at(rows, timesteps)")
        at = loss_at and (lambda rows, t: loss_at(rows, self.process.time(t)))
        return self.sampler.observe(x0, drawn, losses.detach(), at)

    def show(self, x0: Tensor, drawn: Timesteps, losses: Tensor) -> None:
        """Show a micro-batch of the next step: each but the last, which `observe` shows."""
        self.sampler.show(x0, drawn, losses)

    def density(self, num_bins: int = 100) -> Tensor:
        """Return where the draws go now, from the least noisy timesteps to the noisiest: (num_bins,), summing to 1."""
        return self.sampler.density(num_bins)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the sampler's diagnostics."""
        return self.sampler.diagnostics()


def _check_added_noise(scheduler: Any, process: DiscreteProcess) -> None:
    """Raise if the scheduler's noise differs from its table. A new solver has its table in the opposite order."""
    if not hasattr(scheduler, "add_noise"):
        return
    steps = torch.tensor([0, process.num_steps // 2, process.num_steps - 1])
    expected = process.alphas_cumprod[steps].sqrt().float()
    try:
        alpha = scheduler.add_noise(torch.ones(3), torch.zeros(3), steps)
        sigma = scheduler.add_noise(torch.zeros(3), torch.ones(3), steps)
        share = alpha / torch.hypot(alpha, sigma)
    except IndexError:  # a timestep that it does not have
        share = torch.full_like(expected, torch.nan)
    if not torch.allclose(share, expected, atol=0.02):
        raise ValueError(
            f"add_noise of {_name(scheduler)} must add the noise that its alphas_cumprod states: the share of the data "
            f"at steps {steps.tolist()} should be {expected.tolist()}, got {share.tolist()}: "
            "train with DDPMScheduler.from_config(scheduler.config)"
        )


def compute_density_for_timestep_sampling(
    weighting_scheme: str | Tabulated,
    batch_size: int,
    logit_mean: float | None = None,
    logit_std: float | None = None,
    mode_scale: float | None = None,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return u (B,) in [0, 1), a position in the *falling* table of a flow scheduler: 0 is noise, 1 is data.

    The names of diffusers' scripts give bitwise what diffusers gives; a positive logit_mean moves toward the data. You
    may also pass a fixed sampler of ours, which draws t = 1 - u. A sampler that learns or weights needs `Scheduled`.
    """
    if isinstance(weighting_scheme, TimestepSampler):
        if generator is not None:
            raise ValueError("a sampler draws by its own seed, got a generator too: leave it out")
        if not isinstance(weighting_scheme, Tabulated) or weighting_scheme.unbiased:
            raise ValueError(
                f"this function returns draws alone, but {type(weighting_scheme).__name__} learns or weighs its draws: "
                "use Scheduled(sampler, noise_scheduler), or a fixed density without unbiased=True"
            )
        return (1 - weighting_scheme.sample(torch.empty(batch_size, 0, device=device)).t).clamp(max=BELOW_ONE)
    choice("weighting_scheme", weighting_scheme, SCHEMES)
    if weighting_scheme == "logit_normal":
        if logit_mean is None or logit_std is None:
            raise ValueError(f"logit_normal needs both, got {logit_mean=} and {logit_std=}: the usual ones are 0 and 1")
        u = torch.normal(logit_mean, logit_std, (batch_size,), device=device, generator=generator).sigmoid()
    else:
        u = torch.rand(batch_size, device=device, generator=generator)
        if weighting_scheme == "mode":
            if mode_scale is None:
                raise ValueError("mode needs mode_scale, got None: the usual one is 1.29")
            u = 1 - u - mode_scale * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)
    return u.clamp(0, BELOW_ONE)  # (u * T).long() stays below T


def compute_loss_weighting_for_sd3(weighting_scheme: str | Weighting, sigmas: Tensor | None = None) -> Tensor:
    """Return the factor on a flow model's squared error at these sigmas. A weighting of ours may replace the name."""
    if sigmas is None or not sigmas.is_floating_point():
        got = None if sigmas is None else sigmas.dtype
        raise ValueError(f"sigmas must be the noise of a flow, floats in (0, 1], got {got}: pass drawn.sigmas")
    if callable(weighting_scheme):
        return _weighed(weighting_scheme, 2 * ((1 - sigmas).log() - sigmas.log()), VELOCITY)
    choice("weighting_scheme", weighting_scheme, SCHEMES)
    if weighting_scheme == "sigma_sqrt":
        return (sigmas**-2.0).float()
    if weighting_scheme == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
    return torch.ones_like(sigmas)


def compute_snr(noise_scheduler: Any, timesteps: Tensor) -> Tensor:
    """Return alpha**2 / sigma**2 at these timesteps, float32; never 0 or infinite, so that quotients stay finite."""
    is_flow = _is_flow(noise_scheduler)
    if timesteps.is_floating_point() != is_flow:
        must = "floats of its table, not places in it" if is_flow else "whole steps, not times in [0, 1)"
        raise ValueError(
            f"timesteps of {_name(noise_scheduler)} must be {must}, got {timesteps.dtype}: pass drawn.timesteps"
        )
    if is_flow:
        sigma = timesteps.float() / noise_scheduler.config.num_train_timesteps
        snr = (1 / sigma - 1).square()
    else:
        alpha_bar = noise_scheduler.alphas_cumprod.to(timesteps.device)[timesteps.long()].float()
        snr = alpha_bar / (1 - alpha_bar)
    return torch.clamp(snr, math.exp(-LOG_SNR_LIMIT), math.exp(LOG_SNR_LIMIT))


def loss_weight(weighting: Weighting, noise_scheduler: Any, timesteps: Tensor) -> Tensor:
    """Return the factor on the squared error of this scheduler's prediction."""
    return _weighed(weighting, compute_snr(noise_scheduler, timesteps).log(), prediction_of(noise_scheduler))


def _snr(process: Process, t: Tensor) -> Tensor:
    """Return alpha**2 / sigma**2 at t (N,), finite."""
    return process.log_snr(t).clamp(-LOG_SNR_LIMIT, LOG_SNR_LIMIT).exp()


def _weighed(weighting: Weighting, log_snr: Tensor, prediction: Prediction) -> Tensor:
    try:
        return weighting(log_snr, prediction)
    except TypeError as error:
        raise ValueError(
            f"weighting must take (log_snr, prediction), got {weighting!r}: call its maker, as in ks.min_snr()"
        ) from error
