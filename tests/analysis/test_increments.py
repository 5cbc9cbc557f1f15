"""Process increments against differences, draws and the numbers of FORMULAS."""

import itertools

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import kairostep as ks
from kairostep.analysis import process_increments
from kairostep.analysis.panels import MAX_POINTS, increments_panels
from kairostep.diffusion.process import Process


@pytest.mark.parametrize(
    ("process", "fastest", "converged"),
    [
        (ks.DiscreteProcess.linear(), 219, 641),
        (ks.DiscreteProcess.cosine(), 495, 958),
        (ks.DiscreteProcess.quadratic(), 411, 828),
    ],
)
def test_areas_begin_where_speed_has_them(process: Process, fastest: int, converged: int) -> None:
    acceleration, deceleration, convergence = process_increments(process).areas
    assert (acceleration.name, deceleration.name, convergence.name) == ("acceleration", "deceleration", "convergence")
    assert (acceleration.start, deceleration.start, convergence.start) == (0, fastest, converged)
    assert ks.Speed(process).num_meaningful_steps == converged + 1


def test_moments_are_those_of_the_paper() -> None:
    process = ks.DiscreteProcess.linear()
    increments = process_increments(process)
    alpha, alpha_bar = 1 - process.betas[1:], process.alphas_cumprod[:-1]
    assert_close(increments.mean, (alpha.sqrt() - 1) * alpha_bar.sqrt())
    assert_close(increments.variance, 2 - alpha_bar * (1 + alpha))


def test_slopes_are_finite_differences_of_sigma() -> None:
    process = ks.DiscreteProcess.cosine()
    alpha_bar = process.alphas_cumprod.numpy()
    rise = np.gradient(1 - alpha_bar)
    areas = process_increments(process).areas
    assert areas[0].end == int(rise.argmax())
    slope = np.gradient(np.sqrt(1 - alpha_bar))
    assert (slope[areas[0].end : areas[1].end] >= 1e-4).all()
    assert slope[areas[1].end] < 1e-4


@pytest.mark.parametrize("process", [ks.DiscreteProcess.linear(20, 1e-3, 0.3), ks.FlowProcess()])
def test_along_a_path_the_variance_is_that_of_drawn_paths(process: Process) -> None:
    increments = process_increments(process, num_steps=20)
    sigma, alpha = increments.sigma, (1 - increments.sigma.square()).sqrt()
    step, generator = 7, torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 200_000, dtype=torch.float64, generator=generator)
    ratio = alpha[step + 1] / alpha[step]
    before = sigma[step] * first
    after = ratio * before + (sigma[step + 1].square() - (ratio * sigma[step]).square()).sqrt() * second
    assert_close((after - before).var(), increments.chain_variance[step], rtol=0.02, atol=0)


@pytest.mark.parametrize("process", [ks.FlowProcess(), ks.EDMProcess(), ks.DiscreteProcess.scaled_linear()])
def test_areas_cover_all_steps_of_any_process(process: Process) -> None:
    areas = process_increments(process).areas
    assert areas[0].start == 0
    assert areas[-1].end == 1000
    assert all(one.end == other.start for one, other in itertools.pairwise(areas))
    assert sum(area.steps for area in areas) == pytest.approx(1)
    assert sum(area.change for area in areas) == pytest.approx(1)
    assert all(area.steps > 0.05 for area in areas)


def test_shares_hardly_depend_on_the_number_of_steps() -> None:
    coarse, fine = (process_increments(ks.EDMProcess(), num_steps=num).areas for num in (100, 4000))
    assert_close([area.steps for area in coarse], [area.steps for area in fine], rtol=0, atol=0.02)


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="num_steps must be a whole number of at least 3, got 2"):
        process_increments(ks.FlowProcess(), num_steps=2)
    with pytest.raises(ValueError, match="threshold must be a finite number above 0"):
        process_increments(ks.FlowProcess(), threshold=0)


def test_a_picture_of_very_many_steps_shows_some_of_them() -> None:
    panels = increments_panels(process_increments(ks.DiscreteProcess.linear(100_000)))
    assert all(1000 < len(curve.x) == len(curve.y) <= MAX_POINTS for panel in panels for curve in panel.curves)
