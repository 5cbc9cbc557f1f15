"""Flow matching on 8x8 digits in a Lightning module, with automatic optimization."""

import sys

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, RandomSampler


class FlowMatching(L.LightningModule):
    """Learns the velocity noise - x of x_t = (1 - t) x + t noise."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(65, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 64))

    def losses_at(self, x, t):
        """Return the losses (B,) of x (B, 64) at t (B,)."""
        noise = torch.randn_like(x)
        xt = (1 - t[:, None]) * x + t[:, None] * noise
        return (self.net(torch.cat([xt, t[:, None]], dim=1)) - (noise - x)).square().mean(dim=1)

    def training_step(self, x, batch_idx):
        """Return the loss of a batch."""
        t = torch.rand(len(x), device=x.device)
        losses = self.losses_at(x, t)
        loss = losses.mean()
        if (batch_idx + 1) % 100 == 0 or batch_idx + 1 == self.trainer.num_training_batches:
            print(f"step {batch_idx + 1}: loss {loss:.4f}")
        return loss

    def configure_optimizers(self):
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


max_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500
torch.manual_seed(0)
images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
rows = RandomSampler(images, num_samples=128 * max_steps)
model = FlowMatching()
trainer = L.Trainer(
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(images, batch_size=128, sampler=rows))
