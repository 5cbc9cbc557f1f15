"""Flow matching on 8x8 digits with facebookresearch's flow_matching, as its examples write it."""

import sys

import kairostep as ks
import torch
from flow_matching.path import CondOTProbPath
from kairostep.integrations.flow_matching import PathSampler
from sklearn.datasets import load_digits
from torch import nn

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
torch.manual_seed(0)
data = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
path = CondOTProbPath()
model = nn.Sequential(nn.Linear(65, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 64))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
timestep_sampler = PathSampler(ks.RootLoss(), path)


def losses_at(x_1, t):  # (B, 64), (B,) -> (B,)
    sample = path.sample(t=t, x_0=torch.randn_like(x_1), x_1=x_1)
    return (model(torch.cat([sample.x_t, sample.t[:, None]], dim=1)) - sample.dx_t).square().mean(dim=1)


for step in range(STEPS):
    x_1 = data[torch.randint(len(data), (128,))]
    drawn = timestep_sampler.sample(x_1)
    losses = losses_at(x_1, drawn.t)
    loss = (losses * drawn.weight).mean()
    optimizer.zero_grad()
    loss.backward()
    with timestep_sampler.observe(x_1, drawn, losses):
        optimizer.step()
    if (step + 1) % 100 == 0 or step + 1 == STEPS:
        print(f"step {step + 1}: loss {loss:.4f}")
