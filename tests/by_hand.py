"""Training written out in plain torch with the public classes: what `Trainer` and `Run` must agree with."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kairostep.data import Batch, Batches
from kairostep.experiments import build
from kairostep.training import learning_rate_schedule, seed_step
from kairostep.training.row_noise import RowNoise, targets_by


@dataclass
class Trained:
    """What a hand-written loop has in hand at the end."""

    experiment: Any
    average: nn.Module
    optimizer: torch.optim.Optimizer
    seen: list[tuple[Tensor, Tensor, Tensor]]  # t, losses and weights of every step

    def state(self) -> dict[str, Any]:
        """Return all that training has changed."""
        return {
            "model": self.experiment.model.state_dict(),
            "ema": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.experiment.sampler.state_dict(),
        }


def train_by_hand(config: Any, num_steps: int) -> Trained:
    device = torch.device("cpu")
    experiment = build(config, device)
    model, objective, sampler = experiment.model, experiment.objective, experiment.sampler
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, weight_decay=0.0, fused=False)
    rate = learning_rate_schedule(config.learning_rate, config.warmup_steps)
    average = deepcopy(model).eval().requires_grad_(False)
    batches = Batches(
        experiment.dataset, config.batch_size // config.accumulate, seed=config.seed, label_dropout=config.label_dropout
    ).from_step()
    seen, row_noise = [], RowNoise(config.seed, 0, device)
    for step in range(num_steps):
        seed_step(device, config.seed, 0, step)
        parts = []
        for number in range(config.accumulate):
            batch, key = next(batches), row_noise.step_key(step, number + 1)
            drawn = sampler.sample(batch.x0)
            if config.pairs:
                batch, noise = row_noise.of_pairs(key, batch, drawn, objective)
            else:
                noise = row_noise.of_batch(key, batch.x0)

            def losses_of(rows: Any, t: Tensor, noise: Tensor, batch: Batch = batch) -> Tensor:
                if batch.labels is None:
                    return objective(model, batch.x0[rows], t, noise=noise)
                return objective(model, batch.x0[rows], t, noise=noise, class_labels=batch.labels[rows])

            def loss_at(rows: Tensor, t: Tensor, batch: Batch = batch, step: int = step) -> Tensor:
                noise = row_noise.of_probe(row_noise.probe_key(step), batch.x0, rows, t)
                return losses_of(rows, t, noise, batch)

            with targets_by(key, objective):
                losses = losses_of(slice(None), drawn.t, noise)
            ((losses * drawn.weight).mean() / config.accumulate).backward()
            if len(parts) + 1 < config.accumulate:
                sampler.show(batch.x0, drawn, losses.detach())
            parts.append((drawn.t, losses.detach(), drawn.weight))
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.param_groups[0]["lr"] = rate(step)
        with sampler.observe(batch.x0, drawn, losses.detach(), loss_at):
            optimizer.step()
        optimizer.zero_grad()
        decay = min(config.ema_decay, (1 + step) / (10 + step))
        with torch.no_grad():
            for averaged, current in zip(average.parameters(), model.parameters(), strict=True):
                averaged.lerp_(current, 1 - decay)
        seen.append(tuple(torch.cat(values) for values in zip(*parts, strict=True)))
    return Trained(experiment, average, optimizer, seen)
