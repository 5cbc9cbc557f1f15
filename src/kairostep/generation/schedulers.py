"""diffusers' schedulers for our processes and predictions."""

from typing import Any

from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from diffusers.schedulers.scheduling_edm_euler import EDMEulerScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from kairostep.diffusion import EPSILON, VELOCITY, X0, DiscreteProcess, EDMProcess, FlowProcess, Prediction, V
from kairostep.diffusion.process import Process

PREDICTION_TYPES = {EPSILON: "epsilon", X0: "sample", V: "v_prediction"}


def native_prediction(process: Process, prediction: Prediction) -> Prediction:
    """Return what diffusers' scheduler for this process reads from a network: `prediction` itself wherever it can."""
    if isinstance(process, DiscreteProcess):
        return prediction if prediction in PREDICTION_TYPES else X0
    return process.prediction if isinstance(process, EDMProcess) else VELOCITY


def scheduler_for(process: Process, prediction: Prediction, *, clip: bool) -> Any:
    """Return the scheduler that generates with a network of this native prediction; `clip` keeps x0 in [-1, 1]."""
    if isinstance(process, DiscreteProcess):
        return DDPMScheduler(
            num_train_timesteps=process.num_steps,
            trained_betas=process.betas.tolist(),
            variance_type="fixed_large",
            prediction_type=PREDICTION_TYPES[prediction],
            clip_sample=clip,
        )
    if isinstance(process, EDMProcess):
        sigmas: dict[str, Any] = {name: getattr(process, name) for name in ("sigma_min", "sigma_max", "sigma_data")}
        return EDMEulerScheduler(prediction_type="v_prediction", **sigmas)  # our V is minus EDM's target
    if isinstance(process, FlowProcess):
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000)
    raise ValueError(f"process must be a DiscreteProcess, FlowProcess or EDMProcess, got {process!r}")
