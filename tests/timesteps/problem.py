"""A small training problem with dropout and noise, for samplers that look at the loss."""

import torch
from torch import Tensor, nn

import kairostep as ks


class Problem:
    """A network with dropout on 4-d data: one row of losses per call, noise from the global generator."""

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.objective = ks.Objective(ks.FlowProcess(), ks.VELOCITY)
        self.num_rows = 0

    def loss_at(self, x0: Tensor) -> ks.LossAt:
        """Return the loss of this batch."""

        def loss_at(rows: Tensor, t: Tensor) -> Tensor:
            self.num_rows += len(t)
            return self.objective(lambda xt, time: self.model(torch.cat([xt, time[:, None]], 1)), x0[rows], t)

        return loss_at

    def step(self, sampler: ks.TimestepSampler, x0: Tensor, *, skip: bool = False) -> None:
        """Train by one step, or compute it and leave it out."""
        loss_at = self.loss_at(x0)
        drawn = sampler.sample(x0)
        losses = loss_at(torch.arange(len(x0)), drawn.t)
        self.optimizer.zero_grad()
        (losses * drawn.weight).mean().backward()
        with sampler.observe(x0, drawn, losses.detach(), loss_at):
            if not skip:
                self.optimizer.step()


def data(step: int, num_rows: int = 32) -> Tensor:
    return torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(step))
