"""Samplers for facebookresearch's flow_matching and for torchcfm, where t = 1 is data and t = 0 is noise.

sampler = PathSampler(ks.RootLoss(), path)  # a flow_matching path, or a torchcfm matcher
...
drawn = sampler.sample(x_1)  # drawn.t is the path's time
losses = losses_at(x_1, drawn.t)  # path.sample(x_0=..., x_1=x_1, t=drawn.t) and so on
(losses * drawn.weight).mean().backward()
with sampler.observe(x_1, drawn, losses):
    optimizer.step()
"""

import inspect
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kairostep.integrations.foreign_loop import require_sampler
from kairostep.integrations.noise_levels import OfTime, ReadProcess
from kairostep.timesteps import LossAt, Timesteps, TimestepSampler
from kairostep.timesteps.histogram import BELOW_ONE
from kairostep.timesteps.shown import check_loss_at, check_shown


@dataclass(frozen=True, slots=True)
class PathTimes:
    """Drawn times of a path, with their weights."""

    t: Tensor  # (B,) in [0, 1): 0 is noise, 1 is data
    weight: Tensor  # (B,) factor for the per-sample loss
    drawn: Timesteps  # the same in kairostep's time


class PathSampler(nn.Module):
    """A sampler in the time of a path, which runs from noise to data.

    This is a Module, and `to` and `state_dict` are the sampler's.

    Args:
        sampler: The sampler that draws.
        path: A ProbPath of flow_matching with a scheduler, or a ConditionalFlowMatcher of torchcfm. The direction of
            its time is read from it.
    """

    def __init__(self, sampler: TimestepSampler, path: Any) -> None:
        super().__init__()
        self.sampler, self.path = require_sampler(sampler), path
        check_direction(path)
        if sampler.uses_x0 and hasattr(path, "ot_sampler"):
            raise ValueError(
                f"{type(path).__name__} pairs data with noise anew after times are drawn, so {type(sampler).__name__} "
                "would draw for other rows: pair before, by x0, x1 = path.ot_sampler.sample_plan(x0, x1), and use a "
                "ConditionalFlowMatcher, or pass for instance ks.RootLoss()"
            )

    @property
    def inner(self) -> tuple[TimestepSampler, ...]:
        """The sampler that draws."""
        return (self.sampler,)

    def sample(self, x_1: Tensor) -> PathTimes:
        """Return one time of the path and one weight for each row of the data x_1 (B, ...)."""
        drawn = self.sampler.sample(x_1)
        return PathTimes(to_path_time(drawn.t), drawn.weight, drawn)

    def observe(
        self, x_1: Tensor, drawn: PathTimes, losses: Tensor, loss_at: LossAt | None = None
    ) -> AbstractContextManager[None]:
        """Wrap the optimizer's step. `loss_at(rows, t)` is called with the path's time."""
        own = own_time(drawn)
        check_shown(x_1, own, losses)
        check_loss_at(self.sampler, loss_at)
        at = loss_at and (lambda rows, t: loss_at(rows, to_path_time(t)))
        return self.sampler.observe(x_1, own, losses.detach(), at)

    def show(self, x_1: Tensor, drawn: PathTimes, losses: Tensor) -> None:
        """Show a micro-batch of the next step: each but the last, which `observe` shows."""
        self.sampler.show(x_1, own_time(drawn), losses)


def own_time(drawn: PathTimes) -> Timesteps:
    """Return what was drawn in kairostep's time."""
    if not isinstance(drawn, PathTimes):
        raise ValueError(
            f"drawn must be what `sample` of the PathSampler returned, got {type(drawn).__name__}: write "
            "observe(x_1, drawn, losses), with drawn itself and not drawn.t"
        )
    return drawn.drawn


def to_path_time(t: Tensor) -> Tensor:
    """Return 1 - t, always below 1, since paths may divide by something that vanishes at 1."""
    return (1 - t).clamp(max=BELOW_ONE)


def path_process(path: Any) -> ReadProcess:
    """Return the process of a path between Gaussian noise and data, for weightings and samplers that take one.

    `path_process(path).prediction` is the velocity that its networks predict, so that
    `ks.min_snr()(process.log_snr(t), process.prediction)` is the factor on their squared error.
    """
    check_direction(path)
    alpha, sigma = factors(path)
    is_flow = not (hasattr(path, "compute_mu_t") and _adds_noise(path))
    return ReadProcess(lambda t: alpha(1 - t), lambda t: sigma(1 - t), lambda t: 1 - t, is_flow=is_flow)


def _takes_time_first(path: Any) -> bool:
    """Return whether this is a path of SiT's shape, compute_mu_t(t, x0, x1); torchcfm's is compute_mu_t(x0, x1, t)."""
    mean = getattr(path, "compute_mu_t", None)
    return callable(mean) and next(iter(inspect.signature(mean).parameters), "") == "t"


def factors(path: Any) -> tuple[OfTime, OfTime]:
    """Return the factors of data and of noise as functions of the path's time."""
    if hasattr(path, "compute_mu_t"):
        if hasattr(path, "ot_sampler"):
            raise ValueError(
                f"a process has noise that is independent of the data, got {type(path).__name__}, which couples them: "
                "leave out what needs a process"
            )
        return _matcher_data(path), _matcher_noise(path)
    if not hasattr(path, "scheduler") or not hasattr(path, "target_to_velocity"):
        raise ValueError(
            f"a process is read from an AffineProbPath or a ConditionalFlowMatcher, got {path!r}: "
            "leave out what needs a process"
        )
    return (lambda t: path.scheduler(t).alpha_t), (lambda t: path.scheduler(t).sigma_t)


def _matcher_data(path: Any) -> OfTime:
    def alpha(t: Tensor) -> Tensor:
        mean: Tensor = path.compute_mu_t(torch.zeros_like(t), torch.ones_like(t), t)
        return mean

    return alpha


def _matcher_noise(path: Any) -> OfTime:
    """Return the standard deviation of all noise: x0's share of the mean, and the noise that is added to it."""

    def sigma(t: Tensor) -> Tensor:
        share = path.compute_mu_t(torch.ones_like(t), torch.zeros_like(t), t)
        added = torch.as_tensor(path.compute_sigma_t(t), dtype=t.dtype, device=t.device)
        return torch.hypot(share, added.expand_as(t))

    return sigma


def _adds_noise(path: Any) -> bool:
    """Return whether a matcher adds noise that its velocity leaves out."""
    middle = torch.tensor([0.5])
    has_x0 = bool(path.compute_mu_t(torch.ones(1), torch.zeros(1), middle) != 0)
    return has_x0 and bool(torch.as_tensor(path.compute_sigma_t(middle)) != 0)


def check_direction(path: Any) -> None:
    """Raise unless the path's time runs from noise at 0 to data at 1."""
    if hasattr(path, "path_sampler") or _takes_time_first(path):
        raise ValueError(
            f"path must be a flow_matching path or a torchcfm matcher, got {type(path).__name__}, which is called as "
            "SiT's: use kairostep.integrations.sit.SampledTransport(transport, sampler, optimizer), which keeps its "
            "train_eps"
        )
    ends = torch.tensor([0.0, 1.0])
    if hasattr(path, "compute_mu_t"):
        share_of_data = _matcher_data(path)(ends)
    elif callable(getattr(path, "scheduler", None)):
        share_of_data = path.scheduler(ends).alpha_t
    else:
        raise ValueError(
            f"path must be a flow_matching path with a scheduler or a torchcfm matcher, got {path!r}: "
            "pass for instance CondOTProbPath()"
        )
    if not bool(share_of_data[0] < share_of_data[1]):
        raise ValueError(
            f"the path's time must run from noise at 0 to data at 1, got shares of data {share_of_data.tolist()}: "
            "where it runs from data to noise, use the sampler itself"
        )
