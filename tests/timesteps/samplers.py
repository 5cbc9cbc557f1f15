"""Every sampler, once: the shared suite runs over this table, and a new sampler is one line here."""

from collections.abc import Callable

import kairostep as ks
import torch
from torch import Tensor, nn

PROCESS = ks.DiscreteProcess.linear()

Build = Callable[[nn.Module, int], ks.TimestepSampler]  # (model, seed) -> sampler

SAMPLERS: dict[str, Build] = {
    "uniform": lambda model, seed: ks.Uniform(seed=seed),
    "logit_normal": lambda model, seed: ks.LogitNormal(seed=seed),
    "mode": lambda model, seed: ks.Mode(seed=seed),
    "fixed_beta": lambda model, seed: ks.FixedBeta(0.7, 2.0, seed=seed),
    "tabulated": lambda model, seed: ks.Tabulated(torch.tensor([1.0, 3.0, 0.0, 2.0, 5.0]), seed=seed),
    "log_normal_sigma": lambda model, seed: ks.LogNormalSigma(PROCESS, seed=seed),
    "log_normal_sigma_edm": lambda model, seed: ks.LogNormalSigma(ks.EDMProcess(), seed=seed),
    "laplace": lambda model, seed: ks.Laplace(PROCESS, seed=seed),
    "laplace_flow": lambda model, seed: ks.Laplace(ks.FlowProcess(), seed=seed),
    "speed": lambda model, seed: ks.Speed(PROCESS, seed=seed),
    "speed_v1": lambda model, seed: ks.Speed(PROCESS, "v1", seed=seed),
    "independent": lambda model, seed: ks.LogitNormal(stratified=False, seed=seed),
    "logit_normal_unbiased": lambda model, seed: ks.LogitNormal(unbiased=True, seed=seed),
    "loss_second_moment": lambda model, seed: ks.LossSecondMoment(num_bins=50, history=5, seed=seed),
    "info_noise": lambda model, seed: ks.InfoNoise(PROCESS, num_bins=50, warmup=5, seed=seed),
    "info_noise_unbiased": lambda model, seed: ks.InfoNoise(ks.FlowProcess(), warmup=3, unbiased=True, seed=seed),
    "gradient_variance": lambda model, seed: ks.GradientVariance(model.parameters(), num_bins=8, every=2, seed=seed),
}
UNBIASED = ("uniform", "logit_normal_unbiased", "loss_second_moment", "info_noise_unbiased")
LEARNING = ("loss_second_moment", "info_noise", "info_noise_unbiased", "gradient_variance")


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


def batch(step: int, num_rows: int = 64) -> Tensor:
    """Return the data of a step (num_rows, 4), a function of the step."""
    return torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(step))


def teach(sampler: ks.TimestepSampler, model: nn.Module, steps: range, num_rows: int = 64) -> None:
    """Show the sampler its own draws' losses, as a training loop would, without training the model."""
    for step in steps:
        x0 = batch(step, num_rows)
        loss_at = losses_of(model, x0)
        drawn = sampler.sample(x0)
        losses = loss_at(torch.arange(num_rows), drawn.t).detach()
        with sampler.observe(x0, drawn, losses, loss_at):
            pass
