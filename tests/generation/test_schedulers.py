"""diffusers' schedulers for our processes have our numbers."""

import pytest
import torch
from diffusers import DDPMScheduler, EDMEulerScheduler, FlowMatchEulerDiscreteScheduler
from torch.testing import assert_close

from kairostep.diffusion import EPSILON, VELOCITY, X0, DiscreteProcess, EDMProcess, FlowProcess, Prediction, V
from kairostep.diffusion.prediction import VPrediction
from kairostep.diffusion.process import Process
from kairostep.generation import native_prediction, scheduler_for

DISCRETE = [
    DiscreteProcess.linear(),
    DiscreteProcess.cosine(),
    DiscreteProcess.quadratic(num_steps=100),
    DiscreteProcess.scaled_linear(beta_start=0.0015, beta_end=0.0195),
]
EDM = EDMProcess(sigma_data=0.7)


@pytest.mark.parametrize(
    ("process", "prediction", "native"),
    [
        (DISCRETE[0], EPSILON, EPSILON),
        (DISCRETE[0], X0, X0),
        (DISCRETE[0], V, V),
        (DISCRETE[0], VELOCITY, X0),
        (DISCRETE[0], VPrediction(0.5), X0),
        *[(FlowProcess(), prediction, VELOCITY) for prediction in (EPSILON, X0, V, VELOCITY)],
        *[(EDM, prediction, VPrediction(0.7)) for prediction in (EPSILON, X0, V, VELOCITY, EDM.prediction)],
    ],
)
def test_a_prediction_is_read_as_it_is_wherever_diffusers_can(
    process: Process, prediction: Prediction, native: Prediction
) -> None:
    assert native_prediction(process, prediction) == native


@pytest.mark.parametrize("process", DISCRETE)
@pytest.mark.parametrize(("prediction", "name"), [(EPSILON, "epsilon"), (X0, "sample"), (V, "v_prediction")])
@pytest.mark.parametrize("clip", [True, False])
def test_a_discrete_process_becomes_ddpm_with_its_betas(
    process: DiscreteProcess, prediction: Prediction, name: str, clip: bool
) -> None:
    scheduler = scheduler_for(process, prediction, clip=clip)
    assert type(scheduler) is DDPMScheduler
    assert_close(scheduler.betas, process.betas.float(), rtol=1e-7, atol=0)
    assert_close(scheduler.alphas_cumprod, process.alphas_cumprod.float(), rtol=1e-4, atol=1e-9)
    config = scheduler.config
    assert config.num_train_timesteps == process.num_steps
    assert (config.prediction_type, config.clip_sample, config.variance_type) == (name, clip, "fixed_large")


def test_flow_and_edm_become_the_schedulers_of_their_name() -> None:
    flow = scheduler_for(FlowProcess(), VELOCITY, clip=True)
    assert type(flow) is FlowMatchEulerDiscreteScheduler
    assert (flow.config.num_train_timesteps, flow.config.shift) == (1000, 1.0)
    edm = scheduler_for(EDM, EDM.prediction, clip=True)
    assert type(edm) is EDMEulerScheduler
    assert (edm.config.sigma_data, edm.config.sigma_min, edm.config.sigma_max) == (0.7, 0.002, 80.0)
    edm.set_timesteps(10)
    assert_close(edm.timesteps, EDM.time(EDM.t_at(-2 * edm.sigmas[:-1].log())), rtol=1e-5, atol=1e-5)
    assert_close(torch.tensor([80.0, 0.002]), edm.sigmas[[0, -2]])


@pytest.mark.parametrize("process", [*DISCRETE, FlowProcess(1000.0), EDM])
def test_a_scheduler_survives_being_saved(process: Process, tmp_path_factory: pytest.TempPathFactory) -> None:
    native = native_prediction(process, VELOCITY)
    scheduler = scheduler_for(process, native, clip=True)
    folder = tmp_path_factory.mktemp("scheduler")
    scheduler.save_pretrained(folder)
    loaded = type(scheduler).from_pretrained(folder)
    for one in (scheduler, loaded):
        one.set_timesteps(5)
    assert torch.equal(scheduler.timesteps, loaded.timesteps)
    if isinstance(process, DiscreteProcess):
        assert_close(loaded.betas, process.betas.float(), rtol=1e-7, atol=0)


def test_another_process_is_refused() -> None:
    class Own(FlowProcess.__base__):  # type: ignore[name-defined,misc]
        alpha = sigma = log_snr = t_at = vlb_weight = FlowProcess.alpha

    with pytest.raises(ValueError, match="process must be a DiscreteProcess, FlowProcess or EDMProcess, got"):
        scheduler_for(Own(), VELOCITY, clip=True)
