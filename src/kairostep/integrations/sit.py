"""Samplers in SiT (willisma/SiT) and its forks, whose `transport.training_losses` draws the times itself.

timestep_sampler = ks.RootLoss()
SampledTransport(transport, timestep_sampler, opt)  # once both are made; the loop stays as it is
...
loss_dict = transport.training_losses(model, x, model_kwargs)  # draws, weighs and shows
loss = loss_dict["loss"].mean()
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kairostep.integrations.foreign_loop import give_loss_weight, require_sampler, rows_of_value
from kairostep.integrations.noise_levels import ReadProcess, follow
from kairostep.integrations.optimizer_hooks import StepObserver
from kairostep.timesteps import TimestepSampler
from kairostep.timesteps.histogram import BELOW_ONE

NEEDED = ("sample", "training_losses", "check_interval", "path_sampler", "train_eps", "sample_eps", "model_type")


class SampledTransport:
    """Puts a sampler into a Transport of SiT: times and loss weights come from the sampler.

    SiT's time runs from noise at 0 to data at 1, and training keeps `train_eps` away from ends at which the loss would
    be infinite. Both stay: our t = 0 is the last time that SiT itself would draw, t = 1 the first. `training_losses`
    returns losses times the sampler's weights, and shows the unweighted ones to the sampler around the optimizer's next
    step. Without gradients, and in generation, nothing changes.

    Save `sampler.state_dict()` with the checkpoint, and load it on every rank.
    """

    def __init__(self, transport: Any, sampler: TimestepSampler, optimizer: Optimizer) -> None:
        self.sampler = require_sampler(sampler)
        check_transport(transport)
        if isinstance(getattr(transport.training_losses, "__self__", None), SampledTransport):
            raise ValueError(
                "a transport draws by one sampler, got one that a SampledTransport is on: call its remove() first"
            )
        self.transport, self.weight = transport, LossWeight(transport)
        if self.weight.is_needed:
            give_loss_weight(sampler, self.weight)
        self.observer = StepObserver(sampler, optimizer)
        self._sample: Callable[..., Any] = transport.sample
        self._training_losses: Callable[..., Any] = transport.training_losses
        self._t: Tensor | None = None  # to train at, in our time
        transport.sample, transport.training_losses = self._sample_at, self._sampled_losses

    def remove(self) -> None:
        """Restore the transport and the optimizer."""
        self.transport.sample, self.transport.training_losses = self._sample, self._training_losses
        self.observer.remove()

    def _sample_at(self, x1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return times, noise and data as SiT does, with our times while a loss is computed."""
        t, x0, x1 = self._sample(x1)
        return (t if self._t is None else time_of(self.transport, self._t).to(t)), x0, x1

    def _sampled_losses(
        self, model: Callable[..., Tensor], x1: Tensor, model_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, Tensor]:
        """Return SiT's terms at drawn times, the loss weighted, and show it to the sampler."""
        if not torch.is_grad_enabled():
            terms: dict[str, Tensor] = self._training_losses(model, x1, model_kwargs, **options)
            return terms
        follow(self.sampler, x1.device)
        drawn = self.sampler.sample(x1)
        with self._at(drawn.t):
            terms = self._training_losses(model, x1, model_kwargs, **options)
        losses = terms["loss"]
        self.observer.show(x1, drawn, losses, self._loss_at(model, x1, model_kwargs or {}, options))
        return {**terms, "loss": losses * drawn.weight.to(losses.dtype)}

    def _loss_at(
        self, model: Any, x1: Tensor, model_kwargs: dict[str, Any], options: dict[str, Any]
    ) -> Callable[[Tensor, Tensor], Tensor]:
        bare = model.module if isinstance(model, DistributedDataParallel) else model  # ranks may ask unequally often

        def loss_at(rows: Tensor, t: Tensor) -> Tensor:
            some = {name: rows_of_value(value, rows, len(x1)) for name, value in model_kwargs.items()}
            with self._at(t):
                losses: Tensor = self._training_losses(bare, x1[rows], some, **options)["loss"]
            return losses

        return loss_at

    @contextmanager
    def _at(self, t: Tensor) -> Iterator[None]:
        """Make the transport draw these times next."""
        self._t = t
        try:
            yield
        finally:
            self._t = None


def time_of(transport: Any, t: Tensor) -> Tensor:
    """Return SiT's time: at t = 0 the end of its training range near the data, at t = 1 the end near the noise."""
    first, last = transport.check_interval(transport.train_eps, transport.sample_eps)
    time: Tensor = last - t * (last - first)
    return time.clamp(max=BELOW_ONE)  # as torch.rand, by which SiT draws


def process_of(transport: Any) -> ReadProcess:
    """Return the process that a Transport trains on, for samplers and weightings that take one."""
    check_transport(transport)
    path = transport.path_sampler
    first, last = transport.check_interval(transport.train_eps, transport.sample_eps)

    def time(t: Tensor) -> Tensor:
        return time_of(transport, t)

    is_flow = transport.model_type.name == "VELOCITY" and (first, last) == (0, 1)
    return ReadProcess(
        lambda t: path.compute_alpha_t(time(t))[0], lambda t: path.compute_sigma_t(time(t))[0], time, is_flow=is_flow
    )


class LossWeight:
    """SiT's factor on the squared error of the network's output, as a function of t.

    It is 1 for a velocity. For the noise it is what `--loss-weight` names, for the score sigma**2 times that.
    """

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.of, self.kind = transport.model_type.name, getattr(getattr(transport, "loss_type", None), "name", "NONE")

    @property
    def is_needed(self) -> bool:
        """Whether it is not 1 everywhere."""
        return self.of == "SCORE" or (self.of == "NOISE" and self.kind != "NONE")

    def __call__(self, t: Tensor) -> Tensor:
        """Return the factor (N,) at t (N,)."""
        path, time = self.transport.path_sampler, time_of(self.transport, t)
        sigma = path.compute_sigma_t(time)[0]
        _, drift = path.compute_drift(torch.zeros_like(time)[:, None], time)  # of x (N, 1)
        drift = drift.flatten()
        kinds = {"VELOCITY": (drift / sigma).square(), "LIKELIHOOD": drift / sigma.square()}
        weight: Tensor = kinds.get(self.kind, torch.ones_like(time))
        return weight * sigma.square() if self.of == "SCORE" else weight


def check_transport(transport: Any) -> None:
    """Raise unless this is a Transport whose time runs from noise at 0 to data at 1."""
    missing = [name for name in NEEDED if not hasattr(transport, name)]
    if missing:
        raise ValueError(
            f"transport must be SiT's, got a {type(transport).__name__} without {', '.join(missing)}: pass what "
            "create_transport(...) returned"
        )
    ends = torch.tensor([0.25, 0.75])
    share = transport.path_sampler.compute_alpha_t(ends)[0]
    if not bool(share[0] < share[1]):
        raise ValueError(
            f"SiT's time must run from noise at 0 to data at 1, got shares of data {share.tolist()} at 0.25 and 0.75: "
            "where a fork turned it round, draw with the sampler itself"
        )
