"""How well a few selected timesteps stand for the whole objective, by the number of timesteps in the sweep.

    python benchmarks/samplers/selection_quality.py [--seeds 3]

A network is trained on 8x8 digits; every ten steps the drop of the loss is measured for every row of the batch at all
1000 timesteps, with the same noise before and after the step. From the last 20 sweeps, of one or more x0, three
timesteps are selected; their mean drop over the next 20 updates is correlated with the drop over all timesteps: for the
mean of the batch over updates ("batch"), and over the rows of one update ("rows", what credit="sample" ranks by).
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import kairostep as ks
from kairostep.timesteps.selection import DropQueue

NUM_STEPS, BATCH, QUEUE, WARMUP, UPDATES, STEPS_BETWEEN = 1000, 64, 20, 1000, 80, 10
SWEEPS = ((1000, 1), (128, 1), (64, 1), (32, 1), (16, 1), (128, 2), (128, 8), (128, 64), (0, 1))  # timesteps, x0
EVERY_T = (torch.arange(NUM_STEPS) + 0.5) / NUM_STEPS


def measure_drops(process: ks.DiscreteProcess, seed: int) -> Tensor:
    """Return the drop of the loss at every update, row and timestep: (UPDATES, BATCH, NUM_STEPS)."""
    torch.manual_seed(seed)
    data = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    model = nn.Sequential(nn.Linear(65, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    objective, sampler = ks.Objective(process), ks.Uniform(seed=seed)

    def losses(x0: Tensor, t: Tensor, noise: Tensor | None = None) -> Tensor:
        return objective(lambda xt, time: model(torch.cat([xt, t[:, None]], 1)), x0, t, noise=noise)

    @torch.no_grad()
    def at_every_t(x0: Tensor, noise: Tensor) -> Tensor:
        return torch.stack([losses(x0, t.expand(BATCH), some) for t, some in zip(EVERY_T, noise, strict=True)], dim=1)

    drops = []
    for step in range(WARMUP + UPDATES * STEPS_BETWEEN):
        x0 = data[torch.randint(len(data), (BATCH,))]
        optimizer.zero_grad()
        losses(x0, sampler.sample(x0).t).mean().backward()
        if step < WARMUP or step % STEPS_BETWEEN:
            optimizer.step()
            continue
        noise = torch.randn(NUM_STEPS, BATCH, 64, generator=torch.Generator().manual_seed(step))
        before = at_every_t(x0, noise)
        optimizer.step()
        drops.append(before - at_every_t(x0, noise))
    return torch.stack(drops)


def correlation(one: Tensor, other: Tensor) -> Tensor:
    """Return the correlation along the last dimension."""
    one, other = (x - x.mean(-1, keepdim=True) for x in (one, other))
    return (one * other).sum(-1) / (one.norm(dim=-1) * other.norm(dim=-1))


def quality(drops: Tensor, weight: Tensor, sweep: int, num_x0: int, seed: int) -> tuple[float, float]:
    """Return the two correlations of three selected timesteps, averaged over the run; 0 takes three evenly spread."""
    generator = torch.Generator().manual_seed(seed)
    weighted = drops * weight
    queue = DropQueue(NUM_STEPS, sweep or 3, QUEUE, 3, rule=ks.f_statistic)
    index = (queue.sweep_t * NUM_STEPS).long()
    batch, rows = [], []
    for update, drop in enumerate(drops):
        selected = index[queue.selected] if sweep else torch.tensor([167, 500, 833])
        coming = weighted[update : update + QUEUE]
        if update >= QUEUE and len(coming) == QUEUE:
            chosen, whole = coming[:, :, selected].mean(2), coming.mean(2)  # (QUEUE, BATCH)
            batch.append(correlation(chosen.mean(1), whole.mean(1)))
            rows.append(correlation(chosen, whole).mean())
        rows_of_x0 = torch.randint(BATCH, (num_x0,), generator=generator)
        row_of_timestep = rows_of_x0[torch.arange(len(index)) % num_x0]
        queue.push(drop[row_of_timestep, index], weight, update % QUEUE)
    return float(torch.stack(batch).mean()), float(torch.stack(rows).mean())


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    num_seeds = parser.parse_args().seeds
    print(f"{'schedule':10} {'objective':9} {'sweep':>5} {'x0':>3}  batch by seed          rows by seed")
    for schedule in ("linear", "cosine"):
        process: ks.DiscreteProcess = getattr(ks.DiscreteProcess, schedule)()
        drops = [measure_drops(process, seed) for seed in range(num_seeds)]
        for objective, weight in (("VLB", process.vlb_weight(EVERY_T)), ("MSE", torch.ones(NUM_STEPS))):
            for sweep, num_x0 in SWEEPS:
                results = [quality(one, weight, sweep, num_x0, seed) for seed, one in enumerate(drops)]
                batch, rows = (" ".join(f"{result[k]:6.3f}" for result in results) for k in (0, 1))
                print(f"{schedule:10} {objective:9} {sweep or 'even':>5} {num_x0:>3}  {batch}   {rows}", flush=True)


if __name__ == "__main__":
    main()
