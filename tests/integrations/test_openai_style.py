"""Our samplers in the training loop of improved-diffusion, guided-diffusion and DiT.

Those are not on PyPI. Reproduced here by call shape, from openai/guided-diffusion (resample.py, train_util.py): the
abstract classes ScheduleSampler and LossAwareSampler, the loop's `forward_backward` with micro-batches and its
isinstance guard around the update, and a GaussianDiffusion with numpy betas and `training_losses`.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kairostep as ks
from kairostep.integrations import openai
from kairostep.integrations.openai import ScheduleSampler, as_loss_aware, create_named_schedule_sampler, process_of


class TheirScheduleSampler(ABC):
    """Their base class: weights() is abstract, sample() draws by it."""

    @abstractmethod
    def weights(self) -> Any:
        """Return one weight per step."""

    def sample(self, batch_size: int, device: Any) -> tuple[Tensor, Tensor]:
        """Return steps and weights."""
        p = self.weights() / self.weights().sum()
        indices = np.random.choice(len(p), size=(batch_size,), p=p)  # noqa: NPY002
        return torch.from_numpy(indices).to(device), torch.from_numpy(1 / (len(p) * p[indices])).float().to(device)


class LossAwareSampler(TheirScheduleSampler):
    """Their base class of samplers that are shown losses."""

    def update_with_local_losses(self, local_ts: Tensor, local_losses: Tensor) -> None:
        """Gather, then learn."""
        raise AssertionError("theirs gathers over a process group, which need not be there")

    @abstractmethod
    def update_with_all_losses(self, ts: Any, losses: Any) -> None:
        """Learn."""


class Recorded(TheirScheduleSampler):
    """Their uniform sampler, with indices that are known: weights are all 1."""

    def __init__(self, indices: list[Tensor]) -> None:
        self.indices = indices

    def weights(self) -> Any:
        """Return one weight per step."""
        return np.ones(50)

    def sample(self, batch_size: int, device: Any) -> tuple[Tensor, Tensor]:
        """Return steps and weights."""
        return self.indices.pop(0), torch.ones(batch_size, device=device)


class GaussianDiffusion:
    """Their diffusion, as far as a loop sees it."""

    def __init__(self, num_timesteps: int = 50) -> None:
        self.betas = np.linspace(1e-4, 0.02, num_timesteps, dtype=np.float64) * min(20, 1000 / num_timesteps)
        self.num_timesteps = num_timesteps
        self.alphas_cumprod = np.cumprod(1 - self.betas)

    def training_losses(
        self, model: Callable[..., Tensor], x_start: Tensor, t: Tensor, model_kwargs: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return losses by name, each (B,)."""
        alpha_bar = torch.from_numpy(self.alphas_cumprod)[t].float()[:, None]
        noise = torch.randn_like(x_start)
        output = model(alpha_bar.sqrt() * x_start + (1 - alpha_bar).sqrt() * noise, t, **model_kwargs)
        mse = (output - noise).square().mean(1)
        return {"loss": mse, "mse": mse}


class Network(nn.Module):
    """A network called as theirs: model(x, t, **model_kwargs)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Return a prediction of the noise."""
        return self.layers(torch.cat([x, t[:, None] / 50], 1))


class TrainLoop:
    """The part of their loop that asks a schedule sampler, in their words and order."""

    def __init__(self, schedule_sampler: Any, microbatch: int = 8) -> None:
        torch.manual_seed(0)
        self.model, self.diffusion, self.microbatch = Network(), GaussianDiffusion(), microbatch
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule_sampler = schedule_sampler
        self.losses: list[Tensor] = []

    def run_step(self, step: int) -> None:
        """Train on one batch."""
        torch.manual_seed(1000 + step)
        batch = torch.randn(16, 4)
        self.opt.zero_grad()
        for start in range(0, len(batch), self.microbatch):
            micro = batch[start : start + self.microbatch]
            t, weights = self.schedule_sampler.sample(micro.shape[0], "cpu")
            losses = self.diffusion.training_losses(self.model, micro, t, model_kwargs={})
            if isinstance(self.schedule_sampler, LossAwareSampler):
                self.schedule_sampler.update_with_local_losses(t, losses["loss"].detach())
            loss = (losses["loss"] * weights).mean()
            loss.backward()
            self.losses.append(losses["loss"].detach())
        self.gradients = [parameter.grad.clone() for parameter in self.model.parameters()]
        self.opt.step()


def root_loss(**options: Any) -> ks.RootLoss:
    return ks.RootLoss(num_bins=5, warmup=4, refresh=2, gate=1.0, **options)


def test_uniform_gives_the_losses_and_gradients_of_their_uniform_on_the_same_numbers() -> None:
    copied = ks.Uniform()
    indices = [copied.sample(torch.empty(8, 0)).index(50) for _ in range(6)]
    theirs, ours = (
        TrainLoop(Recorded(indices)),
        TrainLoop(create_named_schedule_sampler("uniform", GaussianDiffusion())),
    )
    for step in range(3):
        theirs.run_step(step)
        ours.run_step(step)
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=0, atol=0)
        torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=0, atol=0)


def test_a_loss_aware_sampler_learns_through_their_guard_what_it_learns_in_our_loop() -> None:
    sampler = root_loss()
    loop = TrainLoop(create_named_schedule_sampler(sampler, GaussianDiffusion(), base=LossAwareSampler), microbatch=16)
    assert isinstance(loop.schedule_sampler, LossAwareSampler)
    own, plain = root_loss(), TrainLoop(None)
    for step in range(30):
        loop.run_step(step)
        torch.manual_seed(1000 + step)
        x = torch.randn(16, 4)
        drawn = own.sample(x)
        losses = plain.diffusion.training_losses(plain.model, x, drawn.index(50), {})["loss"]
        plain.opt.zero_grad()
        (losses * drawn.weight).mean().backward()
        with own.observe(x, drawn, losses.detach()):
            plain.opt.step()
    torch.testing.assert_close(loop.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(sampler.state_dict(), own.state_dict(), rtol=0, atol=0)
    assert float(sampler.density(5).max()) > 0.21


def test_a_run_resumed_with_the_samplers_state_goes_on_bitwise() -> None:
    def fresh() -> TrainLoop:
        return TrainLoop(as_loss_aware(LossAwareSampler)(root_loss(), GaussianDiffusion()))

    whole, first, second = fresh(), fresh(), fresh()
    for step in range(20):
        whole.run_step(step)
    for step in range(11):
        first.run_step(step)
    for name in ("model", "opt", "schedule_sampler"):
        getattr(second, name).load_state_dict(copy.deepcopy(getattr(first, name).state_dict()))
    for step in range(11, 20):
        second.run_step(step)
    torch.testing.assert_close(second.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(second.schedule_sampler.state_dict(), whole.schedule_sampler.state_dict())


def test_steps_are_int64_and_weights_float_as_their_loop_wants_them() -> None:
    schedule_sampler = ScheduleSampler(ks.LogitNormal(unbiased=True), GaussianDiffusion())
    t, weights = schedule_sampler.sample(4000, torch.device("cpu"))
    assert (t.dtype, weights.dtype, t.shape, weights.shape) == (torch.int64, torch.float32, (4000,), (4000,))
    assert (int(t.min()), int(t.max())) == (0, 49)
    p = schedule_sampler.weights()
    assert isinstance(p, np.ndarray)
    assert p.shape == (50,)
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-5)
    np.testing.assert_allclose(np.bincount(t, minlength=50) / 4000, p, atol=2 / 4000)  # stratified: nearly exact
    np.testing.assert_allclose(float((weights * t).mean()), 24.5, rtol=0.02)  # weighted back to uniform


@pytest.mark.parametrize("num_steps", [10, 100, 300, 500, 1000, 4000])
def test_a_loss_counts_in_every_bin_of_its_step(num_steps: int) -> None:
    steps = torch.arange(num_steps).repeat(10)
    losses = 1.0 + (steps >= num_steps // 2)
    second_moment = ks.LossSecondMoment()
    ScheduleSampler(second_moment, GaussianDiffusion(num_steps)).update_with_local_losses(steps, losses)
    assert int(second_moment.num_seen.min()) >= 10
    assert_density(second_moment.density(2), [1 / 3, 2 / 3])
    root_loss = ks.RootLoss(warmup=1, refresh=1, gate=1.0, floor=1e-9)
    ScheduleSampler(root_loss, GaussianDiffusion(num_steps)).update_with_local_losses(steps, losses)
    assert int(root_loss.squares.num_seen[:-1].min()) >= 10
    assert_density(root_loss.density(2), [1 / (1 + 2**0.5), 2**0.5 / (1 + 2**0.5)])
    curriculum = ks.Curriculum(ks.Uniform(), ks.LossSecondMoment(), start=0, end=1)
    ScheduleSampler(curriculum, GaussianDiffusion(num_steps)).update_with_local_losses(steps, losses)
    assert torch.equal(curriculum.then.num_seen, second_moment.num_seen)


def assert_density(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=2e-3)


def test_a_default_second_moment_learns_in_their_loop_of_few_steps() -> None:
    schedule_sampler = as_loss_aware(LossAwareSampler)(ks.LossSecondMoment(history=2), GaussianDiffusion())
    loop = TrainLoop(schedule_sampler, microbatch=16)
    for step in range(30):
        loop.run_step(step)
    assert float(schedule_sampler.sampler.density(5).max()) > 0.21


def test_losses_of_all_ranks_are_dealt_out_to_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ts, losses = list(range(0, 50, 7)), [float(i) for i in range(8)]
    one = ScheduleSampler(root_loss(), GaussianDiffusion())
    one.update_with_all_losses(ts, losses)
    assert int(one.sampler.squares.num_seen.sum()) == 8
    shown = []
    monkeypatch.setattr(openai, "world_size", lambda: 3)
    monkeypatch.setattr(ScheduleSampler, "update_with_local_losses", lambda self, t, loss: shown.append((t, loss)))
    for number in range(3):
        monkeypatch.setattr(openai, "rank", lambda number=number: number)
        one.update_with_all_losses(ts, losses)
    assert torch.cat([t for t, _ in shown]).tolist() == ts
    assert torch.cat([loss for _, loss in shown]).tolist() == losses


def test_a_learner_that_is_never_shown_a_loss_says_so() -> None:
    schedule_sampler = ScheduleSampler(root_loss(), GaussianDiffusion())
    for _ in range(99):
        schedule_sampler.sample(2, "cpu")
    with pytest.warns(UserWarning, match="RootLoss learns nothing"):
        schedule_sampler.sample(2, "cpu")


def test_names_are_theirs_and_ours() -> None:
    diffusion = GaussianDiffusion()
    second_moment = create_named_schedule_sampler("loss-second-moment", diffusion, base=LossAwareSampler)
    assert second_moment.sampler.losses.shape == (50, 10)  # one bin per step, as theirs
    speed = create_named_schedule_sampler("speed", diffusion)  # takes the process
    assert isinstance(speed.sampler, ks.Speed)
    with pytest.raises(ValueError, match="samplers are adaptive, beta"):
        create_named_schedule_sampler("unifrom", diffusion)
    with pytest.raises(ValueError, match="sampler must be a kairostep sampler"):
        create_named_schedule_sampler("min_snr", diffusion)


def test_step_0_is_the_least_noisy_one() -> None:
    diffusion = GaussianDiffusion()
    np.testing.assert_allclose(process_of(diffusion).alphas_cumprod.numpy(), diffusion.alphas_cumprod, rtol=1e-12)
    near_data = ScheduleSampler(ks.FixedBeta(1.0, 20.0), diffusion).sample(64, "cpu")[0]
    assert diffusion.alphas_cumprod[near_data].mean() > 0.9


def test_what_cannot_work_is_refused() -> None:
    diffusion = GaussianDiffusion()
    with pytest.raises(ValueError, match="draws before it sees the data, got Adaptive"):
        ScheduleSampler(ks.Adaptive(ks.BetaPolicy.for_input((4,))), diffusion)
    with pytest.raises(ValueError, match="cannot evaluate losses around a step, got GradientVariance"):
        ScheduleSampler(ks.GradientVariance([torch.nn.Parameter(torch.zeros(2))]), diffusion)
    with pytest.raises(ValueError, match="pass base=LossAwareSampler"):
        create_named_schedule_sampler("root_loss", diffusion)
    with pytest.raises(ValueError, match="base must be the LossAwareSampler class"):
        as_loss_aware(TheirScheduleSampler)
    with pytest.raises(ValueError, match="must have betas and num_timesteps"):
        ScheduleSampler(ks.Uniform(), ks.FlowProcess())
    with pytest.raises(ValueError, match="options belong to the name"):
        create_named_schedule_sampler(ks.Uniform(), diffusion, seed=1)
    with pytest.raises(ValueError, match="one loss per step"):
        ScheduleSampler(ks.Uniform(), diffusion).update_with_all_losses([1], [])
    with pytest.raises(ValueError, match="local_ts must be steps"):
        ScheduleSampler(root_loss(), diffusion).update_with_local_losses(torch.rand(4), torch.rand(4))
    diffusion.num_timesteps = 25
    with pytest.raises(ValueError, match="betas must be one per step"):
        ScheduleSampler(ks.Uniform(), diffusion)


@pytest.mark.gpu
def test_the_sampler_follows_to_the_device_that_the_loop_names() -> None:
    schedule_sampler = ScheduleSampler(root_loss(), GaussianDiffusion())
    for _ in range(6):
        t, weights = schedule_sampler.sample(16, torch.device("cuda"))
        assert t.device.type == weights.device.type == "cuda"
        schedule_sampler.update_with_local_losses(t, torch.rand(16, device="cuda"))
    assert schedule_sampler.weights().shape == (50,)
