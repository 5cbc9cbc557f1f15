"""A training loop in plain torch, beside which train_speed.py measures the trainer, and data for it."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kairostep.data import InMemory
from kairostep.experiments import Config, Experiment


def load_noise(config: Config, *_: object) -> tuple[InMemory, None]:
    """Return random images in the shape of the preset's data: speed does not depend on what they show."""
    shape = (1, 8, 8) if config.data.name == "digits" else (3, 32, 32)
    pixels = torch.randint(256, (10_000, *shape), dtype=torch.uint8)
    return InMemory(pixels, flip=config.data.name != "digits"), None


class BareLoop:
    """The trainer's work in plain torch.

    Batch from a resident set, flips, uniform t, noise, loss, backward, clipping, Adam, averaged weights.
    """

    def __init__(self, parts: Experiment, device: torch.device, *, channels_last: bool = False) -> None:
        config = parts.config
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.model: nn.Module = copy.deepcopy(parts.model).to(device, memory_format=layout)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-4, fused=device.type == "cuda")
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.alphas_cumprod = parts.process.alphas_cumprod.float().to(device)
        self.data, self.flip = parts.dataset.stored.to(device), parts.dataset.flip
        self.batch_size, self.layout, self.bf16 = config.batch_size, layout, config.precision == "bf16"

    def batch(self) -> Tensor:
        """Return images in [-1, 1], half of them mirrored."""
        rows = torch.randint(len(self.data), (self.batch_size,), device=self.data.device)
        x0 = self.data[rows].float() / 127.5 - 1
        if self.flip:
            mirrored = torch.rand(len(x0), 1, 1, 1, device=x0.device) < 0.5
            x0 = torch.where(mirrored, x0.flip(-1), x0)
        return x0.contiguous(memory_format=self.layout)

    def turn(self, num_steps: int) -> None:
        """Train for so many steps."""
        total = torch.zeros((), device=self.data.device)
        for _ in range(num_steps):
            x0 = self.batch()
            t = torch.randint(len(self.alphas_cumprod), (len(x0),), device=x0.device)
            alpha_bar = self.alphas_cumprod[t].view(-1, 1, 1, 1)
            noise = torch.randn_like(x0)
            with torch.autocast(x0.device.type, torch.bfloat16, enabled=self.bf16):
                output = self.model(alpha_bar.sqrt() * x0 + (1 - alpha_bar).sqrt() * noise, t).sample
            loss = F.mse_loss(output.float(), noise)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            torch._foreach_lerp_(self.average, list(self.model.parameters()), 1e-4)
            total += loss.detach()
        total.item()
