"""What the network predicts: each target and its way back to x0."""

import pytest
import torch
from torch.testing import assert_close

import kairostep as ks

PROCESSES = {
    "linear": ks.DiscreteProcess.linear(),
    "cosine": ks.DiscreteProcess.cosine(),
    "flow": ks.FlowProcess(),
    "edm": ks.EDMProcess(),
}
PREDICTIONS = {
    "epsilon": ks.EPSILON,
    "x0": ks.X0,
    "v": ks.V,
    "velocity": ks.VELOCITY,
    "edm": ks.EDMProcess().prediction,
    "edm(1.7)": ks.EDMProcess(sigma_data=1.7).prediction,
}


def example(process, num_rows=64):
    """Return x0, noise (num_rows, 3, 4) and alpha, sigma (num_rows, 1, 1) over the whole time range."""
    x0, noise = torch.randn(2, num_rows, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t = torch.linspace(0.001, 0.999, num_rows, dtype=torch.float64)
    return x0, noise, process.alpha(t).view(-1, 1, 1), process.sigma(t).view(-1, 1, 1)


@pytest.mark.parametrize("prediction", PREDICTIONS.values(), ids=PREDICTIONS)
@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_to_x0_inverts_target(process, prediction):
    x0, noise, alpha, sigma = example(process)
    target = prediction.target(x0, noise, alpha, sigma)
    assert target.dtype == torch.float64
    assert_close(prediction.to_x0(target, alpha * x0 + sigma * noise, alpha, sigma), x0, rtol=0, atol=1e-10)


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_epsilon_and_x0_are_noise_and_data(process):
    x0, noise, alpha, sigma = example(process)
    assert_close(ks.EPSILON.target(x0, noise, alpha, sigma), noise)
    assert_close(ks.X0.target(x0, noise, alpha, sigma), x0)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_v_of_a_variance_preserving_process_is_that_of_salimans_and_ho(name):
    x0, noise, alpha, sigma = example(PROCESSES[name])
    assert_close(ks.V.target(x0, noise, alpha, sigma), alpha * noise - sigma * x0)


def test_velocity_of_the_flow_is_the_time_derivative_of_its_path():
    x0, noise, alpha, sigma = example(ks.FlowProcess())
    velocity = ks.VELOCITY.target(x0, noise, alpha, sigma)
    assert_close(velocity, noise - x0)
    later = (alpha - 1e-3) * x0 + (sigma + 1e-3) * noise
    assert_close(velocity, (later - alpha * x0 - sigma * noise) / 1e-3)


@pytest.mark.parametrize("sigma_data", [0.5, 1.0, 1.7])
def test_edm_prediction_is_minus_the_target_of_karras_et_al(sigma_data):
    process = ks.EDMProcess(sigma_data)
    x0, noise, alpha, sigma = example(process)
    c_skip = sigma_data**2 / (sigma**2 + sigma_data**2)
    c_out = sigma * sigma_data / (sigma**2 + sigma_data**2).sqrt()
    expected = (x0 - c_skip * (x0 + sigma * noise)) / c_out
    assert_close(process.prediction.target(x0, noise, alpha, sigma), -expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("prediction", PREDICTIONS.values(), ids=PREDICTIONS)
@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_log_x0_error_is_what_an_error_of_the_output_does_to_x0(process, prediction):
    x0, noise, alpha, sigma = example(process)
    delta = torch.randn(x0.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    output = prediction.target(x0, noise, alpha, sigma) + delta
    error = prediction.to_x0(output, alpha * x0 + sigma * noise, alpha, sigma) - x0
    factor = prediction.log_x0_error((alpha / sigma).square().log()).exp()
    assert_close(error.square().mean((1, 2)), (factor * delta.square()).mean((1, 2)), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("prediction", "x0_error"),
    [
        (ks.EPSILON, lambda snr: 1 / snr),
        (ks.X0, lambda snr: torch.ones_like(snr)),
        (ks.V, lambda snr: 1 / (snr + 1)),
        (ks.VELOCITY, lambda snr: 1 / (1 + snr.sqrt()) ** 2),
        (ks.EDMProcess(1.7).prediction, lambda snr: 1.7**2 / snr / (1 / snr + 1.7**2)),
    ],
)
def test_log_x0_error_has_its_closed_form(prediction, x0_error):
    log_snr = torch.linspace(-15, 15, 61, dtype=torch.float64)
    assert_close(prediction.log_x0_error(log_snr).exp(), x0_error(log_snr.exp()), rtol=1e-9, atol=0)


@pytest.mark.parametrize("sigma_data", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_sigma_data_raises_and_names_the_value(sigma_data):
    with pytest.raises(ValueError, match=f"sigma_data.*{sigma_data}"):
        type(ks.V)(sigma_data)
