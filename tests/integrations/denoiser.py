"""A small Lightning module that trains at drawn times."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from small_problem import NUM_ROWS, Make, losses_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kairostep.integrations.lightning import TimestepSampling


class Denoiser(L.LightningModule):
    """A module as Lightning's documentation has it."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Linear(4, 3)
        self.sampling = TimestepSampling(make(self.network))
        self.scale = 1.0
        self.times: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.probed: list[tuple[bool, Tensor]] = []

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        """Return the loss at drawn times."""
        drawn = self.sampling.sample(x)
        losses = losses_of(self.network, x, drawn.t)
        self.times.append(drawn.t)
        self.losses.append(losses.detach())

        def loss_at(rows: Tensor, t: Tensor) -> Tensor:
            self.probed.append((torch.is_autocast_enabled("cpu"), self.network.weight.detach().clone()))
            return losses_of(self.network, x[rows], t)

        return self.sampling.loss(x, drawn, losses, loss_at) * self.scale

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain gradient descent on all that the module has."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def loader(num_batches: int) -> DataLoader[Tensor]:
    """Return batches that are the same in every epoch."""
    return DataLoader(torch.randn(num_batches * NUM_ROWS, 3, generator=torch.Generator().manual_seed(1)), NUM_ROWS)


def trainer_of(model: Denoiser, folder: Path, **options: Any) -> L.Trainer:
    """Return a quiet trainer on the CPU."""
    options = {"max_epochs": 1, "enable_checkpointing": False, "callbacks": [model.sampling], **options}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", default_root_dir=folder, **quiet, **options)


def fit(model: Denoiser, folder: Path, num_batches: int, **options: Any) -> Denoiser:
    """Train the module for an epoch and return it."""
    trainer_of(model, folder, **options).fit(model, loader(num_batches))
    return model


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Raise unless both states are the same, bit by bit."""
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
