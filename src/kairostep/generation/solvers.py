"""Solvers, from noise to samples: diffusers' schedulers for every process and prediction."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_flow_match_heun_discrete import FlowMatchHeunDiscreteScheduler
from diffusers.schedulers.scheduling_heun_discrete import HeunDiscreteScheduler
from torch import Tensor

from kairostep.checks import choice, count
from kairostep.diffusion import VELOCITY, X0, DiscreteProcess, EDMProcess, FlowProcess, Prediction
from kairostep.diffusion.process import Process
from kairostep.generation.schedulers import PREDICTION_TYPES, native_prediction, scheduler_for

DEFAULT_STEPS: Mapping[str, int] = {"ddpm": 1000, "ddim": 200, "heun": 50}  # Kim et al., Table 6
MIN_ALPHA = 1e-5  # where alpha is 0, noise says nothing about x0 and would divide by it
MAX_SIGMA = 80.0  # Heun starts here, as Karras et al. do, where a discrete process goes further


@dataclass(frozen=True)
class Plan:
    """The inputs of scheduler and network at each of N evaluations. Tensors are (N,), on the CPU, in float64.

    A scheduler may keep its sample in another scale than x_t, as Heun's keeps x_t / alpha.
    """

    scheduler: Any
    native: Prediction  # what the scheduler reads
    times: Tensor  # what the network is told
    keys: list[Any]  # what the scheduler is told
    alpha: Tensor
    sigma: Tensor
    clips: bool  # whether x0 is clipped on the way to the native prediction
    start: float = 1.0  # factor from standard normal noise to the scheduler's first sample
    to_xt: Tensor | None = None  # factor from the scheduler's sample to x_t, if it is not 1
    to_input: Tensor | None = None  # factor from the scheduler's sample to what the network sees, if it is not 1
    noise_scale: Tensor | None = None  # of the noise that an ancestral step adds, over that of DDIM with eta = 1


def plan_for(process: Process, prediction: Prediction, solver: str, steps: int | None, *, clip: bool) -> Plan:
    """Return the plan of a solver; ValueError where there is none for the process."""
    steps = steps_of(process, solver, steps)
    if isinstance(process, DiscreteProcess):
        make = _heun_discrete if solver == "heun" else _ancestral if solver == "ddpm" else _ddim
        return make(process, prediction, steps, clip)
    if isinstance(process, FlowProcess):
        return _flow(process, prediction, solver, steps, clip)
    if isinstance(process, EDMProcess):
        return (_heun_edm if solver == "heun" else _euler_edm)(process, prediction, steps, clip)
    raise ValueError(f"process must be a DiscreteProcess, FlowProcess or EDMProcess, got {process!r}")


def steps_of(process: Process, solver: str, steps: int | None = None) -> int:
    """Return the number of steps, by default the paper's, at most that of the process; else ValueError."""
    choice("solver", solver, DEFAULT_STEPS)
    discrete = isinstance(process, DiscreteProcess)
    if solver == "ddpm" and not discrete:
        raise ValueError(
            f"solver ddpm needs a process of discrete steps, got {type(process).__name__}: pass 'ddim' or 'heun'"
        )
    limit = process.num_steps if isinstance(process, DiscreteProcess) and solver != "heun" else None
    if steps is None:
        return min(DEFAULT_STEPS[solver], limit or DEFAULT_STEPS[solver])
    if limit is not None and count("steps", steps, example=1000) > limit:
        raise ValueError(f"steps must be at most the {limit} of the process, got {steps}: pass steps={limit}")
    return count("steps", steps, at_most=10**6, example=1000)


def network_evaluations(solver: str, steps: int, guidance: float = 1.0) -> int:
    """Return how often the network is evaluated for one image: Heun's last step is Euler's, guidance doubles."""
    return (2 * steps - 1 if solver == "heun" else steps) * (1 if guidance == 1 else 2)


def _ddim(process: DiscreteProcess, prediction: Prediction, steps: int, clip: bool) -> Plan:
    """DDIM on steps spread evenly up to the last.

    The scheduler gets a process of only these steps. By itself it would take steps of floor(T / steps), which fit only
    if `steps` divides T.
    """
    times = ((torch.arange(steps, 0, -1) * process.num_steps / steps).round() - 1).long()  # falling
    alpha_bar = process.alphas_cumprod[times].clamp(min=MIN_ALPHA**2)
    native = native_prediction(process, prediction)
    scheduler = DDIMScheduler(steps, prediction_type=PREDICTION_TYPES[native], clip_sample=clip)
    scheduler.alphas_cumprod = alpha_bar.flip(0)
    scheduler.set_timesteps(steps)
    keys = list(range(steps - 1, -1, -1))
    return Plan(scheduler, native, times, keys, alpha_bar.sqrt(), (1 - alpha_bar).sqrt(), clip)


def _ancestral(process: DiscreteProcess, prediction: Prediction, steps: int, clip: bool) -> Plan:
    """DDPM with variance beta ("fixed_large").

    DDIM with eta = 1 has DDPM's mean and the posterior's variance, and unlike DDPM's own scheduler it accepts noise. So
    this is DDIM with its noise scaled from one variance to the other.
    """
    plan = _ddim(process, prediction, steps, clip)
    alpha_bar = plan.alpha.square()
    before = torch.cat([alpha_bar[1:], alpha_bar.new_ones(1)])
    scale = ((1 - alpha_bar) / (1 - before)).sqrt()  # beta over beta (1 - before) / (1 - alpha_bar)
    scale[-1] = 0.0  # the last step adds none
    return replace(plan, noise_scale=scale)


def _heun_scheduler(native: Prediction, sigma_min: float, sigma_max: float, **options: Any) -> Any:
    """Return Heun's scheduler on Karras et al.'s sigmas in this range, for samples x_t / alpha."""
    kind = PREDICTION_TYPES[native]
    with _numpy_warning_ignored():
        scheduler = HeunDiscreteScheduler(prediction_type=kind, use_karras_sigmas=True, **options)
    scheduler.register_to_config(sigma_min=sigma_min, sigma_max=sigma_max)
    return scheduler


@contextmanager
def _numpy_warning_ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="__array__ implementation")  # diffusers: numpy.array(tensor)
        yield


def _begin(scheduler: Any, steps: int) -> Tensor:
    """Set the steps and return the sigma of each evaluation (N,)."""
    with _numpy_warning_ignored():
        scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)  # it would look it up by time, and times may repeat
    sigmas: Tensor = scheduler.sigmas[:-1].double()
    return sigmas


def _heun_discrete(process: DiscreteProcess, prediction: Prediction, steps: int, clip: bool) -> Plan:
    """Heun's method as in Karras et al. (2022). The network gets times between steps."""
    alpha_bar = process.alphas_cumprod.clamp(min=MIN_ALPHA**2)
    sigmas = ((1 - alpha_bar) / alpha_bar).sqrt()
    native = native_prediction(process, prediction)
    scheduler = _heun_scheduler(
        native,
        float(sigmas[0]),
        min(float(sigmas[-1]), MAX_SIGMA),
        num_train_timesteps=process.num_steps,
        clip_sample=clip,
    )
    scheduler.alphas_cumprod = alpha_bar
    ratio = _begin(scheduler, steps)
    alpha = (1 + ratio.square()).rsqrt()
    times, start = scheduler.timesteps, float(ratio[0])
    return Plan(scheduler, native, times, list(times), alpha, ratio * alpha, clip, start, to_xt=alpha, to_input=alpha)


def _flow(process: FlowProcess, prediction: Prediction, solver: str, steps: int, clip: bool) -> Plan:
    """Euler's or Heun's method along the straight path."""
    scheduler = scheduler_for(process, VELOCITY, clip=clip)
    if solver == "heun":
        scheduler = FlowMatchHeunDiscreteScheduler(num_train_timesteps=1000)
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)
    keys, t = list(scheduler.timesteps), scheduler.timesteps.double() / 1000
    return Plan(scheduler, VELOCITY, process.time(t).float(), keys, (1 - t).clamp(min=MIN_ALPHA), t, clip)


def _euler_edm(process: EDMProcess, prediction: Prediction, steps: int, clip: bool) -> Plan:
    """Euler's method on Karras et al.'s sigmas."""
    scheduler = scheduler_for(process, process.prediction, clip=clip)
    sigma = _begin(scheduler, steps)
    scheduler.is_scale_input_called = True  # the plan scales it
    start = float(scheduler.init_noise_sigma)
    return _edm_plan(process, process.prediction, scheduler, sigma, list(scheduler.timesteps), start, clip)


def _heun_edm(process: EDMProcess, prediction: Prediction, steps: int, clip: bool) -> Plan:
    """Algorithm 1 of Karras et al. without churn, in the space of x_t / alpha, with alpha = 1."""
    scheduler = _heun_scheduler(X0, process.sigma_min, process.sigma_max)
    sigma = _begin(scheduler, steps)
    clip = clip and prediction != process.prediction  # as in Euler's method and in the paper
    return _edm_plan(process, X0, scheduler, sigma, list(scheduler.timesteps), process.sigma_max, clip)


def _edm_plan(
    process: EDMProcess, native: Prediction, scheduler: Any, sigma: Tensor, keys: list[Any], start: float, clip: bool
) -> Plan:
    times = (sigma.log() / 4).float()
    to_input = (sigma.square() + process.sigma_data**2).rsqrt()
    return Plan(scheduler, native, times, keys, torch.ones_like(sigma), sigma, clip, start, to_input=to_input)
