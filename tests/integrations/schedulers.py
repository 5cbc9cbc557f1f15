"""Noise schedulers of diffusers, as made, whose process can be read."""

import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    DDIMScheduler,
    DDPMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    PNDMScheduler,
)
from torch import Tensor

T = 1000
ZERO_SNR = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
WITH_ALPHAS_CUMPROD = [
    DDPMScheduler(),
    DDPMScheduler(num_train_timesteps=50),
    DDPMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="sample"),
    DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type="v_prediction"),
    DDPMScheduler(20, trained_betas=torch.linspace(0.001, 0.3, 20).tolist()),
    DDPMScheduler(**ZERO_SNR),
    DDIMScheduler(**ZERO_SNR),
    PNDMScheduler(),
    EulerDiscreteScheduler(),
    CogVideoXDDIMScheduler(),  # its betas are not those of its alphas_cumprod
]
FLOWS = [
    FlowMatchEulerDiscreteScheduler(),
    FlowMatchEulerDiscreteScheduler(shift=3.0),
    FlowMatchEulerDiscreteScheduler(num_train_timesteps=100, shift=0.5),
    FlowMatchHeunDiscreteScheduler(shift=3.0),
]


def described(scheduler: object) -> str:
    """Return a name for the test."""
    return type(scheduler).__name__


def every_step(num_steps: int) -> Tensor:
    """Return the middle of every step, from the least noisy to the noisiest: (T,)."""
    return (torch.arange(num_steps) + 0.5) / num_steps
