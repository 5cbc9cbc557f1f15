"""Every registered sampler, and variants of some: the shared suite runs over this table.

A new sampler is here by itself; if it has options without a default, or learns slowly, it has a line here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import kairostep as ks
from kairostep.ranks import sum_over_ranks
from kairostep.registry import samplers
from kairostep.timesteps import SamplerContext

TAUGHT_STEPS = range(60)

PROCESS, FLOW = ks.DiscreteProcess.linear(), ks.FlowProcess()

Build = Callable[[nn.Module, int, tuple[int, ...]], ks.TimestepSampler]  # (model, seed, x0.shape[1:]) -> sampler


def by_name(name: str, **options: Any) -> Build:
    """Return what makes a registered sampler, as an experiment makes it."""

    def made(model: nn.Module, seed: int, shape: tuple[int, ...]) -> ks.TimestepSampler:
        sampler: ks.TimestepSampler = samplers.find(name).from_experiment(
            SamplerContext(ks.Objective(PROCESS), model, shape, seed=seed), **options
        )
        return sampler

    return made


REQUIRED: dict[str, dict[str, Any]] = {  # options without a default
    "beta": {"a": 0.7, "b": 2.0},
    "tabulated": {"mass": (1.0, 3.0, 0.0, 2.0, 5.0)},
    "curriculum": {"start": 2, "end": 6},
}
VARIANTS: dict[str, Build] = {
    "log_normal_sigma_edm": lambda model, seed, shape: ks.LogNormalSigma(ks.EDMProcess(), seed=seed),
    "laplace_flow": lambda model, seed, shape: ks.Laplace(FLOW, seed=seed),
    "speed_v1": lambda model, seed, shape: ks.Speed(PROCESS, "v1", seed=seed),
    "independent": lambda model, seed, shape: ks.LogitNormal(stratified=False, seed=seed),
    "logit_normal_unbiased": lambda model, seed, shape: ks.LogitNormal(unbiased=True, seed=seed),
    "loss_second_moment": lambda model, seed, shape: ks.LossSecondMoment(num_bins=50, history=5, seed=seed),
    "root_loss": lambda model, seed, shape: ks.RootLoss(warmup=4, refresh=2, gate=0.999, seed=seed),
    "root_loss_weighted": lambda model, seed, shape: ks.RootLoss(
        num_bins=50, warmup=1, refresh=1, loss_weight=lambda t: 1 + t, seed=seed
    ),
    "least_noise": lambda model, seed, shape: ks.LeastNoise(
        torch.optim.SGD(model.parameters(), 0.1), warmup=15, refresh=2, gate=0.999, seed=seed
    ),
    "curriculum": lambda model, seed, shape: ks.Curriculum(
        ks.LogitNormal(seed=seed), ks.RootLoss(warmup=2, refresh=2, seed=seed), start=2, end=6, seed=seed
    ),
    "infonoise": lambda model, seed, shape: ks.InfoNoise(PROCESS, num_bins=50, warmup=5, refresh=2, seed=seed),
    "infonoise_unbiased": lambda model, seed, shape: ks.InfoNoise(
        ks.FlowProcess(), warmup=3, refresh=1, unbiased=True, seed=seed
    ),
    "adaptive": lambda model, seed, shape: ks.Adaptive(
        ks.BetaPolicy.for_input(shape, 16), probing=ks.Probing(every=2), seed=seed
    ),
    "adaptive_pair_unbiased": lambda model, seed, shape: ks.Adaptive(
        ks.ConstantBeta(),
        probing=ks.Probing(every=2, credit="batch"),
        floor=0.1,
        learning_rate=0.3,
        unbiased=True,
        seed=seed,
    ),
    "adaptive_as_published": lambda model, seed, shape: ks.Adaptive(
        ks.BetaPolicy.for_input(shape, 16), probing=ks.Probing(every=3), num_steps=50, as_published=True, seed=seed
    ),
    "gradient_variance": lambda model, seed, shape: ks.GradientVariance(
        model.parameters(), num_bins=8, every=2, rows_per_gradient=8, seed=seed
    ),
    "gradient_variance_unbiased": lambda model, seed, shape: ks.GradientVariance(
        model.parameters(), num_bins=8, every=1, rows_per_gradient=8, unbiased=True, seed=seed
    ),
}
SAMPLERS: dict[str, Build] = {
    **{name: by_name(name, **REQUIRED.get(name, {})) for name in samplers.registered},
    **VARIANTS,  # some of them under the name of a sampler, with settings that learn in few steps
}
UNBIASED = (
    "uniform",
    "loss_second_moment",
    "root_loss",
    "root_loss_weighted",
    "least_noise",
    *(name for name in SAMPLERS if name.endswith("_unbiased")),
)


def build(name: str, model: nn.Module, seed: int = 0, shape: tuple[int, ...] = (4,)) -> ks.TimestepSampler:
    """Return a new sampler for x0 of this shape."""
    return SAMPLERS[name](model, seed, shape)


def build_model() -> nn.Module:
    """Return the same small network every time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Linear(4, 4)


def losses_of(model: nn.Module, x0: Tensor) -> ks.LossAt:
    """Return a loss whose size and gradient fall with t."""

    def loss_at(rows: Tensor, t: Tensor) -> Tensor:
        output: Tensor = model(x0[rows])
        return output.square().mean(1) * (0.1 + (1 - t)) ** 2

    return loss_at


def tilted_losses_of(model: nn.Module, x0: Tensor) -> ks.LossAt:
    """Return a loss that a step lowers differently at each t, so that the adaptive sampler's choice has no ties."""

    def loss_at(rows: Tensor, t: Tensor) -> Tensor:
        share, x = t[:, None], x0[rows]
        residual = (1 - share) * model(x) - (0.2 + share.square()) * x.roll(1, 1) - 0.3
        return residual.square().mean(1) * (0.3 + t)

    return loss_at


def batch(step: int, num_rows: int = 64) -> Tensor:
    """Return the data of a step (num_rows, 4), a function of the step."""
    return torch.randn(num_rows, 4, dtype=torch.float32, generator=torch.Generator().manual_seed(step))


def teach(sampler: ks.TimestepSampler, model: nn.Module, steps: range) -> None:
    """Train the model by gradient descent with the sampler's draws."""
    for step in steps:
        train_step(sampler, model, batch(step))


def train_step(
    sampler: ks.TimestepSampler,
    model: nn.Module,
    x0: Tensor,
    losses_of: Callable[[nn.Module, Tensor], ks.LossAt] = losses_of,
) -> ks.Timesteps:
    """Take one step of a training loop with this sampler and return what it drew."""
    loss_at = losses_of(model, x0)
    drawn = sampler.sample(x0)
    losses = loss_at(torch.arange(len(x0), device=x0.device), drawn.t)
    gradients = torch.autograd.grad((losses * drawn.weight).sum() / 64, list(model.parameters()))
    gradients = tuple(map(sum_over_ranks, gradients))
    with sampler.observe(x0, drawn, losses.detach(), loss_at), torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= 0.02 * gradient
    return drawn


@contextmanager
def gloo_rank(rank: int, folder: str) -> Iterator[None]:
    """Be one of two ranks for a block, and leave whatever happens in it.

    A process that ends within a gloo group is now and then aborted, which hides why the other one failed.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


LEARNING = tuple(name for name in SAMPLERS if build(name, build_model()).learns)


def build_taught(name: str, seed: int = 0, model: nn.Module | None = None) -> ks.TimestepSampler:
    """Return a sampler that has seen `TAUGHT_STEPS` of this model, which they train."""
    model = model or build_model()
    sampler = build(name, model, seed)
    teach(sampler, model, TAUGHT_STEPS)
    return sampler


every_sampler = pytest.mark.parametrize("name", SAMPLERS)
