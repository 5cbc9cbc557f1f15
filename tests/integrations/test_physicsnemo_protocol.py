"""Our samplers as a NoiseScheduler of NVIDIA PhysicsNeMo.

Its package demands torchvision, warp and more, so it lies beside the environment. Reproduced here from 2.2.2
(physicsnemo/diffusion/noise_schedulers/base.py, edm.py, metrics/losses.py): the runtime-checkable protocol, its EDM
scheduler, and the order in which MSEDSMLoss asks for time, noise and weight. Tests of the real ones run where the
package imports.
"""

import copy
import pickle
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from real_libraries import import_real
from torch import Tensor, nn

import kairostep as ks
from kairostep.integrations.physicsnemo import SampledNoiseScheduler

STAND_INS = ("torchvision", "timm", "s3fs", "nvtx", "h5py", "onnx", "cftime", "treelib", "termcolor", "hydra")
STAND_INS += ("omegaconf", "git", "pandas", "requests", "fsspec")


@runtime_checkable
class NoiseScheduler(Protocol):
    """The protocol, method by method."""

    def sample_time(self, N: int, *, device: Any = None, dtype: Any = None) -> Tensor:
        """Return training times."""
        ...

    def add_noise(self, x0: Tensor, time: Tensor) -> Tensor:
        """Return noisy data."""
        ...

    def timesteps(self, num_steps: int, *, device: Any = None, dtype: Any = None) -> Tensor:
        """Return sampling times."""
        ...

    def init_latents(self, spatial_shape: Any, tN: Tensor, *, device: Any = None, dtype: Any = None) -> Tensor:
        """Return noise."""
        ...

    def get_denoiser(self, **kwargs: Any) -> Any:
        """Return a denoiser."""
        ...

    def loss_weight(self, t: Tensor) -> Tensor:
        """Return loss weights."""
        ...


class EDMNoiseScheduler:
    """Their EDM scheduler: time is sigma."""

    P_mean, P_std, sigma_data = -1.2, 1.2, 0.5

    def sigma(self, t: Tensor) -> Tensor:
        """Return t."""
        return t

    def alpha(self, t: Tensor) -> Tensor:
        """Return 1."""
        return torch.ones_like(t)

    def sample_time(self, N: int, *, device: Any = None, dtype: Any = None) -> Tensor:
        """Return log-normal times."""
        return (torch.randn(N, device=device, dtype=dtype) * self.P_std + self.P_mean).exp()

    def add_noise(self, x0: Tensor, time: Tensor) -> Tensor:
        """Return x0 + sigma noise."""
        return x0 + time.view(-1, *[1] * (x0.ndim - 1)) * torch.randn_like(x0)

    def timesteps(self, num_steps: int, *, device: Any = None, dtype: Any = None) -> Tensor:
        """Return falling times."""
        return torch.linspace(80, 0, num_steps + 1, device=device, dtype=dtype)

    def init_latents(self, spatial_shape: Any, tN: Tensor, *, device: Any = None, dtype: Any = None) -> Tensor:
        """Return noise of size tN."""
        return tN.view(-1, *[1] * len(spatial_shape)) * torch.randn(len(tN), *spatial_shape)

    def get_denoiser(self, *, x0_predictor: Any) -> Any:
        """Return the slope of the ODE."""
        return lambda x, t: (x - x0_predictor(x, t)) / t.view(-1, *[1] * (x.ndim - 1))

    def loss_weight(self, t: Tensor) -> Tensor:
        """Return EDM's weight."""
        return (t**2 + self.sigma_data**2) / (t * self.sigma_data) ** 2

    def score_to_x0(self, score: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Return x0; no part of the protocol."""
        return x_t + t.view(-1, *[1] * (x_t.ndim - 1)) ** 2 * score


class MSEDSMLoss:
    """Their loss without reduction, in their order."""

    def __init__(self, model: nn.Module, noise_scheduler: Any, reduction: str = "none") -> None:
        assert reduction == "none"
        self.model, self.noise_scheduler = model, noise_scheduler

    def __call__(self, x0: Tensor, t: Tensor | None = None) -> Tensor:
        """Return the loss of each element."""
        if t is None:
            t = self.noise_scheduler.sample_time(len(x0), device=x0.device, dtype=x0.dtype)
        error = self.model(self.noise_scheduler.add_noise(x0, t), t, condition=None) - x0
        weight = self.noise_scheduler.loss_weight(t)
        return weight.reshape(*weight.shape, *[1] * (x0.ndim - weight.ndim)) * error**2


class Model(nn.Module):
    """An x0-predictor called as theirs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor, t: Tensor, condition: None = None) -> Tensor:
        """Return a prediction of the clean data."""
        level = t[:, None]
        return x / (1 + level**2) + level / (1 + level) * self.layers(torch.cat([x / (1 + level), level / 10], 1))


def root_loss() -> ks.RootLoss:
    return ks.RootLoss(num_bins=5, warmup=4, refresh=2, gate=1.0)


def trained(loss_class: Any, inner: Any, parts: list[range]) -> dict[str, Tensor]:
    """Train in parts, each starting from what the part before it saved."""
    saved = None
    for part in parts:
        scheduler, model = SampledNoiseScheduler(root_loss(), inner), Model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for thing, state in zip((scheduler, model, optimizer), saved or (), strict=False):
            thing.load_state_dict(state)
        loss_fn = loss_class(model, scheduler, reduction="none")
        for step in part:
            torch.manual_seed(step)
            loss = loss_fn(torch.randn(16, 4) * 0.5)
            scheduler.learn(loss, weighted=True)
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
        saved = copy.deepcopy([thing.state_dict() for thing in (scheduler, model, optimizer)])
    return {**model.state_dict(), "density": scheduler.sampler.density(5)}


def check_training(loss_class: Any, inner: Any) -> None:
    whole, resumed = (trained(loss_class, inner, parts) for parts in ([range(20)], [range(9), range(9, 20)]))
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    assert float(whole["density"].max()) > 0.21


def check_uniform(loss_class: Any, inner: Any, method: str, number: Any) -> None:
    """Compare with their own draws, made of the same numbers."""
    t = ks.Uniform().sample(torch.empty(16, 0)).t
    x0, noise = torch.randn(2, 16, 4)
    both = []
    for scheduler in (SampledNoiseScheduler(ks.Uniform(), inner), inner):
        model = Model()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, method, lambda *shape, **options: number(t.double()).float())
            patch.setattr(torch, "randn_like", lambda like: noise)
            loss = loss_class(model, scheduler, reduction="none")(x0)
        loss.mean().backward()
        both.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(both[0], both[1], rtol=1e-4, atol=1e-5)


def test_it_is_a_noise_scheduler() -> None:
    scheduler = SampledNoiseScheduler(ks.Uniform(), EDMNoiseScheduler())
    assert isinstance(scheduler, NoiseScheduler)
    assert scheduler.timesteps(4, dtype=torch.float64).dtype == torch.float64
    assert scheduler.init_latents((3,), torch.ones(2)).shape == (2, 3)
    assert scheduler.get_denoiser(x0_predictor=lambda x, t: x * 0)(torch.ones(2, 3), torch.ones(2)).shape == (2, 3)
    assert scheduler.score_to_x0(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)).shape == (2, 3)
    assert not hasattr(scheduler, "nothing")
    copied = pickle.loads(pickle.dumps(SampledNoiseScheduler(ks.Uniform(), EDMNoiseScheduler(), quantile=torch.exp)))
    torch.testing.assert_close(copied.sample_time(4), copied.quantile(ks.Uniform().sample(torch.empty(4, 0)).t))


def test_uniform_gives_the_schedulers_losses_and_gradients_on_the_same_numbers() -> None:
    check_uniform(MSEDSMLoss, EDMNoiseScheduler(), "randn", torch.special.ndtri)


def test_root_loss_trains_and_resumes_bitwise() -> None:
    check_training(MSEDSMLoss, EDMNoiseScheduler())


def test_only_times_drawn_last_carry_the_samplers_weight() -> None:
    inner = EDMNoiseScheduler()
    scheduler, sampler = SampledNoiseScheduler(ks.LogitNormal(unbiased=True), inner), ks.LogitNormal(unbiased=True)
    earlier, time = scheduler.sample_time(8), scheduler.sample_time(8)
    sampler.sample(torch.empty(8, 0))
    weight = sampler.sample(torch.empty(8, 0)).weight
    torch.testing.assert_close(scheduler.loss_weight(time), inner.loss_weight(time) * weight)
    mixed, patches = time.flip(0), time.repeat(3)  # in another order, or for several patches of an image
    torch.testing.assert_close(scheduler.loss_weight(mixed), inner.loss_weight(mixed) * weight.flip(0))
    torch.testing.assert_close(scheduler.loss_weight(patches), inner.loss_weight(patches) * weight.repeat(3))
    torch.testing.assert_close(scheduler.loss_weight(earlier), inner.loss_weight(earlier))


def test_weights_by_channel_stay_weights_by_channel() -> None:
    class ByChannel(EDMNoiseScheduler):
        """One sigma_data per channel."""

        sigma_data = torch.tensor([0.3, 0.5, 0.7])

        def loss_weight(self, t: Tensor) -> Tensor:
            """Return (N, C)."""
            return super().loss_weight(t[:, None])

    scheduler = SampledNoiseScheduler(ks.LogitNormal(unbiased=True), ByChannel())
    time = scheduler.sample_time(8)
    weight = ks.LogitNormal(unbiased=True).sample(torch.empty(8, 0)).weight
    torch.testing.assert_close(scheduler.loss_weight(time), ByChannel().loss_weight(time) * weight[:, None])


def test_the_process_is_that_of_the_scheduler() -> None:
    process, t = SampledNoiseScheduler(ks.Uniform(), EDMNoiseScheduler()).process, torch.linspace(0.1, 0.9, 9)
    torch.testing.assert_close(process.sigma(t), (torch.special.ndtri(t) * 1.2 - 1.2).exp())
    torch.testing.assert_close(process.log_snr(t), -2 * process.sigma(t).log())
    with pytest.raises(ValueError, match=r"name the prediction, for instance ks\.X0"):
        _ = process.prediction


def test_what_cannot_work_is_refused() -> None:
    class Own(EDMNoiseScheduler):
        """Draws its own way."""

        def sample_time(self, N: int, *, device: Any = None, dtype: Any = None) -> Tensor:
            """Return uniform times."""
            return torch.rand(N, device=device, dtype=dtype)

    with pytest.raises(ValueError, match="how Own draws its training times is not known"):
        SampledNoiseScheduler(ks.Uniform(), Own())
    t = ks.Uniform().sample(torch.empty(4, 0)).t
    torch.testing.assert_close(SampledNoiseScheduler(ks.Uniform(), Own(), quantile=lambda t: t).sample_time(4), t)
    with pytest.raises(ValueError, match="draws before it sees the data, got Adaptive"):
        SampledNoiseScheduler(ks.Adaptive(ks.BetaPolicy.for_input((4,))), EDMNoiseScheduler())
    with pytest.raises(ValueError, match=r"without sample_time\(\)"):
        SampledNoiseScheduler(ks.Uniform(), ks.EDMProcess())


def real() -> tuple[Any, Any]:
    losses = import_real("physicsnemo.diffusion.metrics.losses", *STAND_INS)
    return import_real("physicsnemo.diffusion.noise_schedulers", *STAND_INS), losses


def test_it_is_a_noise_scheduler_to_the_real_library() -> None:
    schedulers, _ = real()
    for inner in (schedulers.EDMNoiseScheduler(), schedulers.VPNoiseScheduler(), schedulers.VENoiseScheduler()):
        scheduler = SampledNoiseScheduler(ks.RootLoss(), inner)
        assert isinstance(scheduler, schedulers.NoiseScheduler)
        denoiser = scheduler.get_denoiser(x0_predictor=lambda x, t: x)
        times = scheduler.timesteps(3)
        assert denoiser(scheduler.init_latents((4,), times[:1]), times[:1]).shape == (1, 4)
    with pytest.raises(ValueError, match="how IDDPMNoiseScheduler draws"):
        SampledNoiseScheduler(ks.Uniform(), schedulers.IDDPMNoiseScheduler())


def test_uniform_gives_the_real_schedulers_losses_and_gradients_on_the_same_numbers() -> None:
    schedulers, losses = real()
    check_uniform(losses.MSEDSMLoss, schedulers.EDMNoiseScheduler(), "randn", torch.special.ndtri)
    for name in ("EDMLogUniformNoiseScheduler", "VPNoiseScheduler", "VENoiseScheduler"):
        check_uniform(losses.MSEDSMLoss, getattr(schedulers, name)(), "rand", lambda t: t)


def test_root_loss_trains_and_resumes_bitwise_with_the_real_loss() -> None:
    schedulers, losses = real()
    check_training(losses.MSEDSMLoss, schedulers.EDMNoiseScheduler())
    check_training(losses.MSEDSMLoss, schedulers.VPNoiseScheduler())


def test_the_process_of_the_real_schedulers_is_theirs() -> None:
    schedulers, _ = real()
    t = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    for name in ("EDMNoiseScheduler", "EDMLogUniformNoiseScheduler", "VPNoiseScheduler", "VENoiseScheduler"):
        inner = getattr(schedulers, name)()
        scheduler = SampledNoiseScheduler(ks.Uniform(), inner)
        time = scheduler.quantile(t)
        torch.testing.assert_close(scheduler.process.alpha(t), inner.alpha(time))
        torch.testing.assert_close(scheduler.process.sigma(t), inner.sigma(time))
        torch.testing.assert_close(scheduler.process.t_at(scheduler.process.log_snr(t)), t)
