"""The noising processes against diffusers, closed forms and the Gaussian KL they stand for."""

import math

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

import kairostep as ks

SCHEDULES = {
    "linear": ks.DiscreteProcess.linear,
    "cosine": ks.DiscreteProcess.cosine,
    "quadratic": ks.DiscreteProcess.quadratic,
}
PROCESSES = {
    **{name: make() for name, make in SCHEDULES.items()},
    "scaled_linear": ks.DiscreteProcess.scaled_linear(),
    "flow": ks.FlowProcess(),
    "edm": ks.EDMProcess(),
}
DISCRETE = [name for name in PROCESSES if name not in ("flow", "edm")]
STEPS = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000  # the middle of each of 1000 steps

# c_t as printed in FORMULAS §1.8: linear, cosine, quadratic
C_T = {
    0: ("0.917", "0.947", "0.987"),
    1: ("0.273", "0.264", "0.253"),
    10: ("0.0682", "0.0623", "0.0512"),
    100: ("0.0100", "0.00936", "0.00931"),
    500: ("0.00551", "0.00312", "0.00432"),
    900: ("0.00918", "0.0103", "0.00842"),
    990: ("0.0101", "0.117", "0.0100"),
    998: ("0.0102", "1.50", "0.0102"),
    999: ("0.0102", "499.5", "0.0102"),
}


@pytest.mark.parametrize("num_steps", [50, 1000])
@pytest.mark.parametrize(
    ("make", "beta_schedule", "beta_range"),
    [
        (ks.DiscreteProcess.linear, "linear", (1e-4, 0.02)),
        (ks.DiscreteProcess.quadratic, "scaled_linear", (1e-4, 0.02)),
        (ks.DiscreteProcess.scaled_linear, "scaled_linear", (0.00085, 0.012)),
        (ks.DiscreteProcess.cosine, "squaredcos_cap_v2", None),
    ],
)
def test_alphas_cumprod_agree_with_diffusers(make, beta_schedule, beta_range, num_steps):
    options = {} if beta_range is None else {"beta_start": beta_range[0], "beta_end": beta_range[1]}
    expected = DDPMScheduler(num_steps, beta_schedule=beta_schedule, **options)
    process = make(num_steps)
    assert process.betas.dtype == process.alphas_cumprod.dtype == torch.float64
    assert process.num_steps == num_steps
    assert_close(process.betas, expected.betas.double(), rtol=1e-4, atol=1e-7)  # diffusers computes in float32
    assert_close(process.alphas_cumprod, expected.alphas_cumprod.double(), rtol=2e-4, atol=1e-9)


def test_quadratic_default_range_is_that_of_linear():
    assert_close(ks.DiscreteProcess.quadratic().betas[[0, -1]], torch.tensor([1e-4, 0.02], dtype=torch.float64))
    assert_close(ks.DiscreteProcess.linear().betas[[0, -1]], torch.tensor([1e-4, 0.02], dtype=torch.float64))


def test_cosine_alphas_cumprod_are_squared_cosines_up_to_the_clipped_last_step():
    angle = [(i / 1000 + 0.008) / 1.008 * math.pi / 2 for i in range(1001)]
    expected = torch.tensor([(math.cos(a) / math.cos(angle[0])) ** 2 for a in angle[1:]], dtype=torch.float64)
    process = ks.DiscreteProcess.cosine()
    assert_close(process.alphas_cumprod[:-1], expected[:-1], rtol=1e-9, atol=0)
    assert_close(process.alphas_cumprod[-1], expected[-2] * 0.001, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", DISCRETE)
def test_zero_terminal_snr_agrees_with_diffusers(name):
    process = PROCESSES[name].with_zero_terminal_snr()
    expected = rescale_zero_terminal_snr(PROCESSES[name].betas.clone())
    assert_close(process.betas, expected, rtol=1e-9, atol=1e-12)
    assert process.betas[-1] == 1
    assert process.alpha(STEPS[-1:]) == 0
    assert process.log_snr(STEPS[-1:]) == -math.inf
    assert_close(process.alphas_cumprod[0], PROCESSES[name].alphas_cumprod[0])


@pytest.mark.parametrize(("column", "name"), [(0, "linear"), (1, "cosine"), (2, "quadratic")])
@pytest.mark.parametrize("step", C_T)
def test_vlb_weight_has_the_printed_digits(step, column, name):
    printed = C_T[step][column]
    decimals = len(printed.split(".")[1])
    assert f"{PROCESSES[name].vlb_weight(STEPS[[step]]).item():.{decimals}f}" == printed


@pytest.mark.parametrize("name", DISCRETE)
def test_first_vlb_weight_is_the_unclipped_half_times_the_clipping_of_its_variance(name):
    process = PROCESSES[name]
    beta, alpha_bar = process.betas, process.alphas_cumprod
    unclipped = 1 / (2 * (1 - beta[0]))
    assert f"{unclipped:.3f}" == "0.500"
    posterior_of_step_1 = beta[1] * (1 - alpha_bar[0]) / (1 - alpha_bar[1])
    assert_close(process.vlb_weight(STEPS[:1]), (unclipped * beta[0] / posterior_of_step_1).view(1))


@pytest.mark.parametrize("name", DISCRETE)
def test_vlb_weight_with_the_posterior_variance_is_half_the_relative_drop_of_snr(name):
    process = PROCESSES[name]
    snr = process.alphas_cumprod / (1 - process.alphas_cumprod)
    weight = process.vlb_weight(STEPS, variance="fixed_small")
    assert_close(weight[1:], (snr[:-1] / snr[1:] - 1) / 2, rtol=1e-8, atol=0)
    assert_close(weight[0], process.vlb_weight(STEPS)[0])


@pytest.mark.parametrize("variance", ["fixed_large", "fixed_small"])
@pytest.mark.parametrize("name", DISCRETE)
@pytest.mark.parametrize("step", [0, 1, 37, 500, 999])
def test_vlb_weight_times_error_of_noise_is_the_difference_of_gaussian_kls(step, name, variance):
    process = PROCESSES[name]
    beta, alpha_bar = process.betas, process.alphas_cumprod
    before = torch.cat([torch.ones(1, dtype=torch.float64), alpha_bar[:-1]])
    posterior_variance = beta * (1 - before) / (1 - alpha_bar)
    posterior_variance[0] = posterior_variance[1]
    model_variance = beta.clone() if variance == "fixed_large" else posterior_variance.clone()
    model_variance[0] = posterior_variance[1]
    x0, noise, guess, worse = torch.randn(4, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    xt = alpha_bar[step].sqrt() * x0 + (1 - alpha_bar[step]).sqrt() * noise

    def posterior_mean(clean):
        of_clean = before[step].sqrt() * beta[step] / (1 - alpha_bar[step])
        of_noisy = (1 - beta[step]).sqrt() * (1 - before[step]) / (1 - alpha_bar[step])
        return of_clean * clean + of_noisy * xt

    def kl(predicted_noise):
        clean = (xt - (1 - alpha_bar[step]).sqrt() * predicted_noise) / alpha_bar[step].sqrt()
        posterior = Normal(posterior_mean(x0), posterior_variance[step].sqrt())
        return kl_divergence(posterior, Normal(posterior_mean(clean), model_variance[step].sqrt())).mean()

    errors = (worse - noise).square().mean() - (guess - noise).square().mean()
    weight = process.vlb_weight(STEPS[[step]], variance)[0]
    assert_close(weight * errors, kl(worse) - kl(guess), rtol=1e-6, atol=0)


@pytest.mark.parametrize("process", [ks.FlowProcess(), ks.EDMProcess(), ks.EDMProcess(0.7, 0.01, 5.0)])
def test_continuous_vlb_weight_is_half_the_slope_of_falling_log_snr(process):
    t = torch.linspace(0.001, 0.999, 500, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(process.log_snr(t).sum(), t)
    assert_close(process.vlb_weight(t.detach()), -slope / 2, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_process_preserves_variance(name):
    process = PROCESSES[name]
    assert_close(process.alpha(STEPS) ** 2 + process.sigma(STEPS) ** 2, torch.ones_like(STEPS))
    assert_close(process.alpha(STEPS) ** 2, process.alphas_cumprod)


@pytest.mark.parametrize("name", PROCESSES)
def test_log_snr_is_the_log_of_squared_alpha_over_squared_sigma(name):
    process = PROCESSES[name]
    assert_close(process.log_snr(STEPS), (process.alpha(STEPS) / process.sigma(STEPS)).square().log())


@pytest.mark.parametrize("name", PROCESSES)
def test_log_snr_falls_with_time(name):
    assert (PROCESSES[name].log_snr(STEPS).diff() < 0).all()


@pytest.mark.parametrize("name", PROCESSES)
def test_time_0_is_clean_and_time_1_is_noise(name):
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    ratio = PROCESSES[name].sigma(ends) / PROCESSES[name].alpha(ends)
    assert ratio[0] < 0.05
    assert ratio[1] > 10


@pytest.mark.parametrize("name", PROCESSES)
def test_t_at_inverts_log_snr(name):
    assert_close(PROCESSES[name].t_at(PROCESSES[name].log_snr(STEPS)), STEPS)


def test_t_at_inverts_log_snr_with_zero_terminal_snr():
    process = PROCESSES["linear"].with_zero_terminal_snr()
    assert_close(process.time(process.t_at(process.log_snr(STEPS))), torch.arange(1000))


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_t_at_takes_the_nearest_step_for_log_snr_in_between_and_beyond(name):
    process = PROCESSES[name]
    levels = process.log_snr(STEPS)
    asked = torch.linspace(float(levels[-1]) - 5, float(levels[0]) + 5, 777, dtype=torch.float64)
    nearest = (asked[:, None] - levels).abs().argmin(1)
    assert_close(process.t_at(asked), STEPS[nearest])


def test_discrete_process_reads_t_as_step_floor_of_t_times_num_steps():
    process = ks.DiscreteProcess.linear(4, 0.1, 0.4)
    t = torch.tensor([0.0, 0.24, 0.25, 0.49, 0.5, 0.99, 1.0], dtype=torch.float64)
    step = torch.tensor([0, 0, 1, 1, 2, 3, 3])
    assert_close(process.time(t), step)
    assert_close(process.alpha(t), torch.tensor([0.9, 0.72, 0.504, 0.3024], dtype=torch.float64)[step].sqrt())


def test_flow_is_the_straight_path():
    process = ks.FlowProcess()
    assert_close(process.alpha(STEPS), 1 - STEPS)
    assert_close(process.sigma(STEPS), STEPS)
    assert_close(process.time(STEPS), STEPS)
    assert_close(process.input_scale(STEPS), torch.ones_like(STEPS))


@pytest.mark.parametrize("sigma_data", [0.5, 1.3])
def test_edm_sigma_grows_exponentially_and_preconditions_the_input(sigma_data):
    process = ks.EDMProcess(sigma_data)
    t = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    sigma = torch.tensor([0.002, 0.002**0.75 * 80**0.25, 0.4, 80.0], dtype=torch.float64)
    assert_close(process.sigma(t), sigma)
    assert_close(process.alpha(t), torch.ones_like(t))
    assert_close(process.time(t), sigma.log() / 4)
    assert_close(process.input_scale(t), 1 / (sigma**2 + sigma_data**2).sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PROCESSES)
def test_results_have_shape_and_dtype_of_t(name, dtype):
    t = torch.rand(5, dtype=dtype)
    process = PROCESSES[name]
    for values in (
        process.alpha(t),
        process.sigma(t),
        process.log_snr(t),
        process.vlb_weight(t),
        process.input_scale(t),
    ):
        assert values.shape == (5,)
        assert values.dtype == dtype


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ks.DiscreteProcess.from_betas(torch.tensor([0.1, 1.5])), ["1.5"]),
        (lambda: ks.DiscreteProcess.from_betas(torch.tensor([0.0, 0.5])), ["0.0", "0.5"]),
        (lambda: ks.DiscreteProcess.from_betas(torch.tensor([-0.25, 0.5])), ["-0.25"]),
        (lambda: ks.DiscreteProcess.from_betas(torch.tensor([0.1, math.nan])), ["nan"]),
        (lambda: ks.DiscreteProcess.from_betas(torch.tensor([0.1, 1.0, 0.5])), ["1"]),
        (lambda: ks.DiscreteProcess.from_betas(torch.tensor([0.1])), ["(1,)"]),
        (lambda: ks.DiscreteProcess.from_betas(torch.tensor([])), ["(0,)"]),
        (lambda: ks.DiscreteProcess.from_betas(torch.full((2, 3), 0.1)), ["(2, 3)"]),
        (lambda: ks.DiscreteProcess.linear(1), ["num_steps", "1"]),
        (lambda: ks.DiscreteProcess.cosine(0), ["num_steps", "0"]),
        (lambda: ks.DiscreteProcess.quadratic(1.5), ["num_steps", "1.5"]),
        (lambda: ks.DiscreteProcess.linear(10, 0.03, 0.02), ["0.03", "0.02"]),
        (lambda: ks.DiscreteProcess.quadratic(10, 0.03, 0.02), ["0.03", "0.02"]),
        (lambda: ks.DiscreteProcess.scaled_linear(10, -0.03, 0.02), ["-0.03"]),
        (lambda: ks.EDMProcess(sigma_min=2.0, sigma_max=1.5), ["2.0", "1.5"]),
        (lambda: ks.EDMProcess(sigma_min=1.5, sigma_max=1.5), ["1.5"]),
        (lambda: ks.EDMProcess(sigma_data=-0.5), ["sigma_data", "-0.5"]),
        (
            lambda: ks.DiscreteProcess.linear().vlb_weight(STEPS, variance="large"),
            ["large", "fixed_large", "fixed_small"],
        ),
        (lambda: ks.DiscreteProcess.linear().with_zero_terminal_snr().vlb_weight(STEPS), ["terminal SNR"]),
    ],
    ids=lambda part: "" if callable(part) else " ".join(part),
)
def test_bad_arguments_raise_and_name_the_value(make, named):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (each case names its own words)
        make()
    for words in named:
        assert words in str(caught.value)
