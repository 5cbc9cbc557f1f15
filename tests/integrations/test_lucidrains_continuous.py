"""Our samplers in lucidrains' diffusions in continuous time, the real ones of denoising-diffusion-pytorch."""

import copy
from typing import Any

import pytest
import torch
from real_libraries import import_real
from torch import Tensor, nn
from torch.testing import assert_close

import kairostep as ks
from kairostep.integrations.lucidrains import SampledDiffusion, objective_of, prediction_of, process_of

NOISE, V = "ContinuousTimeGaussianDiffusion", "VParamContinuousTimeGaussianDiffusion"


class Network(nn.Module):
    """A network that is told log-SNR."""

    random_or_learned_sinusoidal_cond = True
    self_condition = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1))

    def forward(self, x: Tensor, log_snr: Tensor) -> Tensor:
        """Return a prediction."""
        return self.layers(torch.cat([x, (log_snr / 10).view(-1, 1, 1, 1).expand_as(x)], 1))


def make(name: str, **options: Any) -> Any:
    """Return a diffusion around a small network."""
    folder = "v_param_continuous_time_gaussian_diffusion" if name == V else "continuous_time_gaussian_diffusion"
    library = import_real(f"denoising_diffusion_pytorch.{folder}", "torchvision", "pytorch_fid")
    return getattr(library, name)(Network(), image_size=4, channels=1, **options)


def images(seed: int = 0) -> Tensor:
    """Return a batch in [0, 1]."""
    return torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


def noise() -> Tensor:
    """Return the same noise every time."""
    return torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [NOISE, V])
def test_uniform_gives_their_losses_and_gradients_at_the_same_times(name: str) -> None:
    times = ks.Uniform().sample(images()).t
    ours, theirs = make(name), make(name)
    SampledDiffusion(ours, ks.Uniform(), torch.optim.SGD(ours.parameters()))
    both = []
    for diffusion, given in ((ours, {}), (theirs, {"times": times})):
        loss = diffusion(images(), noise=noise(), **given)
        loss.backward()
        both.append([loss.detach(), *(parameter.grad for parameter in diffusion.parameters())])
    assert_close(both[0], both[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [(NOISE, {}), (NOISE, {"noise_schedule": "cosine"}), (NOISE, {"min_snr_loss_weight": True}), (V, {})],
)
def test_the_objective_is_their_loss(name: str, options: dict[str, Any]) -> None:
    diffusion, times = make(name, **options), ks.Uniform().sample(images()).t
    assert prediction_of(diffusion) is (ks.V if name == V else ks.EPSILON)
    theirs = diffusion(images(), times=times, noise=noise(), loss_reduction="none")
    ours = objective_of(diffusion)(diffusion.model, images() * 2 - 1, times, noise=noise())
    assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [NOISE, V])
def test_a_learning_sampler_trains_and_resumes_bitwise(name: str) -> None:
    def parts() -> tuple[Any, Any, ks.RootLoss]:
        diffusion, sampler = make(name), ks.RootLoss(num_bins=5, warmup=4, refresh=2, gate=1.0)
        optimizer = torch.optim.Adam(diffusion.parameters(), lr=1e-2)
        SampledDiffusion(diffusion, sampler, optimizer)
        return diffusion, optimizer, sampler

    def train(diffusion: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            diffusion(images(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, first, second = parts(), parts(), parts()
    train(*whole[:2], range(14))
    train(*first[:2], range(8))
    for before, after in zip(first, second, strict=True):
        after.load_state_dict(copy.deepcopy(before.state_dict()))
    train(*second[:2], range(8, 14))
    assert_close(dict(second[0].state_dict()), dict(whole[0].state_dict()), rtol=0, atol=0)
    assert_close(second[2].density(5), whole[2].density(5), rtol=0, atol=0)
    assert whole[2].density(5).std() > 1e-3


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match='got noise_schedule="learned": leave out what needs a process'):
        process_of(make(NOISE, noise_schedule="learned"))
    another = type("Another", (nn.Module,), {"p_losses": None, "random_times": None, "log_snr": torch.neg})()
    with pytest.raises(ValueError, match=r"known of ContinuousTimeGaussianDiffusion, .*got a Another: make"):
        prediction_of(another)


def test_root_loss_is_told_of_min_snr() -> None:
    t = torch.linspace(0.05, 0.95, 10)
    for min_snr in (False, True):
        diffusion, sampler = make(NOISE, min_snr_loss_weight=min_snr), ks.RootLoss()
        SampledDiffusion(diffusion, sampler, torch.optim.SGD(diffusion.parameters()))
        assert (sampler.loss_weight is None) is not min_snr
    snr = diffusion.log_snr(t).exp()
    assert_close(sampler.loss_weight(t), snr.clamp(max=5) / snr)
