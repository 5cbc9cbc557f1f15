"""The training loop: one optimizer step, on one process or many."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kairostep.data import Batch
from kairostep.diffusion import Objective
from kairostep.diffusion.conditions import class_condition
from kairostep.diffusion.variance_reduction import check_pairs
from kairostep.parallelism import check_parallelism
from kairostep.timesteps import Timesteps, TimestepSampler
from kairostep.timesteps.gradient_size import signed_size
from kairostep.timesteps.probes import global_generators
from kairostep.training.ema import EMA
from kairostep.training.gradient_average import GradientAverage, share_start
from kairostep.training.precision import prepare_model
from kairostep.training.row_noise import RowNoise, targets_by


@dataclass(frozen=True, slots=True)
class SeenBatch:
    """A batch as it was trained on. With antithetic pairs, its rows differ from those that were read."""

    batch: Batch
    drawn: Timesteps
    losses: Tensor  # (B,) detached, before their weights


@dataclass(frozen=True, slots=True)
class Step:
    """The draws and losses of all batches of a step."""

    drawn: Timesteps
    losses: Tensor  # (B,) before their weights


@dataclass(frozen=True, slots=True)
class BatchLosses:
    """Losses and gradients of rows of a batch, for probes: `loss_at` of the samplers."""

    trainer: "Trainer"
    batch: Batch

    def __call__(self, rows: Tensor, t: Tensor) -> Tensor:
        """Return the losses (N,) of these rows (N,) at the times t (N,)."""
        return self.trainer.losses_at(self.batch, rows, t)

    def gradient_size(self, rows: Tensor, t: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses (N,), detached, and the `signed_size` of their gradient, ()."""
        return self.trainer.gradient_size_at(self.batch, rows, t, signs)


class Trainer:
    """Trains a model at the timesteps that a sampler draws, with accelerate.

        trainer = Trainer(model, objective, sampler, optimizer)
        for batch in batches.from_step(0):
            trainer.step([batch])

    A step is a function of seed, step number, weights and batch. Processes that share a batch take the step that one
    would take with all of it, up to the order of summation: noise is a function of (seed, step, row). Dropout is the
    exception: its masks depend on the process. You may compile the model in place, by `model.compile()`.
    `cuda_graphs.ReplayedTrainer` replays `backward`, `update` and `losses_at` as CUDA graphs.

    Args:
        model: The network, called as the objective calls it. It is moved to the accelerator's device.
        objective: Loss of the model at given timesteps.
        sampler: Draws the timesteps and learns from their losses.
        optimizer: Of the model's parameters.
        accelerator: Device, processes and precision. Default: `Accelerator()`, on the CPU if there is no GPU.
        learning_rate: Learning rate of each step number. Default: the optimizer's own.
        max_grad_norm: Clip gradients to this norm. Default: do not clip.
        ema_decay: Decay of the averaged weights.
        pairs: Train antithetic pairs of rows at low noise.
        channels_last: Memory layout; faster for compiled networks, slower for others.
        seed: Of all random numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        sampler: TimestepSampler,
        optimizer: torch.optim.Optimizer,
        *,
        accelerator: Accelerator | None = None,
        learning_rate: Callable[[int], float] | None = None,
        max_grad_norm: float | None = None,
        ema_decay: float = 0.9999,
        pairs: bool = False,
        channels_last: bool = False,
        seed: int = 0,
    ) -> None:
        self.accelerator = accelerator or Accelerator(cpu=not torch.accelerator.is_available())  # as `make_accelerator`
        check_parallelism(self.accelerator.distributed_type.value)
        if pairs:
            check_pairs(sampler)
        device = self.accelerator.device
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        model.to(device, memory_format=self.memory_format)  # type: ignore[call-overload]
        if isinstance(model, DistributedDataParallel):
            raise ValueError("model must be the bare network, got it in DistributedDataParallel: pass model.module")
        share_start(model)
        self.ema = EMA(model, ema_decay)  # before `prepare_model` wraps the forward in autocast
        self.model, self.optimizer = prepare_model(model, self.accelerator), optimizer
        self.scaler = self.accelerator.scaler or torch.amp.GradScaler(enabled=False)  # only fp16 scales
        self.network, self.average = self.accelerator.unwrap_model(self.model), GradientAverage(model)
        self.sampler = sampler.to(device)
        self.sampler.set_optimizer(optimizer)
        self.objective, self.learning_rate, self.max_grad_norm = objective, learning_rate, max_grad_norm
        self.parameters = list(model.parameters())
        self.pairs, self.seed, self.step_number = pairs, seed, 0
        self.noise = RowNoise(seed, self.accelerator.process_index, device)

    def step(self, batches: Sequence[Batch]) -> Step:
        """Take one optimizer step on the mean loss of these batches.

        The sampler learns from the losses of all batches. If it probes further losses, it probes the last batch.
        """
        seed_step(self.accelerator.device, self.seed, self.accelerator.process_index, self.step_number)

        # Draw timesteps for each batch and backpropagate its loss; processes exchange gradients at the last one
        seen = []
        for number, batch in enumerate(batches, start=1):
            key = self.noise.step_key(self.step_number, number)
            with self.exchanging() if number == len(batches) else nullcontext():
                seen.append(self.backward(batch, key, len(batches)))
        self.average.finish()

        # Show the sampler the losses, and let it watch the update
        *earlier, last = seen
        for part in earlier:
            self.sampler.show(part.batch.x0, part.drawn, part.losses)
        if self.learning_rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate(self.step_number)
        with self.sampler.observe(last.batch.x0, last.drawn, last.losses, BatchLosses(self, last.batch)):
            self.update()

        self.ema.update()
        self.step_number += 1
        return merge_batches(seen)

    def exchanging(self) -> AbstractContextManager[None]:
        """Return a block for a backward pass that sends gradients while it makes others."""
        return self.average.overlapped()

    def backward(self, batch: Batch, key: Tensor, num_batches: int = 1) -> SeenBatch:
        """Draw timesteps and backpropagate one micro-batch, scaled by 1/num_batches. Its noise depends on the key."""
        with torch.no_grad():  # the sampler does not count these draws as unobserved: `step` shows it their losses
            drawn = self.sampler.sample(batch.x0)
        if self.pairs:
            batch, noise = self.noise.of_pairs(key, batch, drawn, self.objective)
        else:
            noise = self.noise.of_batch(key, batch.x0)
        x0, noise = (self.laid_out(value) for value in (batch.x0, noise))
        with targets_by(key, self.objective):
            losses = self.objective(self.model, x0, drawn.t, noise=noise, **class_condition(batch.labels))
        loss = (losses * drawn.weight).mean()
        self.scaler.scale(loss if num_batches == 1 else loss / num_batches).backward()
        return SeenBatch(Batch(x0, batch.labels), drawn, losses.detach())

    def laid_out(self, value: Tensor) -> Tensor:
        """Return images in the network's memory layout, and anything else as it is."""
        return value.contiguous(memory_format=self.memory_format) if value.ndim == 4 else value

    def update(self) -> None:
        """Clip, step, zero gradients."""
        if self.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def losses_at(self, batch: Batch, rows: Tensor, t: Tensor) -> Tensor:
        """Return the losses (N,) of these rows (N,) of a batch at the times t (N,).

        The noise is a function of the probe, the row over all processes and t, the same before and after a step.
        """
        return self.losses_with(self.noise.probe_key(self.step_number), batch, rows, t)

    def losses_with(self, key: Tensor, batch: Batch, rows: Tensor, t: Tensor) -> Tensor:
        """Return the losses (N,) of rows (N,) at t (N,) with the noise that the key gives them."""
        noise = self.noise.of_probe(key, batch.x0, rows, t)
        cond = class_condition(batch.labels, rows)
        with targets_by(key, self.objective):  # `forward`: not compiled for N rows
            return self.objective(self.network.forward, batch.x0[rows], t, noise=noise, **cond)

    def gradient_size_at(self, batch: Batch, rows: Tensor, t: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses (N,) of these rows at t, and the size of their gradient with these signs, ()."""
        return self.gradient_size_with(self.noise.probe_key(self.step_number), batch, rows, t, signs)

    def gradient_size_with(
        self, key: Tensor, batch: Batch, rows: Tensor, t: Tensor, signs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the losses (N,) and the size () with the noise that the key gives them."""
        with torch.enable_grad():
            losses = self.losses_with(key, batch, rows, t)
            return losses.detach(), signed_size(losses, signs.to(losses), self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return all that later steps depend on. Random numbers follow from seed and step number."""
        return {
            "step": self.step_number,
            "model": self.network.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.sampler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, from any device."""
        self.step_number = state["step"]
        self.network.load_state_dict(state["model"])
        self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.load_state_dict(state["sampler"])
        self.scaler.load_state_dict(state["scaler"])
        match_layout(self.optimizer)


def merge_batches(seen: Sequence[SeenBatch]) -> Step:
    """Return the draws and losses of all batches as one step."""
    if len(seen) == 1:
        return Step(seen[0].drawn, seen[0].losses)
    t, weight = torch.cat([part.drawn.t for part in seen]), torch.cat([part.drawn.weight for part in seen])
    return Step(Timesteps(t, weight), torch.cat([part.losses for part in seen]))


def match_layout(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's moments the layout of their parameters, so that a resumed run uses the same kernels."""
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            if torch.is_tensor(value) and value.shape == parameter.shape:
                moments[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def seed_step(device: torch.device, seed: int, rank: int, step: int) -> None:
    """Seed torch's global generators for one step of one process."""
    mixed = (seed * 0xD1B54A33 - (step + 1) * 0x9E3779B1 + rank) % 2**63  # probes use the positive multiples
    for generator in global_generators(device):
        generator.manual_seed(mixed)


def learning_rate_schedule(
    learning_rate: float, warmup_steps: int = 0, cosine_steps: int | None = None
) -> Callable[[int], float]:
    """Return the learning rate as a function of the step: a linear warm-up, then constant, or a cosine down to 0.

    Args:
        learning_rate: After the warm-up.
        warmup_steps: Length of the warm-up.
        cosine_steps: The step at which the cosine reaches 0. Default: no cosine.
    """

    def rate(step: int) -> float:
        if step < warmup_steps:
            return learning_rate * (step + 1) / warmup_steps
        if cosine_steps is None:
            return learning_rate
        share = (step - warmup_steps) / max(1, cosine_steps - warmup_steps)
        return learning_rate * (1 + math.cos(math.pi * min(share, 1.0))) / 2

    return rate
