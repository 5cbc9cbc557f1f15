"""A density as a weighting: uniform draws with it train what draws of the density train without."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import kairostep as ks
from kairostep.diffusion.weighting import density_weighting
from kairostep.registry import samplers
from kairostep.timesteps import SamplerContext

PROCESSES = {
    "linear": (ks.DiscreteProcess.linear(200), ks.EPSILON),
    "cosine": (ks.DiscreteProcess.cosine(200), ks.V),
    "flow": (ks.FlowProcess(), ks.VELOCITY),
    "edm": (ks.EDMProcess(), ks.EDMProcess().prediction),
}
NUM = 4000  # times, in the middle of equal bins


def expectation(objective: ks.Objective, density: Tensor, t: Tensor) -> Tensor:
    """Return the mean loss of a fixed row with fixed noise over times of this density, (NUM,) per uniform."""
    x0 = torch.tensor([[0.3, -0.8]], dtype=torch.float64).expand(len(t), 2)
    noise = torch.tensor([[-0.5, 1.1]], dtype=torch.float64).expand(len(t), 2)
    losses = objective(lambda xt, time: 0.4 * xt, x0, t, noise=noise)
    return (losses * density).mean()


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("sampler", [ks.LogitNormal(), ks.FixedBeta(2.0, 1.0), ks.Tabulated(torch.tensor([1.0, 3.0]))])
def test_uniform_draws_with_it_train_what_the_density_trains(name: str, sampler: ks.TimestepSampler) -> None:
    process, prediction = PROCESSES[name]
    t = (torch.arange(NUM, dtype=torch.float64) + 0.5) / NUM
    drawn = expectation(ks.Objective(process, prediction), NUM * sampler.density(NUM).double(), t)
    weighted = ks.Objective(process, prediction, ks.as_weighting(sampler, process))
    assert_close(expectation(weighted, torch.ones(NUM, dtype=torch.float64), t), drawn, rtol=1e-5, atol=0)


@pytest.mark.parametrize("predicted", [ks.EPSILON, ks.X0, ks.V])
def test_it_counts_on_the_error_of_the_named_prediction(predicted: ks.Prediction) -> None:
    """The factor on any prediction's error, turned into one on x0, is that of the velocity."""
    process = ks.FlowProcess()
    weighting = ks.as_weighting(ks.LogitNormal(), process, ks.VELOCITY)
    log_snr = process.log_snr(torch.linspace(0.05, 0.95, 19, dtype=torch.float64))
    on_x0 = weighting(log_snr, predicted) / predicted.log_x0_error(log_snr).exp()
    assert_close(on_x0, weighting(log_snr, ks.VELOCITY) / ks.VELOCITY.log_x0_error(log_snr).exp())
    plain = ks.as_weighting(ks.LogitNormal(), process)
    assert_close(weighting(log_snr, ks.VELOCITY), plain(log_snr, predicted))


def test_root_loss_keeps_the_objective_and_follows_its_weight() -> None:
    """Weights 1/density undo the draws, so that weight times density is that of the logit-normal objective alone."""
    process = ks.FlowProcess()
    objective = ks.Objective(process, ks.VELOCITY, ks.as_weighting(ks.LogitNormal(), process))
    sampler = ks.RootLoss(loss_weight=objective.weight, warmup=1, refresh=1, num_bins=20)
    x0 = torch.zeros(4000, 1)
    t = (torch.arange(4000) + 0.5) / 4000
    for _ in range(3):  # a squared error of 1 everywhere
        with sampler.observe(x0, ks.Timesteps(t, torch.ones_like(t)), objective.weight(t)):
            pass
    drawn = sampler.sample(x0)
    relative = 20 * sampler.density(20)
    assert_close(drawn.weight, 1 / relative[drawn.index(20)], rtol=1e-4, atol=0)
    middle, end = float(relative[9:11].mean()), float(relative[0])
    assert middle > 3 * end  # draws follow the weight where the loss does not vary


SHAPE = (4,)  # of one x0
UNDOES_ITS_DENSITY = {"least_noise", "loss_second_moment", "root_loss"}  # by default
OWN_WEIGHTS = {"speed"}
OPTIONS: dict[str, dict[str, Any]] = {
    "beta": {"a": 0.7, "b": 2.0},
    "tabulated": {"mass": (1.0, 3.0)},
    "curriculum": {"start": 2, "end": 6},
}


def made(name: str, **options: Any) -> ks.TimestepSampler:
    model = torch.nn.Linear(4, 4)
    context = SamplerContext(ks.Objective(PROCESSES["linear"][0]), model, SHAPE, seed=0)
    sampler: ks.TimestepSampler = samplers.find(name).from_experiment(context, **{**OPTIONS.get(name, {}), **options})
    with torch.no_grad():
        sampler.sample(torch.zeros(8, *SHAPE))  # a policy's density is that of the latest rows
    return sampler


@pytest.mark.parametrize("name", samplers.registered)
def test_a_sampler_whose_weights_undo_its_density_is_refused(name: str) -> None:
    refused = [made(name)] if name in UNDOES_ITS_DENSITY else []
    if "unbiased" in samplers.options_of(name):
        refused.append(made(name, unbiased=True))
    for sampler in refused:
        with pytest.raises(ValueError, match=r"got \w+\(.*, whose weights undo it: pass a sampler with unbiased=False"):
            ks.as_weighting(sampler, PROCESSES["linear"][0])
    if name not in UNDOES_ITS_DENSITY | OWN_WEIGHTS:
        sampler = made(name)
        assert (sampler.sample(torch.zeros(8, *SHAPE)).weight == 1).all()  # the density alone is what it trains
        ks.as_weighting(sampler, PROCESSES["linear"][0])


@pytest.mark.parametrize("then", [ks.RootLoss(), ks.LogitNormal(unbiased=True)])
def test_a_curriculum_with_such_a_sampler_is_refused(then: ks.TimestepSampler) -> None:
    with pytest.raises(ValueError, match="whose weights undo it"):
        ks.as_weighting(ks.Curriculum(ks.LogitNormal(), then, start=1, end=2), ks.FlowProcess())


@pytest.mark.parametrize("version", ["paper", "v1"])
def test_a_sampler_whose_objective_has_weights_too_is_refused(version: str) -> None:
    process = ks.DiscreteProcess.linear(200)
    speed = ks.Speed(process, version)
    for sampler in (speed, ks.Curriculum(speed, ks.Uniform(), start=1, end=2)):
        with pytest.raises(ValueError, match=r"density alone, got \w+\(.*, whose objective has weights too: pass"):
            ks.as_weighting(sampler, process)
    with pytest.raises(ValueError, match="must come of a density alone"):
        density_weighting(process, of="speed")


def test_it_prints_as_the_call_that_makes_it() -> None:
    printed = repr(ks.as_weighting(ks.LogitNormal(), ks.FlowProcess()))
    assert printed.startswith("as_weighting(LogitNormal(")
    assert "FlowProcess" in printed


def test_what_is_no_sampler_process_or_prediction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes a sampler and a process, got 'logit_normal' and .*ks.LogitNormal\(\)"):
        ks.as_weighting("logit_normal", ks.FlowProcess())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes a sampler and a process"):
        ks.as_weighting(ks.FlowProcess(), ks.LogitNormal())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"prediction must be one such as ks.VELOCITY or ks.EPSILON, got 'velocity'"):
        ks.as_weighting(ks.LogitNormal(), ks.FlowProcess(), "velocity")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "missing"), [("beta", "a, b"), ("curriculum", "first, then, start, end")])
def test_a_density_by_name_that_needs_options_is_refused(name: str, missing: str) -> None:
    with pytest.raises(ValueError, match=f"got {name}, which needs {missing}: in Python, pass them to ks.as_w"):
        density_weighting(ks.FlowProcess(), of=name)
