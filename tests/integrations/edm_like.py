"""EDM's and EDM2's training, as far as a loss sees it: a small denoiser, augmentation, the loop, options by name."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from kairostep.integrations.edm import EDMLoss, SigmaLoss


class Net(nn.Module):
    """A denoiser called as EDM's, and with `return_logvar` as EDM2's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.img_channels, self.img_resolution = 1, 4
        self.layers = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1))
        self.logvar = nn.Linear(1, 1)

    def forward(
        self,
        x: Tensor,
        sigma: Tensor,  # (B, 1, 1, 1)
        labels: Tensor | None = None,
        augment_labels: Tensor | None = None,
        return_logvar: bool = False,
    ) -> Any:
        """Return the denoised x, and the logarithm of its variance if asked."""
        level = sigma.log().expand_as(x) / 4
        for condition in (labels, augment_labels):
            level = level if condition is None else level + condition.mean(1).view(-1, 1, 1, 1)
        denoised = x / (1 + sigma.square()) + self.layers(torch.cat([x / (1 + sigma), level], 1))
        return (denoised, self.logvar(sigma.log().flatten(1)).view(-1, 1, 1, 1)) if return_logvar else denoised


def augment(images: Tensor) -> tuple[Tensor, Tensor]:
    flipped = torch.rand(len(images), 1) < 0.5
    return torch.where(flipped[:, :, None, None], images.flip(3), images), flipped.float()


def constructed(class_name: str, **kwargs: Any) -> Any:
    """Return what EDM's construct_class_by_name does."""
    module, name = class_name.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)(**kwargs)


class Loop:
    """The part of both loops that has to do with the loss."""

    def __init__(self, loss_fn: SigmaLoss) -> None:
        self.net, self.loss_fn = Net(), loss_fn
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        if loss_fn.sampler is None or loss_fn.sampler.uses_loss_at:
            loss_fn.attach(self.optimizer, self.net)

    def step(self, step: int, rounds: int = 2) -> Tensor:
        """Train on one batch of two rounds."""
        torch.manual_seed(50 + step)
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(rounds):
            images, labels = torch.rand(8, 1, 4, 4) * 2 - 1, torch.rand(8, 3)
            extra = {"augment_pipe": augment} if isinstance(self.loss_fn, EDMLoss) else {}
            loss = self.loss_fn(net=self.net, images=images, labels=labels, **extra)
            loss.sum().mul(1 / 16).backward()
        self.optimizer.step()
        return loss.detach()
