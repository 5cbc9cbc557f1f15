"""Loops of the call shapes of OneTrainer, SimpleTuner and ai-toolkit, with the lines of docs/fine_tuning_tools.md."""

from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from accelerators import forget_accelerators
from torch import Tensor, nn
from torch.testing import assert_close

import kairostep as ks
from kairostep.integrations.accelerate import Accelerated
from kairostep.integrations.optimizer_hooks import StepObserver
from kairostep.timesteps import Timesteps, TimestepSampler

NUM_STEPS, BATCH, T = 120, 16, 1000


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    forget_accelerators()
    yield
    forget_accelerators()


def losses_at(network: nn.Module, timesteps: Tensor) -> Tensor:
    """Return losses (B,) that fall with t, as those of a network that predicts the noise."""
    x = torch.ones(len(timesteps), 1)
    return (network(x)[:, 0] - 1).square() + 1 / (0.05 + timesteps.float() / T)


class OneTrainer:
    """The setup of a model draws and takes the mean; the trainer accumulates and steps."""

    distribution = "UNIFORM"
    bias, scale = 0.5, 1.2

    def __init__(self, sampler: TimestepSampler) -> None:
        self.network = nn.Linear(1, 1)
        self.optimizer = torch.optim.AdamW(self.network.parameters())
        self.timestep_sampler = sampler
        self.observer = StepObserver(sampler, self.optimizer)
        self.drawn: Timesteps

    def get_timestep_discrete(self, min_timestep: int, max_timestep: int, batch_size: int) -> Tensor:
        """Draw a step for each image."""
        num_timestep = max_timestep - min_timestep
        self.drawn = self.timestep_sampler.sample(torch.empty(batch_size, 0))
        if self.distribution == "UNIFORM":
            timestep = min_timestep + num_timestep * self.drawn.t
        elif self.distribution == "LOGIT_NORMAL":
            normal = self.bias + self.scale * torch.special.ndtri(self.drawn.t)
            timestep = normal.sigmoid() * num_timestep + min_timestep
        else:
            u = self.drawn.t
            u = 1.0 - u - self.scale * (torch.cos(torch.pi / 2 * u) ** 2 - 1.0 + u)
            timestep = u * num_timestep + min_timestep
        return timestep.int()

    def calculate_loss(self, losses: Tensor) -> Tensor:
        """Return the mean loss."""
        self.observer.show(torch.empty(len(losses), 0), self.drawn, losses.detach())
        return (losses * self.drawn.weight).mean()

    def train(self) -> None:
        """Take NUM_STEPS steps."""
        for step in range(2 * NUM_STEPS):
            losses = losses_at(self.network, self.get_timestep_discrete(0, T, BATCH))
            (self.calculate_loss(losses) / 2).backward()
            if step % 2:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)


class SimpleTuner:
    """The model draws noise levels and makes the loss; accelerate accumulates."""

    def __init__(self, sampler: TimestepSampler) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        network = nn.Linear(1, 1)
        self.network, self.optimizer = self.accelerator.prepare(network, torch.optim.AdamW(network.parameters()))
        self.timestep_sampler = Accelerated(sampler, self.accelerator)
        self.drawn: Timesteps
        self.losses: Tensor

    def sample_flow_sigmas(self, batch: dict[str, Tensor]) -> Tensor:
        """Draw a noise level for each image."""
        self.drawn = self.timestep_sampler.sample(batch["latents"])
        return self.drawn.t

    def loss(self, sigmas: Tensor) -> Tensor:
        """Return the mean loss."""
        loss = losses_at(self.network, sigmas * T)
        self.losses = loss.detach()
        return (loss * self.drawn.weight).mean()

    def train(self) -> None:
        """Take NUM_STEPS steps."""
        batch = {"latents": torch.zeros(BATCH, 4, 8, 8)}
        for _ in range(2 * NUM_STEPS):
            with self.accelerator.accumulate(self.network):
                self.accelerator.backward(self.loss(self.sample_flow_sigmas(batch)))
                with self.timestep_sampler.observe(batch["latents"], self.drawn, self.losses):
                    self.optimizer.step()
                self.optimizer.zero_grad()


class AIToolkit:
    """One process draws places in a table that begins at the noise, and another of its methods takes the mean."""

    def __init__(self, sampler: TimestepSampler) -> None:
        self.network = nn.Linear(1, 1)
        self.optimizer = torch.optim.AdamW(self.network.parameters())
        self.timestep_sampler = sampler
        self.observer = StepObserver(sampler, self.optimizer)
        self.timesteps = torch.linspace(T, 1, T)
        self.drawn: Timesteps

    def timestep_indices(self, latents: Tensor, min_idx: int, max_idx: int) -> Tensor:
        """Draw a place in the table for each image."""
        self.drawn = self.timestep_sampler.sample(latents)
        return min_idx + self.drawn.index(max_idx - min_idx)

    def calculate_loss(self, loss: Tensor) -> Tensor:
        """Return the mean loss."""
        self.observer.show(torch.empty(len(loss), 0), self.drawn, loss.detach())
        return (loss * self.drawn.weight).mean()

    def train(self) -> None:
        """Take NUM_STEPS steps."""
        latents = torch.zeros(BATCH, 4, 8, 8)
        for _ in range(NUM_STEPS):
            losses = losses_at(self.network, self.timesteps[self.timestep_indices(latents, 0, T)])
            self.optimizer.zero_grad()
            self.calculate_loss(losses).backward()
            self.optimizer.step()


@pytest.mark.parametrize("tool", [OneTrainer, SimpleTuner, AIToolkit])
def test_root_loss_learns_in_each_loop_where_losses_are_large(tool: type) -> None:
    torch.manual_seed(0)
    sampler = ks.RootLoss(warmup=10)
    tool(sampler).train()
    density = sampler.density(4)
    if tool is AIToolkit:  # its first place is noise
        density = density.flip(0)
    assert density[0] > 0.3 > density[3]
    assert sampler.steps.num_steps == NUM_STEPS


def test_uniform_draws_of_onetrainer_are_its_own_distributions() -> None:
    setup = OneTrainer(ks.Uniform())
    u = (torch.arange(BATCH * 500) + 0.5) / (BATCH * 500)
    normal = torch.special.ndtri(u)
    expected = {
        "UNIFORM": u,
        "LOGIT_NORMAL": (setup.bias + setup.scale * normal).sigmoid(),
        "HEAVY_TAIL": 1.0 - u - setup.scale * (torch.cos(torch.pi / 2 * u) ** 2 - 1.0 + u),
    }
    for setup.distribution, theirs in expected.items():
        drawn = setup.get_timestep_discrete(200, 700, len(u))
        assert_close(drawn.sort().values.float(), 200 + 500 * theirs.sort().values, rtol=0, atol=2.5)
        losses = torch.rand(len(u), requires_grad=True)
        assert torch.equal(setup.calculate_loss(losses), losses.mean())


def test_places_of_ai_toolkit_stay_in_their_range() -> None:
    process = AIToolkit(ks.Uniform())
    places = torch.cat([process.timestep_indices(torch.zeros(64, 0), 100, 900) for _ in range(20)])
    assert places.dtype == torch.int64
    assert int(places.min()) >= 100
    assert 880 < int(places.max()) < 900
