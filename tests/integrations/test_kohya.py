"""kohya's sd-scripts by call shape, and what the flags of four tools correspond to here."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_diffusers_scripts import Alone
from torch import Tensor
from torch.testing import assert_close

import kairostep as ks
from kairostep.integrations.kohya import KohyaSampler, flow_quantile, shifted


def sampler(name: Any = "root_loss") -> KohyaSampler:
    return KohyaSampler(name, Alone())  # type: ignore[arg-type]


def test_timesteps_are_whole_steps_of_the_range() -> None:
    steps = torch.cat([sampler("uniform").get_timesteps(200, 700, 64, "cpu") for _ in range(3)])
    assert steps.dtype == torch.int64
    assert int(steps.min()) >= 200
    assert int(steps.max()) < 700
    drawing = sampler("uniform")
    assert drawing.get_timesteps(500, 500, 3, "cpu").tolist() == [500, 500, 500]
    assert drawing._drawn is None  # a step of validation is no draw


def test_a_step_as_theirs_with_image_weights_and_min_snr() -> None:
    """Per-sample loss, then loss_weights, then SNR weights: uniform draws leave all of it as it was."""
    drawing = sampler("uniform")
    drawing.get_timesteps(0, 1000, 4, "cpu")
    element = torch.rand(4, 4, 8, 8, requires_grad=True)
    loss = element.mean([1, 2, 3])
    drawing.show(loss)
    weights, snr = torch.tensor([1.0, 1.0, 0.5, 0.5]), torch.tensor([0.2, 1.0, 0.7, 0.3])
    loss = loss * weights * snr
    assert torch.equal(drawing.mean(loss), loss.mean())
    with drawing.observe():
        pass


def test_validation_at_given_steps_neither_weights_nor_teaches() -> None:
    """sd-scripts validate by the method that trains, at steps that they give, also with other numbers of rows."""
    drawing = sampler(ks.RootLoss(num_bins=4, warmup=1, refresh=1))
    for _ in range(30):
        t = drawing.get_timesteps(0, 1000, 64, "cpu") / 1000
        losses = (t.square() + 0.01).requires_grad_()
        drawing.show(losses)
        drawing.mean(losses)
        with drawing.observe():
            pass
    before = {key: value.clone() for key, value in drawing.sampler.state_dict().items()}
    for num_rows, step in ((1, 100), (64, 500), (3, 900)):
        drawing.get_timesteps(step, step, num_rows, "cpu")
        losses = torch.rand(num_rows)
        drawing.show(losses)
        assert torch.equal(drawing.mean(losses), losses.mean())
    assert all(torch.equal(value, before[key]) for key, value in drawing.sampler.state_dict().items())
    drawing.get_timesteps(0, 1000, 64, "cpu")
    assert all(
        torch.equal(value, before[key]) for key, value in drawing.sampler.state_dict().items() if "draws" not in key
    )


def test_validation_at_noise_levels_of_the_sampler_teaches_nothing_either() -> None:
    """Scripts for Flux and SD3 draw noise levels in validation as in training; their losses have no gradient then."""
    drawing, alone = sampler(ks.RootLoss(warmup=1, refresh=1)), sampler(ks.RootLoss(warmup=1, refresh=1))
    for each, num_validated in ((drawing, 120), (alone, 0)):
        for _ in range(8):
            losses = each.get_sigmas("sigmoid", 16).square().requires_grad_()
            each.show(losses)
            each.mean(losses)
            with each.observe():
                pass
        for _ in range(num_validated):  # the sampler warns after 100 draws that no loss followed
            losses = each.get_sigmas("sigmoid", 3).square()
            each.show(losses)
            assert torch.equal(each.mean(losses), losses.mean())
    learned, expected = drawing.sampler.state_dict(), alone.sampler.state_dict()
    assert all(torch.equal(learned[key], expected[key]) for key in expected if "draws" not in key)
    assert not torch.equal(drawing.sampler.density(20), sampler("uniform").sampler.density(20))
    losses = drawing.get_sigmas("sigmoid", 16).square().requires_grad_()
    assert not torch.equal(drawing.mean(losses), losses.mean())  # training goes on with its weights


def test_root_loss_follows_the_weight_times_the_root_of_the_bare_loss() -> None:
    drawing, told = (
        sampler(ks.RootLoss(num_bins=4, warmup=1, refresh=1)),
        sampler(ks.RootLoss(num_bins=4, warmup=1, refresh=1)),
    )
    for _ in range(30):
        t = drawing.get_timesteps(0, 1000, 64, "cpu") / 1000
        told.get_timesteps(0, 1000, 64, "cpu")
        bare, weight = (t.square() + 0.01).requires_grad_(), 1 + 9 * t
        drawing.show(bare)
        assert_close(drawing.mean(bare * weight), told.mean(bare * weight, weight))
        with drawing.observe(), told.observe():
            pass
    assert_close(drawing.sampler.density(4), told.sampler.density(4))


@pytest.mark.parametrize("sampling", ["uniform", "sigmoid", "shift"])
def test_sigmas_of_a_uniform_sampler_are_drawn_as_theirs(sampling: str) -> None:
    ours = sampler("uniform").get_sigmas(sampling, 4096, sigmoid_scale=0.8, discrete_flow_shift=3.0)
    noise = torch.special.ndtri((torch.arange(4096) + 0.5) / 4096)
    theirs = {"uniform": (noise / math.sqrt(2)).erf() / 2 + 0.5, "sigmoid": (0.8 * noise).sigmoid()}
    theirs["shift"] = 3 * theirs["sigmoid"] / (1 + 2 * theirs["sigmoid"])
    assert_close(ours.sort().values[40:-40], theirs[sampling][40:-40], rtol=0, atol=0.02)  # the tails scatter
    with pytest.raises(ValueError, match="timestep_sampling must be one of"):
        flow_quantile("flux", ours)


U = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000  # of a uniform draw
N = torch.special.ndtri(U)  # of a normal draw
T = 1000


def mass_of(first: float, last: float) -> Tensor:
    """Return equal mass on a range of [0, 1]."""
    middle = (torch.arange(T) + 0.5) / T
    return ((middle > first) & (middle < last)).float()


def bias_mass(portion: float, multiplier: float) -> Tensor:
    """Return the mass of diffusers' and SimpleTuner's bias toward later timesteps."""
    mass = torch.ones(T)
    mass[-int(portion * T) :] *= multiplier
    return mass


def shifted_uniform(shift: float) -> Tensor:
    """Return the mass of uniform draws after a shift."""
    edges = torch.linspace(0, 1, T + 1)
    return (edges / (shift - (shift - 1) * edges)).diff()


def places(weights: Tensor) -> Tensor:
    """Return the noise levels of uniform draws from weights of T places, as OneTrainer takes them by multinomial."""
    return (torch.searchsorted(weights.double().cumsum(0) / weights.double().sum(), U).double() + 0.5) / T


X = torch.linspace(0, 1, T)
MIDDLE = (torch.arange(T) + 0.5) / T
EQUIVALENTS: dict[str, tuple[Callable[[], Tensor], Callable[[], ks.TimestepSampler]]] = {
    "kohya --min_timestep=200 --max_timestep=700": (lambda: 0.2 + 0.5 * U, lambda: ks.Tabulated(mass_of(0.2, 0.7))),
    "kohya --timestep_sampling=sigmoid --sigmoid_scale=0.8": (
        lambda: (0.8 * N).sigmoid(),
        lambda: ks.LogitNormal(mean=0.0, std=0.8),
    ),
    "kohya --timestep_sampling=shift --discrete_flow_shift=3": (
        lambda: 3 * N.sigmoid() / (1 + 2 * N.sigmoid()),
        lambda: ks.LogitNormal(mean=math.log(3)),
    ),
    "SimpleTuner --flow_sigmoid_scale=0.8 --flow_schedule_shift=3": (
        lambda: shifted((0.8 * N).sigmoid(), 3.0),
        lambda: ks.LogitNormal(mean=math.log(3), std=0.8),
    ),
    "SimpleTuner --flow_use_uniform_schedule --flow_schedule_shift=3": (
        lambda: shifted(U, 3.0),
        lambda: ks.Tabulated(shifted_uniform(3.0)),
    ),
    "SimpleTuner --flow_use_beta_schedule, alpha=2 beta=1": (lambda: U.sqrt(), lambda: ks.FixedBeta(2.0, 1.0)),
    "SimpleTuner, diffusers --timestep_bias_strategy=later, portion=0.25 multiplier=3": (
        lambda: torch.where(U < 0.5, U * 1.5, 0.75 + (U - 0.5) * 0.5),
        lambda: ks.Tabulated(bias_mass(0.25, 3.0)),
    ),
    "OneTrainer LOGIT_NORMAL, noising_bias=0.3 noising_weight=-0.2": (
        lambda: (0.3 + 0.8 * N).sigmoid(),
        lambda: ks.LogitNormal(mean=0.3, std=0.8),
    ),
    "OneTrainer LOGIT_NORMAL, timestep_shift=3": (
        lambda: shifted(N.sigmoid(), 3.0),
        lambda: ks.LogitNormal(mean=math.log(3)),
    ),
    "OneTrainer HEAVY_TAIL, noising_weight=1.29": (
        lambda: 1 - U - 1.29 * (torch.cos(math.pi / 2 * U) ** 2 - 1 + U),
        lambda: ks.Mode(scale=1.29),
    ),
    "OneTrainer COS_MAP": (
        lambda: places(2 / (math.pi - 2 * math.pi * X + 2 * math.pi * X**2)),
        lambda: ks.Tabulated(1 / (1 - 2 * MIDDLE + 2 * MIDDLE**2)),
    ),
    "OneTrainer SIGMOID, noising_bias=0.1 noising_weight=8": (
        lambda: places(1 / (1 + torch.exp(-8 * (X - 0.6)))),
        lambda: ks.Tabulated(torch.sigmoid(8 * (MIDDLE - 0.6))),
    ),
    "OneTrainer INVERTED_PARABOLA, noising_bias=-0.2 noising_weight=7": (
        lambda: places(torch.clamp(-7 * (X - 0.3) ** 2 + 2, min=0)),
        lambda: ks.Tabulated((2 - 7 * (MIDDLE - 0.3) ** 2).clamp(min=0)),
    ),
    "OneTrainer min_noising_strength=0.2 max_noising_strength=0.7": (
        lambda: 0.2 + 0.5 * U,
        lambda: ks.Tabulated(mass_of(0.2, 0.7)),
    ),
    "ai-toolkit timestep_type=sigmoid": (lambda: 1 - N.sigmoid(), lambda: ks.LogitNormal()),
    "ai-toolkit content_or_style=content": (lambda: 1 - U**3, lambda: ks.FixedBeta(1.0, 1 / 3)),
    "ai-toolkit content_or_style=style": (lambda: U**3, lambda: ks.FixedBeta(1 / 3, 1.0)),
}


@pytest.mark.parametrize("flag", EQUIVALENTS)
def test_flags_of_other_tools_have_the_density_of_a_sampler(flag: str) -> None:
    theirs, ours = EQUIVALENTS[flag]
    noise_levels = theirs()  # t = 0 is the data
    expected = torch.histc(noise_levels, 20, 0.0, 1.0) / len(noise_levels)
    assert_close(ours().density(20).double(), expected, rtol=0, atol=2e-3)
