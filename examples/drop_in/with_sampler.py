"""A home-made diffusion training loop on 8x8 digits, as people write it."""

import sys

import kairostep as ks
import torch
from sklearn.datasets import load_digits
from torch import nn

T, STEPS = 1000, int(sys.argv[1]) if len(sys.argv) > 1 else 2000
torch.manual_seed(0)
data = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
alphas_cumprod = (1 - torch.linspace(1e-4, 0.02, T)).cumprod(0)
model = nn.Sequential(nn.Linear(65, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 64))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
timestep_sampler = ks.RootLoss()


def losses_at(x, t):  # (B, 64), (B,) -> (B,)
    noise = torch.randn_like(x)
    alpha_bar = alphas_cumprod[t][:, None]
    xt = alpha_bar.sqrt() * x + (1 - alpha_bar).sqrt() * noise
    return (model(torch.cat([xt, t[:, None] / T], dim=1)) - noise).square().mean(dim=1)


for step in range(STEPS):
    x = data[torch.randint(len(data), (128,))]
    drawn = timestep_sampler.sample(x)
    t = drawn.index(T)
    losses = losses_at(x, t)
    loss = (losses * drawn.weight).mean()
    optimizer.zero_grad()
    loss.backward()
    with timestep_sampler.observe(x, drawn, losses.detach()):
        optimizer.step()
    if (step + 1) % 500 == 0:
        print(f"step {step + 1}: loss {loss:.4f}")
