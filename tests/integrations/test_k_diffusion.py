"""Our samplers as k-diffusion's `sample_density`.

Its package demands torchvision, clip and more, so it lies beside the environment. Reproduced here by call shape,
from k-diffusion 0.1.1.post1 (layers.py, config.py) and its train.py: `sample_density([batch_size], device=device)`, a
Denoiser whose loss by sample is weighted by `weighting(sigma)`, and the config. The real densities and Denoiser are
compared where the package imports.
"""

import copy
from typing import Any

import pytest
import torch
from real_libraries import import_real
from torch import Tensor, nn

import kairostep as ks
from kairostep.integrations.k_diffusion import SampleDensity, quantile_of

STAND_INS = ("torchvision", "skimage", "clip", "cleanfid", "kornia", "jsonmerge", "wandb", "torchdiffeq")
MODEL = {"sigma_data": 0.5, "sigma_min": 1e-2, "sigma_max": 80.0, "input_size": [64, 64]}
DENSITIES = [
    {"type": "lognormal", "mean": -1.2, "std": 1.2},
    {"type": "lognormal", "loc": -0.5, "scale": 1.0},
    {"type": "loglogistic", "loc": -1.0, "scale": 0.4, "min_value": 1e-2, "max_value": 80.0},
    {"type": "loglogistic"},
    {"type": "loguniform"},
    {"type": "v-diffusion"},
    {"type": "cosine", "min_value": 1e-2, "max_value": 100.0},
    {"type": "cosine-interpolated"},
]


class Denoiser(nn.Module):
    """k-diffusion's Denoiser, as far as a loop sees it."""

    def __init__(self, inner_model: nn.Module, sigma_data: float = 0.5) -> None:
        super().__init__()
        self.inner_model, self.sigma_data = inner_model, sigma_data
        self.weighting = torch.ones_like

    def loss(self, input: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """Return the loss of each sample, (B,)."""
        total = (sigma**2 + self.sigma_data**2)[:, None]
        c_skip, c_out, c_in = self.sigma_data**2 / total, sigma[:, None] * self.sigma_data / total**0.5, total**-0.5
        noised = input + noise * sigma[:, None]
        target = (input - c_skip * noised) / c_out
        return (self.inner_model(noised * c_in, sigma) - target).square().flatten(1).mean(1) * self.weighting(sigma)


class SimpleLossDenoiser(Denoiser):
    """The one that never asks for its weighting."""


class Inner(nn.Module):
    """A network that is told sigma."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return a prediction."""
        return self.layers(torch.cat([x, sigma.log()[:, None] / 4], 1))


class Loop:
    """k-diffusion's training step."""

    def __init__(self, density: SampleDensity, denoiser: Any) -> None:
        self.density, self.model = density, denoiser
        self.optimizer = torch.optim.AdamW(denoiser.parameters(), lr=1e-2)

    def step(self, step: int) -> None:
        """Train on one batch."""
        torch.manual_seed(10 + step)
        reals = torch.randn(16, 4) * 0.5
        noise = torch.randn_like(reals)
        sigma = self.density([reals.shape[0]], device="cpu")
        losses = self.density.weighted(self.model.loss(reals, noise, sigma))
        self.optimizer.zero_grad()
        losses.mean().backward()
        self.optimizer.step()


def root_loss() -> ks.RootLoss:
    return ks.RootLoss(num_bins=5, warmup=4, refresh=2, gate=1.0)


def config(density: dict[str, Any] = DENSITIES[0]) -> dict[str, Any]:
    return {**MODEL, "sigma_sample_density": density}


def check_resume(make_denoiser: Any) -> None:
    whole, first, second = (Loop(SampleDensity.from_config(root_loss(), config()), make_denoiser()) for _ in range(3))
    for step in range(20):
        whole.step(step)
    for step in range(9):
        first.step(step)
    for name in ("model", "optimizer", "density"):
        getattr(second, name).load_state_dict(copy.deepcopy(getattr(first, name).state_dict()))
    for step in range(9, 20):
        second.step(step)
    torch.testing.assert_close(second.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    density = whole.density.sampler.density(5)
    torch.testing.assert_close(second.density.sampler.density(5), density, rtol=0, atol=0)
    assert float(density.max()) > 0.21


def test_root_loss_trains_and_resumes_bitwise() -> None:
    check_resume(lambda: Denoiser(Inner()))


def test_uniform_draws_the_log_normal_of_the_config() -> None:
    sigma = SampleDensity.from_config(ks.Uniform(), config())([20_000], device="cpu")
    assert sigma.dtype == torch.float32
    torch.testing.assert_close(sigma.log().mean(), torch.tensor(-1.2), atol=1e-3, rtol=0)
    torch.testing.assert_close(sigma.log().std(), torch.tensor(1.2), atol=2e-3, rtol=0)
    assert SampleDensity.from_config(ks.Uniform(), config())([4], dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("density", DENSITIES, ids=lambda density: density["type"])
def test_sigmas_rise_with_t_and_the_process_is_theirs(density: dict[str, Any]) -> None:
    t = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    sampled = SampleDensity.from_config(ks.Uniform(), config(density))
    sigma = sampled.quantile(t)
    assert bool((sigma.diff() > 0).all())
    torch.testing.assert_close(sampled.process.log_snr(t), -2 * sigma.log())
    torch.testing.assert_close(sampled.process.t_at(-2 * sigma.log()), t)


def test_the_split_log_normal_has_its_share_on_each_side() -> None:
    quantile = quantile_of(config({"type": "split-lognormal", "loc": -1.0, "scale_1": 0.5, "scale_2": 1.5}))
    z = quantile(torch.linspace(1e-5, 1 - 1e-5, 200_001, dtype=torch.float64)).log() + 1.0
    assert bool((z.diff() > 0).all())
    below, above = z[z < 0], z[z > 0]
    assert abs(len(below) / len(z) - 0.25) < 1e-4
    torch.testing.assert_close(below.square().mean().sqrt(), torch.tensor(0.5, dtype=torch.float64), rtol=1e-3, atol=0)
    torch.testing.assert_close(above.square().mean().sqrt(), torch.tensor(1.5, dtype=torch.float64), rtol=1e-3, atol=0)


def test_weights_in_the_denoiser_and_in_the_loop_are_the_same() -> None:
    reals, noise = torch.randn(2, 16, 4)
    in_loop, in_denoiser = (SampleDensity.from_config(ks.LogitNormal(unbiased=True), config()) for _ in range(2))
    plain, weighing = Denoiser(Inner()), Denoiser(Inner())
    in_denoiser.weigh(weighing)
    sigma = in_loop([16])
    expected = in_loop.weighted(plain.loss(reals, noise, sigma))
    losses = weighing.loss(reals, noise, in_denoiser([16]))
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(weighing.loss(reals, noise, sigma * 1.5), plain.loss(reals, noise, sigma * 1.5))
    with pytest.raises(RuntimeError, match="weighted once"):
        in_denoiser.weighted(losses)


def test_losses_are_learned_from_without_their_weights() -> None:
    both = []
    for weighted in (False, True):
        density = SampleDensity.from_config(root_loss(), config())
        sigma = density([16])
        weight = density.weight(sigma)
        density.learn(torch.arange(16.0) * (weight if weighted else 1), weighted=weighted)
        both.append(density.state_dict())
    torch.testing.assert_close(both[0], both[1])


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="draws before it sees the data, got Adaptive"):
        SampleDensity.from_config(ks.Adaptive(ks.BetaPolicy.for_input((4,))), config())
    with pytest.raises(ValueError, match=r"must be of type 'lognormal'.*got 'uniform'"):
        SampleDensity.from_config(ks.Uniform(), config({"type": "uniform"}))
    density = SampleDensity(ks.RootLoss(), torch.exp)
    with pytest.raises(ValueError, match="one sigma per row"):
        density([4, 1])
    with pytest.raises(ValueError, match="learns from the losses of its last draw, 0 rows"):
        density.weighted(torch.zeros(4))
    density([4])
    with pytest.raises(ValueError, match="before any mean"):
        density.weighted(torch.zeros(3))
    with pytest.raises(ValueError, match="got SimpleLossDenoiser"):
        density.weigh(SimpleLossDenoiser(Inner()))


@pytest.mark.parametrize("density", DENSITIES, ids=lambda density: density["type"])
def test_the_real_densities_are_ours_on_the_same_numbers(
    density: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = import_real("k_diffusion.config", *STAND_INS)
    t = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    numbers = 1 - t if density["type"] == "cosine-interpolated" else t  # that one falls as its numbers rise
    monkeypatch.setattr(library.utils, "stratified_with_settings", lambda shape, dtype, device: numbers.to(dtype))
    theirs = library.make_sample_density(config(density))([999], device="cpu", dtype=torch.float64)
    torch.testing.assert_close(quantile_of(config(density))(t), theirs, rtol=1e-4, atol=0)  # they keep 1e-7 off 0 and 1


def test_the_real_split_log_normal_has_our_quantiles() -> None:
    library = import_real("k_diffusion.config", *STAND_INS)
    density = {"type": "split-lognormal", "loc": -1.0, "scale_1": 0.5, "scale_2": 1.5}
    torch.manual_seed(0)
    theirs = library.make_sample_density(config(density))([100_000], device="cpu").double().log().sort().values
    ours = quantile_of(config(density))((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000).log()
    torch.testing.assert_close(ours[1000:-1000], theirs[1000:-1000], rtol=0, atol=0.06)


def test_the_real_denoiser_trains_resumes_and_takes_our_weights() -> None:
    library = import_real("k_diffusion.layers", *STAND_INS)
    with pytest.raises(ValueError, match="Unknown weighting"):
        library.Denoiser(Inner(), weighting=torch.ones_like)  # why `weigh` sets the attribute
    check_resume(lambda: library.Denoiser(Inner(), sigma_data=0.5, weighting="soft-min-snr"))
    reals, noise = torch.randn(2, 16, 4)
    for weighting in ("karras", "soft-min-snr", "snr"):
        density, uniform = (
            SampleDensity.from_config(sampler, config()) for sampler in (ks.LogitNormal(unbiased=True), ks.Uniform())
        )
        plain, weighing = (library.Denoiser(Inner(), sigma_data=0.5, weighting=weighting) for _ in range(2))
        density.weigh(weighing)
        sigma = density([16])
        torch.testing.assert_close(
            weighing.loss(reals, noise, sigma), plain.loss(reals, noise, sigma) * density.weight(sigma)
        )
        sigma = uniform([16])
        torch.testing.assert_close(
            uniform.weighted(plain.loss(reals, noise, sigma)), plain.loss(reals, noise, sigma), rtol=0, atol=0
        )
    for refused in (library.SimpleLossDenoiser, library.DenoiserWithVariance):
        with pytest.raises(ValueError, match="must weigh its loss"):
            density.weigh(refused(Inner()))
