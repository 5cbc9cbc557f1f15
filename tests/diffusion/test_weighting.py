"""Loss weightings against their closed forms, for every prediction and at the ends of log-SNR."""

import math
import re

import pytest
import torch
from torch.testing import assert_close

import kairostep as ks

LOG_SNR = torch.linspace(-15, 15, 121, dtype=torch.float64)
STEPS = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
SCHEDULES = {
    "linear": ks.DiscreteProcess.linear(),
    "cosine": ks.DiscreteProcess.cosine(),
    "quadratic": ks.DiscreteProcess.quadratic(),
}
# factor on the error of x0 -> factor on the error of the prediction (FORMULAS §12)
PREDICTIONS = {
    "epsilon": (ks.EPSILON, lambda snr: 1 / snr),
    "x0": (ks.X0, lambda snr: 1 + 0 * snr),
    "v": (ks.V, lambda snr: 1 / (snr + 1)),
    "velocity": (ks.VELOCITY, lambda snr: 1 / (1 + snr.sqrt()) ** 2),
}
# the weighting and its factor on the error of x0
WEIGHTINGS = {
    "min_snr": (ks.min_snr(), lambda snr: snr.clamp(max=5.0)),
    "min_snr(1)": (ks.min_snr(gamma=1.0), lambda snr: snr.clamp(max=1.0)),
    "soft_min_snr(4)": (ks.soft_min_snr(4.0), lambda snr: 1 / (1 / snr + 1 / 4)),
    "soft_min_snr(1)": (ks.soft_min_snr(1.0), lambda snr: snr / (1 + snr)),
    "p2": (ks.p2(), lambda snr: snr / (1 + snr)),
    "p2(1,0.5)": (ks.p2(k=1.0, gamma=0.5), lambda snr: snr / (1 + snr).sqrt()),
    "p2(0.2,2)": (ks.p2(k=0.2, gamma=2.0), lambda snr: snr / (0.2 + snr) ** 2),
    "p2(3,0)": (ks.p2(k=3.0, gamma=0.0), lambda snr: snr),
    "debias": (ks.debias(), lambda snr: snr.sqrt()),
    "edm": (ks.edm(), lambda snr: (1 / snr + 0.25) / (0.25 / snr)),
    "edm(1.7)": (ks.edm(1.7), lambda snr: (1 / snr + 1.7**2) / (1.7**2 / snr)),
    "vlb(flow)": (ks.vlb(ks.FlowProcess()), lambda snr: snr * (2 + snr.sqrt() + 1 / snr.sqrt())),
    "vlb(edm)": (ks.vlb(ks.EDMProcess()), lambda snr: snr * math.log(40000)),
}


@pytest.mark.parametrize("target", PREDICTIONS)
@pytest.mark.parametrize("name", WEIGHTINGS)
def test_weight_has_its_closed_form(name, target):
    weighting, on_x0 = WEIGHTINGS[name]
    prediction, conversion = PREDICTIONS[target]
    snr = LOG_SNR.exp()
    assert_close(weighting(LOG_SNR, prediction), on_x0(snr) * conversion(snr), rtol=1e-9, atol=0)


@pytest.mark.parametrize("target", PREDICTIONS)
@pytest.mark.parametrize("process", SCHEDULES.values(), ids=SCHEDULES)
def test_vlb_of_a_discrete_process_is_its_vlb_weight_converted(process, target):
    prediction, conversion = PREDICTIONS[target]
    snr = process.alphas_cumprod / (1 - process.alphas_cumprod)
    weight = ks.vlb(process)(process.log_snr(STEPS), prediction)
    assert_close(weight, process.vlb_weight(STEPS) * snr * conversion(snr), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("weighting", "on_epsilon"),
    [
        (ks.min_snr(5.0), lambda snr: (5 / snr).clamp(max=1)),
        (ks.soft_min_snr(4.0), lambda snr: 4 / (4 + snr)),
        (ks.p2(0.2, 2.0), lambda snr: 1 / (0.2 + snr) ** 2),
        (ks.debias(), lambda snr: 1 / snr.sqrt()),
        (ks.vlb(ks.FlowProcess()), lambda snr: (1 + snr.sqrt()) ** 2 / snr.sqrt()),
    ],
)
def test_weight_of_epsilon_is_as_published(weighting, on_epsilon):
    assert_close(weighting(LOG_SNR, ks.EPSILON), on_epsilon(LOG_SNR.exp()), rtol=1e-9, atol=0)


def test_min_snr_of_v_is_as_published():
    snr = LOG_SNR.exp()
    assert_close(ks.min_snr(5.0)(LOG_SNR, ks.V), snr.clamp(max=5) / (snr + 1), rtol=1e-9, atol=0)


@pytest.mark.parametrize("prediction", [*[p for p, _ in PREDICTIONS.values()], ks.EDMProcess().prediction])
def test_constant_is_1_on_every_prediction(prediction):
    assert_close(ks.constant()(LOG_SNR, prediction), torch.ones_like(LOG_SNR))


@pytest.mark.parametrize("sigma_data", [0.5, 1.0, 1.7])
def test_edm_is_1_on_its_own_target(sigma_data):
    weight = ks.edm(sigma_data)(LOG_SNR, ks.EDMProcess(sigma_data).prediction)
    assert_close(weight, torch.ones_like(LOG_SNR))


def test_soft_min_snr_on_its_own_target_is_that_of_k_diffusion():
    sigma, sigma_data = (-LOG_SNR / 2).exp(), 0.5
    expected = (sigma * sigma_data) ** 2 / (sigma**2 + sigma_data**2) ** 2
    assert_close(ks.soft_min_snr(4.0)(LOG_SNR, ks.EDMProcess(sigma_data).prediction), expected, rtol=1e-9, atol=0)


# FORMULAS §5 prints 241 for the quadratic schedule, but SNR is 5.0015 in step 241 and 4.949 in step 242.
@pytest.mark.parametrize(("name", "first"), [("linear", 130), ("cosine", 261), ("quadratic", 242)])
def test_min_snr_lowers_the_weight_of_epsilon_in_the_first_steps_only(name, first):
    weight = ks.min_snr(5.0)(SCHEDULES[name].log_snr(STEPS), ks.EPSILON)
    assert (weight[:first] < 1).all()
    assert_close(weight[first:], torch.ones_like(weight[first:]))


@pytest.mark.parametrize(
    ("weighting", "means"),
    [(ks.p2(1.0, 1.0), (0.724, 0.504, 0.577)), (ks.min_snr(5.0), (0.913, 0.824, 0.832))],
    ids=["p2", "min_snr"],
)
def test_mean_weight_of_epsilon_over_uniform_steps_has_the_printed_digits(weighting, means):
    for process, mean in zip(SCHEDULES.values(), means, strict=True):
        assert round(weighting(process.log_snr(STEPS), ks.EPSILON).mean().item(), 3) == mean


@pytest.mark.parametrize("target", PREDICTIONS)
def test_p2_with_k_and_gamma_1_is_soft_min_snr_with_gamma_1(target):
    prediction = PREDICTIONS[target][0]
    assert_close(ks.p2(1.0, 1.0)(LOG_SNR, prediction), ks.soft_min_snr(1.0)(LOG_SNR, prediction))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prediction", [*[p for p, _ in PREDICTIONS.values()], ks.EDMProcess().prediction])
@pytest.mark.parametrize("name", [*WEIGHTINGS, "vlb(linear)", "constant"])
def test_weight_is_never_nan_and_at_zero_snr_finite(name, prediction, dtype):
    others = {"vlb(linear)": ks.vlb(SCHEDULES["linear"]), "constant": ks.constant()}
    weighting = others[name] if name in others else WEIGHTINGS[name][0]
    weight = weighting(torch.tensor([-math.inf, -1000, 1000, math.inf], dtype=dtype), prediction)
    assert weight.dtype == dtype
    assert not weight.isnan().any()
    assert (weight >= 0).all()
    assert name == "debias" or weight[:2].isfinite().all()


@pytest.mark.parametrize(
    ("weighting", "at_zero", "at_infinity"),  # of SNR, for epsilon, x0, v, velocity
    [
        (ks.min_snr(5.0), (1, 0, 0, 0), (0, 5, 0, 0)),
        (ks.soft_min_snr(4.0), (1, 0, 0, 0), (0, 4, 0, 0)),
        (ks.p2(0.5, 1.0), (2, 0, 0, 0), (0, 1, 0, 0)),
        (ks.edm(0.5), (None, 4, 4, 4), (1, None, 1, 1)),
        (ks.debias(), (None, 0, 0, 0), (0, None, 0, 0)),
        (ks.constant(), (1, 1, 1, 1), (1, 1, 1, 1)),
    ],
    ids=["min_snr", "soft_min_snr", "p2", "edm", "debias", "constant"],
)
def test_weight_reaches_its_limits(weighting, at_zero, at_infinity):
    for (prediction, _), zero, infinity in zip(PREDICTIONS.values(), at_zero, at_infinity, strict=True):
        for log_snr, limit in ((-math.inf, zero), (math.inf, infinity)):
            weight = weighting(torch.tensor([log_snr], dtype=torch.float64), prediction)
            if limit is None:
                assert weight > 1e6
            else:
                assert_close(weight, torch.tensor([limit], dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_min_snr_of_epsilon_is_exactly_1_at_zero_terminal_snr(dtype):
    process = ks.DiscreteProcess.linear().with_zero_terminal_snr()
    log_snr = process.log_snr(torch.tensor([0.9995, 1.0], dtype=dtype))
    assert torch.equal(ks.min_snr()(log_snr, ks.EPSILON), torch.ones(2, dtype=dtype))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ks.min_snr(0.0), "gamma.*0.0"),
        (lambda: ks.min_snr(-5.0), "gamma.*-5.0"),
        (lambda: ks.min_snr(math.nan), "gamma.*nan"),
        (lambda: ks.soft_min_snr(-1.5), "gamma.*-1.5"),
        (lambda: ks.soft_min_snr(math.inf), "gamma.*inf"),
        (lambda: ks.p2(gamma=math.nan), "gamma.*nan"),
        (lambda: ks.p2(k=-0.5), "k.*-0.5"),
        (lambda: ks.edm(0.0), "sigma_data.*0.0"),
    ],
)
def test_bad_arguments_raise_and_name_the_value(make, named):
    with pytest.raises(ValueError, match=re.compile(named)):
        make()
