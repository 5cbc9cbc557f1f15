"""diffusers: a loop with `Scheduled` is the loop of its scripts, and samplers that learn go on where they stopped."""

from collections.abc import Callable

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler, UNet2DModel
from diffusers import training_utils as theirs
from schedulers import ZERO_SNR, T, described, every_step
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import kairostep as ks
from kairostep.integrations import diffusers as ours
from kairostep.integrations.diffusers import Scheduled


def small_unet() -> UNet2DModel:
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        layers_per_block=1,
        norm_num_groups=4,
        add_attention=False,
    )


def images(num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x0, noise = torch.randn(2, num, 1, 8, 8, generator=torch.Generator().manual_seed(seed)).unbind()
    return x0, noise


def gradients_of(model: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return gradients


def test_uniform_gives_the_loss_and_gradient_of_the_unconditional_script() -> None:
    model, scheduler, (x0, noise) = small_unet(), DDPMScheduler(), images(16)
    sampler = Scheduled(ks.Uniform(seed=3), scheduler)
    drawn = sampler.sample(x0)
    losses = F.mse_loss(
        model(scheduler.add_noise(x0, noise, drawn.timesteps), drawn.timesteps).sample, noise, reduction="none"
    ).mean(dim=[1, 2, 3])
    loss = (losses * drawn.weight).mean()
    loss.backward()
    found = gradients_of(model)

    timesteps = ks.Uniform(seed=3).sample(x0).index(T)  # in place of their torch.randint(0, T, (16,)).long()
    expected = F.mse_loss(model(scheduler.add_noise(x0, noise, timesteps), timesteps).sample, noise)
    expected.backward()
    assert torch.equal(drawn.timesteps, timesteps)
    assert_close(loss, expected)
    for ours_, theirs_ in zip(found, gradients_of(model), strict=True):
        assert_close(ours_, theirs_)
    objective = ks.Objective(sampler.process, sampler.prediction)
    assert_close(objective(model, x0, drawn.t, noise=noise), losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_uniform_gives_the_loss_and_gradient_of_the_flow_script(shift: float) -> None:
    model, scheduler, (x0, noise) = small_unet(), FlowMatchEulerDiscreteScheduler(shift=shift), images(16)
    sampler = Scheduled(ks.Uniform(seed=3), scheduler)
    drawn = sampler.sample(x0)
    sigmas = drawn.sigmas.view(-1, 1, 1, 1)
    output = model((1 - sigmas) * x0 + sigmas * noise, drawn.timesteps).sample
    losses = (output - (noise - x0)).square().mean(dim=[1, 2, 3])
    loss = (losses * drawn.weight).mean()
    loss.backward()
    found = gradients_of(model)

    u = ours.compute_density_for_timestep_sampling(ks.Uniform(seed=3), 16)  # in place of their u
    indices = (u * scheduler.config.num_train_timesteps).long()
    timesteps = scheduler.timesteps[indices]
    step_indices = [(scheduler.timesteps == t).nonzero().item() for t in timesteps]
    sigmas = scheduler.sigmas[step_indices].view(-1, 1, 1, 1)
    model_pred = model((1.0 - sigmas) * x0 + sigmas * noise, timesteps).sample
    weighting = theirs.compute_loss_weighting_for_sd3("none", sigmas)
    target = noise - x0
    expected = torch.mean((weighting.float() * (model_pred.float() - target.float()) ** 2).reshape(16, -1), 1).mean()
    expected.backward()
    assert torch.equal(drawn.timesteps, timesteps)
    assert drawn.timesteps.dtype == torch.float32
    objective = ks.Objective(sampler.process, sampler.prediction)
    assert_close(objective(model, x0, drawn.t, noise=noise), losses)
    assert_close(loss, expected)
    for ours_, theirs_ in zip(found, gradients_of(model), strict=True):
        assert_close(ours_, theirs_)


def make_root_loss(model: nn.Module) -> ks.TimestepSampler:
    return ks.RootLoss(num_bins=4, warmup=4, refresh=2, gate=1.0)


def make_adaptive(model: nn.Module) -> ks.TimestepSampler:
    policy = ks.BetaPolicy.for_input((1, 8, 8), hidden=8, seed=0)
    return ks.Adaptive(policy, probing=ks.Probing(every=4, sweep=8, reward_rows=8, queue_size=3), model=model)


class Training:
    """A diffusers loop on random images."""

    def __init__(self, scheduler: DDPMScheduler, make: Callable[[nn.Module], ks.TimestepSampler]) -> None:
        self.model, self.scheduler = small_unet(), scheduler
        self.sampler = Scheduled(make(self.model), scheduler)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.asked: list[Tensor] = []

    def losses_at(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the losses (B,) as the scripts have them."""
        if hasattr(self.scheduler, "add_noise"):
            noisy, target = self.scheduler.add_noise(x0, noise, timesteps), noise
        else:
            noisy, target = self.scheduler.scale_noise(x0, timesteps, noise), noise - x0
        return (self.model(noisy, timesteps).sample - target).square().mean(dim=[1, 2, 3])

    def step(self, number: int) -> None:
        """Take a step on the images of this number."""
        x0, noise = images(16, seed=number)
        drawn = self.sampler.sample(x0)
        losses = self.losses_at(x0, noise, drawn.timesteps)
        self.optimizer.zero_grad()
        (losses * drawn.weight).mean().backward()

        def loss_at(rows: Tensor, timesteps: Tensor) -> Tensor:
            self.asked.append(timesteps)
            return self.losses_at(x0[rows], torch.randn_like(x0[rows]), timesteps)

        with self.sampler.observe(x0, drawn, losses, loss_at):
            self.optimizer.step()


@pytest.mark.parametrize("scheduler", [DDPMScheduler(), FlowMatchEulerDiscreteScheduler(shift=3.0)], ids=described)
@pytest.mark.parametrize("make", [make_root_loss, make_adaptive])
def test_a_sampler_that_learns_trains_and_resumes_bitwise(
    scheduler: DDPMScheduler, make: Callable[[nn.Module], ks.TimestepSampler]
) -> None:
    whole, first, second = (Training(scheduler, make) for _ in range(3))
    for number in range(9):
        whole.step(number)
    for number in range(5):
        first.step(number)
    second.model.load_state_dict(first.model.state_dict())
    second.sampler.load_state_dict(first.sampler.state_dict())
    for number in range(5, 9):
        second.step(number)
    untrained = make(whole.model).state_dict()
    learned = {name.removeprefix("sampler."): value for name, value in whole.sampler.state_dict().items()}
    changed = [name for name, value in learned.items() if not torch.equal(value, untrained[name])]
    assert {"table.rows", "optimizer.num_updates"} & set(changed)
    for name, value in whole.sampler.state_dict().items():
        assert torch.equal(value, second.sampler.state_dict()[name]), name
    assert_close(second.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    for timesteps in whole.asked:
        assert bool(torch.isin(timesteps, whole.sampler.process.time(every_step(T))).all())
    assert bool(whole.asked) == whole.sampler.uses_loss_at


def test_what_asks_for_losses_must_be_given_them() -> None:
    model, (x0, _) = small_unet(), images(4)
    sampler = Scheduled(make_adaptive(model), DDPMScheduler())
    assert sampler.uses_x0
    with pytest.raises(ValueError, match=r"Adaptive asks for losses at other times: .*loss_at\(rows, timesteps\)"):
        sampler.observe(x0, sampler.sample(x0), torch.zeros(4))
    free = Scheduled(make_root_loss(model), DDPMScheduler())
    with free.observe(x0, free.sample(x0), torch.ones(4, requires_grad=True)):
        pass
    assert free.sampler.steps.num_steps == 1


def test_what_is_scheduled_can_be_asked_and_moved() -> None:
    sampler = Scheduled(make_root_loss(nn.Identity()), DDPMScheduler()).to(torch.float16)
    assert_close(sampler.density(10), torch.full((10,), 0.1))
    assert set(sampler.diagnostics()) == set(ks.RootLoss().diagnostics())
    assert sampler.sample(torch.zeros(4, 2, dtype=torch.float16)).timesteps.dtype == torch.int64
    with pytest.raises(ValueError, match="must be a kairostep sampler"):
        Scheduled(DDPMScheduler(), ks.Uniform())


def test_noise_is_not_predicted_at_zero_terminal_snr() -> None:
    with pytest.raises(ValueError, match=r'zero terminal SNR .*prediction_type="v_prediction"'):
        Scheduled(ks.Uniform(), DDPMScheduler(rescale_betas_zero_snr=True))
    Scheduled(ks.Uniform(), DDPMScheduler(**ZERO_SNR))
