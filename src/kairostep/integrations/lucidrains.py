"""Samplers in lucidrains' denoising-diffusion-pytorch, in its Trainer or in any loop that calls `diffusion(images)`.

trainer = Trainer(diffusion, folder)
SampledDiffusion(diffusion, ks.RootLoss(), trainer.opt)
trainer.train()
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kairostep.diffusion import EPSILON, X0, DiscreteProcess, Objective, Prediction, V, constant, min_snr
from kairostep.diffusion.process import Process
from kairostep.integrations.foreign_loop import give_loss_weight, require_sampler, rows_of_value
from kairostep.integrations.noise_levels import OfTime, ReadProcess, follow
from kairostep.integrations.optimizer_hooks import StepObserver
from kairostep.timesteps import Speed, Timesteps, TimestepSampler
from kairostep.timesteps.histogram import bin_index

PREDICTIONS: dict[str, Prediction] = {"pred_noise": EPSILON, "pred_x0": X0, "pred_v": V}
CONTINUOUS: dict[str, Prediction] = {
    "ContinuousTimeGaussianDiffusion": EPSILON,
    "VParamContinuousTimeGaussianDiffusion": V,
}


class SampledDiffusion:
    """Puts a sampler into a GaussianDiffusion (1D, continuous time), by hooks on the module and on the optimizer.

    In train mode, a call without `times` draws them, weights each sample's loss, and shows the losses to the sampler
    around the optimizer's next step. In eval mode, without gradients, or with `times` given, nothing changes. The
    losses include the library's `loss_weight`; a `RootLoss` without a loss weight gets it.

    Make it after the Trainer, whose EMA would copy it too. Save `sampler.state_dict()` beside the Trainer's milestones.
    """

    def __init__(self, diffusion: nn.Module, sampler: TimestepSampler, optimizer: Optimizer) -> None:
        self.sampler = require_sampler(sampler)
        check_diffusion(diffusion)
        if isinstance(sampler, Speed) and has_min_snr(diffusion):
            raise ValueError(
                "a loss is weighted once, got Speed, which weighs by its own rule, and min_snr_loss_weight=True: "
                "leave one of them out"
            )
        self.diffusion: Any = diffusion
        loss_weight = loss_weight_of(diffusion)
        if loss_weight is not None:
            give_loss_weight(sampler, loss_weight)
        self.observer = StepObserver(sampler, optimizer)
        self._asked: tuple[Timesteps, str, tuple[Any, ...], dict[str, Any]] | None = None
        self._handles = [
            diffusion.register_forward_pre_hook(self._before, with_kwargs=True),
            diffusion.register_forward_hook(self._after),
        ]

    def remove(self) -> None:
        """Restore the diffusion and the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.observer.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw times for this call, and ask for one loss per sample."""
        self._asked = None
        if not module.training or kwargs.get("times") is not None or not torch.is_grad_enabled():
            return None
        if kwargs.get("return_reduced_loss") is False:
            raise ValueError("a sampler weighs one loss per sample, got return_reduced_loss=False: leave it out")
        images, *others = args if args else (kwargs["img"],)
        follow(self.sampler, images.device)
        drawn = self.sampler.sample(images)
        rest = {name: value for name, value in kwargs.items() if name not in ("img", "times", "loss_reduction")}
        self._asked = drawn, kwargs.get("loss_reduction", "mean"), (images, *others), rest
        times = times_of(self.diffusion, drawn.t)
        return (images, *others), {**rest, "times": times, "loss_reduction": "none"}

    def _after(self, module: nn.Module, args: tuple[Any, ...], losses: Tensor) -> Tensor | None:
        """Weight the losses (B,), show them, and reduce them as the caller asked."""
        if self._asked is None:
            return None
        (drawn, reduction, given, rest), self._asked = self._asked, None
        self.observer.show(given[0], drawn, losses, self._loss_at(given, rest))
        weighted = losses * drawn.weight.to(losses.dtype)
        return weighted if reduction == "none" else weighted.mean()

    def _loss_at(self, given: tuple[Any, ...], rest: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
        num_rows = len(given[0])

        def loss_at(rows: Tensor, t: Tensor) -> Tensor:
            times = times_of(self.diffusion, t)
            args = [rows_of_value(value, rows, num_rows) for value in given]
            kwargs = {name: rows_of_value(value, rows, num_rows) for name, value in rest.items()}
            state = random.getstate()  # self-conditioning tosses Python's coin, which a probe has to know too
            random.seed(int(torch.randint(2**31, ())))
            try:
                losses: Tensor = self.diffusion(*args, **kwargs, times=times, loss_reduction="none")
            finally:
                random.setstate(state)
            return losses

        return loss_at


def times_of(diffusion: Any, t: Tensor) -> Tensor:
    """Return the `times` that its forward pass takes: steps, or t itself in continuous time."""
    return t if is_continuous(diffusion) else bin_index(t, diffusion.num_timesteps)


def is_continuous(diffusion: Any) -> bool:
    """Return whether its times are real numbers, from 0, clean, to 1, noise."""
    return callable(getattr(diffusion, "log_snr", None)) and not hasattr(diffusion, "num_timesteps")


def process_of(diffusion: Any) -> Process:
    """Return the process that a GaussianDiffusion trains on."""
    check_diffusion(diffusion)
    if is_continuous(diffusion):
        log_snr = diffusion.log_snr
        if isinstance(log_snr, nn.Module):
            raise ValueError(
                'a process has to stay as it is, got noise_schedule="learned": leave out what needs a process'
            )
        return ReadProcess(lambda t: log_snr(t).sigmoid().sqrt(), lambda t: (-log_snr(t)).sigmoid().sqrt(), log_snr)
    for name in ("offset_noise_strength", "immiscible"):
        if getattr(diffusion, name, 0):
            raise ValueError(
                f"a process has independent unit noise, got {name}={getattr(diffusion, name)}: "
                "leave out what needs a process, such as InfoNoise, or that option"
            )
    return DiscreteProcess.from_betas(diffusion.betas)


def prediction_of(diffusion: Any) -> Prediction:
    """Return what its network predicts."""
    check_diffusion(diffusion)
    if is_continuous(diffusion):
        known = [CONTINUOUS[cls.__name__] for cls in type(diffusion).__mro__ if cls.__name__ in CONTINUOUS]
        if not known:
            raise ValueError(
                f"what is predicted is known of {', '.join(CONTINUOUS)}, got a {type(diffusion).__name__}: "
                "make the ks.Objective yourself"
            )
        return known[0]
    objective: str = diffusion.objective
    if objective not in PREDICTIONS:
        raise ValueError(f"objective must be one of {', '.join(PREDICTIONS)}, got {objective!r}")
    return PREDICTIONS[objective]


def objective_of(diffusion: Any) -> Objective:
    """Return its loss, with Min-SNR, as an Objective: samplers take its `.weight`, `.x0_weight` or `.reweighting`."""
    process, prediction = process_of(diffusion), prediction_of(diffusion)
    if not isinstance(process, DiscreteProcess):
        weighting = min_snr(diffusion.min_snr_gamma) if has_min_snr(diffusion) else constant()
        return Objective(process, prediction, weighting)
    if _adds_errors(diffusion):
        raise ValueError(
            f"an objective is one squared error, got {type(diffusion).__name__}, which adds others: "
            "leave out what needs an objective"
        )

    def as_stored(log_snr: Tensor, of: Prediction) -> Tensor:
        if of != prediction:
            raise ValueError(f"this weighting is that of {prediction}, got {of}: the library has it for one alone")
        index = process.time(process.t_at(log_snr))
        weight: Tensor = diffusion.loss_weight.to(log_snr)[index]
        return weight

    return Objective(process, prediction, as_stored)


@dataclass
class WeightOfSteps:
    """The weight at each t, from that of each step: (T,)."""

    weight: Tensor

    def __call__(self, t: Tensor) -> Tensor:
        """Return the weights (N,) at t (N,)."""
        self.weight = self.weight.to(t.device)
        return self.weight[bin_index(t, len(self.weight))]


def loss_weight_of(diffusion: Any) -> OfTime | None:
    """Return the library's factor on the squared error as a function of t, or None if it is 1 or unknown.

    That is SNR for pred_x0, SNR / (1 + SNR) for pred_v, 1 for pred_noise, less where Min-SNR clips.
    """
    if is_continuous(diffusion):
        is_known = has_min_snr(diffusion) and not isinstance(diffusion.log_snr, nn.Module)
        return objective_of(diffusion).weight if is_known else None
    if _adds_errors(diffusion) or bool((diffusion.loss_weight == 1).all()):
        return None
    return WeightOfSteps(diffusion.loss_weight.detach().clone())


def _adds_errors(diffusion: Any) -> bool:
    """Return whether its loss is more than one squared error, in which case it leaves out `loss_weight`."""
    return getattr(diffusion, "vb_loss_weight", None) is not None or hasattr(diffusion, "pred_noise_loss_weight")


def has_min_snr(diffusion: Any) -> bool:
    """Return whether the library's weight includes Min-SNR: at high SNR it is less than the prediction's own factor."""
    if is_continuous(diffusion):
        return bool(getattr(diffusion, "min_snr_loss_weight", False))
    alpha_bar = DiscreteProcess.from_betas(diffusion.betas).alphas_cumprod
    snr = alpha_bar / (1 - alpha_bar)
    plain = {"pred_noise": torch.ones_like(snr), "pred_x0": snr, "pred_v": alpha_bar}[diffusion.objective]
    return bool((diffusion.loss_weight.double().cpu() < 0.99 * plain).any())


def check_diffusion(diffusion: Any) -> None:
    """Raise unless this is a diffusion whose `times` run from the least noise to the most."""
    needed = ("num_timesteps", "betas", "alphas_cumprod", "loss_weight", "objective", "p_losses")
    missing = [name for name in needed if not hasattr(diffusion, name)]
    if is_continuous(diffusion):
        missing = [name for name in ("random_times", "p_losses") if not hasattr(diffusion, name)]
    if missing:
        raise ValueError(
            f"diffusion must be lucidrains' GaussianDiffusion, GaussianDiffusion1D or one in continuous time, got a "
            f"{type(diffusion).__name__} without {', '.join(missing)}: ElucidatedDiffusion takes sigmas from the caller"
        )
