"""How samplers, processes, objectives and weightings print."""

import pytest
import torch
from samplers import SAMPLERS, build, build_model
from torch import Tensor

import kairostep as ks

EPSILON = ks.Objective(ks.FlowProcess(), ks.EPSILON)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (ks.RootLoss(), "RootLoss(num_bins=20, decay=0.99, floor=0.1)"),
        (ks.RootLoss(50, warmup=4, seed=3), "RootLoss(num_bins=50, decay=0.99, floor=0.1, warmup=4)"),
        (
            ks.RootLoss(loss_weight=EPSILON.weight),
            "RootLoss(num_bins=20, decay=0.99, floor=0.1, loss_weight=Objective.weight)",
        ),
        (ks.Uniform(), "Uniform()"),
        (ks.LogitNormal(0.5, unbiased=True), "LogitNormal(mean=0.5, std=1.0, unbiased=True)"),
        (ks.LogitNormal(stratified=False), "LogitNormal(mean=0.0, std=1.0, stratified=False)"),
        (ks.Mode(), "Mode(scale=1.29)"),
        (ks.FixedBeta(0.7, 2.0), "FixedBeta(a=0.7, b=2.0)"),
        (ks.Tabulated(torch.tensor([1.0, 3.0])), "Tabulated(mass=<2 values from 0.25 to 0.75>)"),
        (ks.Laplace(ks.FlowProcess()), "Laplace(process=FlowProcess(time_scale=1.0), mean=0.0, scale=0.5)"),
        (ks.Speed(ks.EDMProcess(), "v1").process, "EDMProcess(sigma_data=0.5, sigma_min=0.002, sigma_max=80.0)"),
        (
            ks.Curriculum(ks.Mode(), ks.Uniform(), start=1, end=2),
            "Curriculum(first=Mode(scale=1.29), then=Uniform(), start=1, end=2)",
        ),
        (ks.DiscreteProcess.linear(), "DiscreteProcess(betas=<1000 values from 0.0001 to 0.02>)"),
        (ks.min_snr(), "min_snr(gamma=5.0)"),
        (ks.soft_min_snr(2.0), "soft_min_snr(gamma=2.0)"),
        (ks.p2(), "p2(k=1.0, gamma=1.0)"),
        (ks.debias(), "debias()"),
        (ks.edm(), "edm(sigma_data=0.5)"),
        (ks.constant(), "constant()"),
        (ks.vlb(ks.FlowProcess()), "vlb(FlowProcess(time_scale=1.0))"),
        (
            ks.Objective(ks.FlowProcess(), ks.VELOCITY, ks.min_snr(3.0)),
            "Objective(process=FlowProcess(time_scale=1.0), prediction=VelocityPrediction(), "
            "weighting=min_snr(gamma=3.0))",
        ),
    ],
    ids=lambda value: value.split("(")[0] if isinstance(value, str) else "",
)
def test_it_prints_as_the_call_that_makes_it(made: object, expected: str) -> None:
    assert repr(made) == expected


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_prints_in_one_line_with_its_name(name: str) -> None:
    sampler = build(name, build_model())
    text = repr(sampler)
    assert text.startswith(f"{type(sampler).__name__}(")
    assert "\n" not in text
    assert " at 0x" not in text
    assert len(text) < 400


def test_a_sampler_from_elsewhere_prints_what_it_keeps() -> None:
    class Triangle(ks.TimestepSampler):
        def __init__(self, peak: float, width: float = 1.0, *, steep: bool = False) -> None:
            super().__init__()
            self.peak, self.steep = peak, steep

        def sample(self, x0: Tensor) -> ks.Timesteps:
            raise NotImplementedError

    assert repr(Triangle(0.5)) == "Triangle(peak=0.5)"
    assert repr(Triangle(0.5, steep=True)) == "Triangle(peak=0.5, steep=True)"
