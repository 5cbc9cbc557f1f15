"""Lightning: a sampler in a callback, which observes each step of the optimizer and is part of the checkpoint.

class Denoiser(L.LightningModule):
    def training_step(self, x, batch_idx):
        drawn = self.sampling.sample(x)
        losses = self.losses_at(x, drawn.t)
        return self.sampling.loss(x, drawn, losses)

model.sampling = TimestepSampling(ks.RootLoss())
L.Trainer(callbacks=[model.sampling]).fit(model, loader)
"""

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from kairostep.integrations.foreign_loop import load_state, name_of, require_sampler
from kairostep.integrations.noise_levels import follow
from kairostep.timesteps import LossAt, Timesteps, TimestepSampler
from kairostep.timesteps.shown import check_loss_at, check_shown

log = logging.getLogger("kairostep")

Shown = tuple[Tensor, Timesteps, Tensor, LossAt | None]
"""What a sampler observes: x0, what was drawn for it, the losses, and other losses."""


class TimestepSampling(Callback):
    """Draws timesteps in `training_step`, and lets the sampler learn around the optimizer's step.

    It needs automatic optimization with one optimizer. With gradient accumulation the sampler learns from the losses of
    all micro-batches of a step. A sampler that asks for other losses measures the last one. The sampler moves to the
    module's device but is not part of the module: its policy's parameters would be trained and reduced with it. It
    learns nothing from a step that raises, nor from the trial steps of Lightning's tuner.
    """

    def __init__(self, sampler: TimestepSampler) -> None:
        self.sampler = require_sampler(sampler)
        self._trainer: Trainer | None = None  # while it fits
        self._optimizer: torch.optim.Optimizer | None = None  # that the sampler knows
        self._num_unshown = 0  # draws of the latest training step whose losses were not shown yet
        self._latest: list[Shown] = []  # of the latest training step
        self._seen: list[Shown] = []  # whose gradients the next step takes
        self._observation: AbstractContextManager[None] | None = None  # around the optimizer's step

    # What a training step calls

    def sample(self, x0: Tensor) -> Timesteps:
        """Return one time and one weight for each row of the clean batch x0 (B, ...)."""
        self._num_unshown += 1
        if self._trainer is None or self._is_called:
            return self.sampler.sample(x0)
        follow(self.sampler, x0.device)
        with torch.no_grad():  # a trial step, from which the sampler will not learn
            return self.sampler.sample(x0)

    def loss(self, x0: Tensor, drawn: Timesteps, losses: Tensor, loss_at: LossAt | None = None) -> Tensor:
        """Return the weighted mean of the losses (B,), for `training_step` to return, and keep them for the next step.

        Samplers with `uses_loss_at` need `loss_at(rows, t)`. It is called with the trainer's precision.
        """
        if self._trainer is None or not self._trainer.training:
            raise RuntimeError(
                "a sampler's losses belong to training with this callback, and none is going on: pass it, "
                "L.Trainer(callbacks=[sampling]); in validation return the losses at uniform times"
            )
        check_shown(x0, drawn, losses)
        check_loss_at(self.sampler, loss_at)
        self._num_unshown = max(0, self._num_unshown - 1)
        if self._is_called:
            precise = loss_at and _in_precision_of(self._trainer, loss_at)
            self._latest.append((x0, drawn, losses.detach(), precise))
        return (losses * drawn.weight).mean()

    @property
    def _is_called(self) -> bool:
        """Whether the trainer calls this callback: its tuner takes all away while it tries rates or batch sizes."""
        return self in getattr(self._trainer, "callbacks", ())

    # What the trainer calls

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Know the trainer before its tuner takes callbacks away."""
        self._trainer = trainer if stage == "fit" else None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the sampler to the module's device, and raise if its steps cannot be observed."""
        if not pl_module.automatic_optimization:
            raise ValueError(
                "TimestepSampling needs automatic optimization, got a module that steps by itself: there write "
                "`with sampling.sampler.observe(x, drawn, losses.detach()): optimizer.step()`"
            )
        self.sampler.to(pl_module.device)
        self._trainer, self._latest, self._seen = trainer, [], []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Forget the draws of a training step that returned no loss."""
        self._num_unshown, self._latest = 0, []

    def on_before_zero_grad(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Forget the batches whose gradients are cleared."""
        self._seen = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the batches of this gradient. Raise if times were drawn and their losses were not shown."""
        if self._num_unshown:
            raise RuntimeError(
                "a sampler that draws must see the losses, but training_step did not show them: "
                "return sampling.loss(x, drawn, losses) from it"
            )
        self._seen += self._latest
        self._latest = []

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Begin to observe: the gradient is ready, the weights are unchanged."""
        if self._observation is not None:
            raise RuntimeError(
                f"an optimizer must run its closure once per step, {type(optimizer).__name__} did again, and draws and "
                "losses of one step cannot be told apart: use another optimizer"
            )
        if optimizer is not self._optimizer:
            self.sampler.set_optimizer(optimizer)
            self._optimizer = optimizer
        seen, self._seen = self._seen, []
        for x0, drawn, losses, _ in seen[:-1]:
            self.sampler.show(x0, drawn, losses)
        if seen:  # else training_step gave no loss, to skip its batch
            self._observation = self.sampler.observe(*seen[-1])
            self._observation.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the observation if this batch ended with a step. Checkpoints come after all callbacks."""
        observation, self._observation = self._observation, None
        if observation is not None:
            observation.__exit__(None, None, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Learn nothing from a step that failed."""
        observation, self._observation, self._trainer, self._optimizer = self._observation, None, None, None
        if observation is not None:
            observation.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the trainer."""
        self._trainer, self._optimizer, self._latest, self._seen = None, None, [], []

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state for the checkpoint; every rank holds the same."""
        return {"name": name_of(self.sampler), "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the sampler's state."""
        load_state(self.sampler, state_dict, "the checkpoint")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Warn if the checkpoint is from a run without this callback: Lightning does not."""
        if self.state_key not in checkpoint.get("callbacks", {}) and trainer.is_global_zero:
            log.warning(f"the checkpoint holds no timestep sampler: {name_of(self.sampler)} starts afresh")


def _in_precision_of(trainer: Trainer, loss_at: LossAt) -> LossAt:
    """Return `loss_at` with Lightning's precision: under autocast if it is mixed."""

    def precise(rows: Tensor, t: Tensor) -> Tensor:
        with trainer.precision_plugin.forward_context():
            return loss_at(rows, t)

    return precise
