"""One optimizer step, on one process or many."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from kairostep.data import Batch
from kairostep.diffusion import Objective, antithetic_pairs
from kairostep.timesteps import Timesteps, TimestepSampler
from kairostep.timesteps.probes import global_generators
from kairostep.training.cuda_graphs import Graphs, ReplayedUpdate
from kairostep.training.ema import EMA
from kairostep.training.precision import prepared

log = logging.getLogger("kairostep")


class Seen(NamedTuple):
    """A batch as it was trained on."""

    x0: Tensor  # (B, ...)
    labels: Tensor | None  # (B,)
    t: Tensor  # (B,)
    weight: Tensor  # (B,)
    losses: Tensor  # (B,) detached


@dataclass(frozen=True, slots=True)
class Step:
    """What a step saw: the draws and the losses of all its batches, before their weights."""

    drawn: Timesteps
    losses: Tensor  # (B,)


class Trainer:
    """Trains a model at the timesteps that a sampler draws, with accelerate.

        trainer = Trainer(model, objective, sampler, optimizer)
        for batch in batches.from_step(0):
            trainer.step([batch])

    A step is a function of (seed, rank, step number), weights and batch: random numbers are seeded at its start.
    The model may be compiled in place, by `model.compile()`.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        sampler: TimestepSampler,
        optimizer: torch.optim.Optimizer,
        *,
        accelerator: Accelerator | None = None,  # Accelerator()
        learning_rate: Callable[[int], float] | None = None,  # of the step number; None leaves the optimizer's own
        max_grad_norm: float | None = None,
        ema_decay: float = 0.9999,
        pairs: bool = False,  # antithetic pairs of rows at low noise
        graph: bool = False,  # replay all of it as CUDA graphs: one process with a GPU
        channels_last: bool = False,  # faster once compiled, slower before: docs/performance.md
        seed: int = 0,
    ) -> None:
        self.accelerator = accelerator or Accelerator(cpu=not torch.accelerator.is_available())  # see `setup`
        if pairs and sampler.uses_x0:
            raise ValueError(
                "pairs trade images between neighbours in t, so that a sampler must not draw t by the image, got "
                f"{type(sampler).__name__}, which does: pass pairs=False, or ks.Adaptive(ks.BetaPair())"
            )
        device = self.accelerator.device
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        model.to(device, memory_format=self.memory_format)  # type: ignore[call-overload]
        self.ema = EMA(model, ema_decay)  # before the model's forward has a precision of its own
        self.model, self.optimizer = prepared(model, self.accelerator), optimizer
        self.scaler = self.accelerator.scaler or torch.amp.GradScaler(enabled=False)  # of fp16, else without effect
        self.network = self.accelerator.unwrap_model(self.model)  # without DDP: ranks may probe unequally often
        self.sampler = sampler.to(device)
        self.sampler.set_optimizer(optimizer)
        self.objective, self.learning_rate, self.max_grad_norm = objective, learning_rate, max_grad_norm
        self.parameters = list(model.parameters())
        self.pairs, self.graph, self.seed, self.step_number = pairs, graph, seed, 0
        self.gradient: Callable[..., tuple[Any, ...]] = self._gradient
        self.update: Callable[..., tuple[Any, ...]] = self._update
        self.losses_at: Callable[..., tuple[Any, ...]] = self._losses_at
        if graph:
            self._replay()

    def step(self, batches: Sequence[Batch]) -> Step:
        """Take one optimizer step on the mean loss of these batches.

        The sampler learns from the losses of all of them; one that asks for other losses measures the last.
        """
        seed_step(self.accelerator.device, self.seed, self.accelerator.process_index, self.step_number)
        all_seen = []
        for number, batch in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else self.accelerator.no_sync(self.model):
                all_seen.append(Seen(*self.gradient(batch.x0, batch.labels, len(batches))))
        *earlier, seen = all_seen
        for part in earlier:
            self.sampler.show(part.x0, Timesteps(part.t, part.weight), part.losses)

        def loss_at(rows: Tensor, t: Tensor) -> Tensor:
            losses_at = self._losses_at if torch.is_grad_enabled() else self.losses_at
            losses: Tensor = losses_at(seen.x0, seen.labels, rows, t, self.network.training)[0]
            return losses

        if self.learning_rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate(self.step_number)
        with self.sampler.observe(seen.x0, Timesteps(seen.t, seen.weight), seen.losses, loss_at):
            self.update()
        self.ema.update()
        self.step_number += 1
        return together(all_seen)

    def _gradient(self, x0: Tensor, labels: Tensor | None, num_batches: int) -> Seen:
        """Add the gradient of one of so many batches."""
        with torch.no_grad():  # the step shows the sampler its losses: no draw is to be counted as unshown
            drawn, noise = self.sampler.sample(x0), None
        if self.pairs:
            pairs = antithetic_pairs(self.objective.process, x0, drawn)
            x0, labels, noise = x0[pairs.rows], None if labels is None else labels[pairs.rows], pairs.noise
        x0 = x0.contiguous(memory_format=self.memory_format) if x0.ndim == 4 else x0
        cond = {} if labels is None else {"class_labels": labels}
        losses = self.objective(self.model, x0, drawn.t, noise=noise, **cond)
        loss = (losses * drawn.weight).mean()
        self.scaler.scale(loss if num_batches == 1 else loss / num_batches).backward()
        return Seen(x0, labels, drawn.t, drawn.weight, losses.detach())

    def _update(self) -> tuple[()]:
        """Take the step along the gradient, and leave none behind."""
        if self.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.graph)  # a recording has them in place
        return ()

    def _losses_at(self, x0: Tensor, labels: Tensor | None, rows: Tensor, t: Tensor, training: bool) -> tuple[Tensor]:
        """Return the losses of these rows at these times; `training` is the network's mode, which it has already."""
        cond = {} if labels is None else {"class_labels": labels[rows]}
        return (self.objective(self.network.forward, x0[rows], t, **cond),)  # not compiled: shapes of its own

    def _replay(self) -> None:
        """From now on replay what can be: the gradient, the update, and the losses that samplers ask for."""
        graphs = Graphs(self.accelerator.device)
        self.gradient = graphs.replayed("the gradient", self._gradient)
        self.losses_at = graphs.replayed("a probe", self._losses_at)
        if self.scaler.is_enabled() or not all(group.get("fused") for group in self.optimizer.param_groups):
            log.warning("the optimizer's step is not replayed: only a fused one can be, and not in fp16")
            self.update = self._update
        else:
            self.update = ReplayedUpdate(self._update, self.optimizer, graphs)

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides the steps to come; random numbers are a function of seed and step number."""
        return {
            "step": self.step_number,
            "model": self.network.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.sampler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state that `state_dict` returned, on any device."""
        self.step_number = state["step"]
        self.network.load_state_dict(state["model"])
        self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.load_state_dict(state["sampler"])
        self.scaler.load_state_dict(state["scaler"])
        self._restore_layout()
        if self.graph:
            self._replay()  # the optimizer has its moments in another place

    def _restore_layout(self) -> None:
        """Lay out the optimizer's moments as its parameters are: a resumed run shall run the same kernels."""
        for parameter, moments in self.optimizer.state.items():
            for name, value in moments.items():
                if torch.is_tensor(value) and value.shape == parameter.shape:
                    moments[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def together(all_seen: Sequence[Seen]) -> Step:
    """Return what a step saw in one or several batches."""
    if len(all_seen) == 1:
        return Step(Timesteps(all_seen[0].t, all_seen[0].weight), all_seen[0].losses)
    t, weight, losses = (torch.cat(parts) for parts in zip(*((s.t, s.weight, s.losses) for s in all_seen), strict=True))
    return Step(Timesteps(t, weight), losses)


def seed_step(device: torch.device, seed: int, rank: int, step: int) -> None:
    """Seed torch's global generators for one step of one process."""
    mixed = (seed * 0xD1B54A33 - (step + 1) * 0x9E3779B1 + rank) % 2**63  # probes have the multiples above 0
    for generator in global_generators(device):
        generator.manual_seed(mixed)


def warmed_up(learning_rate: float, warmup_steps: int = 0, cosine_steps: int | None = None) -> Callable[[int], float]:
    """Return the rate of each step: rising linearly over the warm-up, then constant, or a cosine down to 0."""

    def rate(step: int) -> float:
        if step < warmup_steps:
            return learning_rate * (step + 1) / warmup_steps
        if cosine_steps is None:
            return learning_rate
        share = (step - warmup_steps) / max(1, cosine_steps - warmup_steps)
        return learning_rate * (1 + math.cos(math.pi * min(share, 1.0))) / 2

    return rate
