"""What floor, reward and entropy of the adaptive sampler do to a small network on 8x8 digits, over several seeds.

    python benchmarks/samplers/adaptive_digits.py [--seeds 5] [--steps 4000]

All arms of a seed share initial weights, data order and number of steps. The averaged weights are measured on digits
held out, at stratified times with fixed noise: squared error of the noise over uniform t, variational bound (x 1e-3),
and the squared error at t > 0.95, where an adaptive sampler draws least.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import kairostep as ks

BATCH, NUM_TRAINING, LEARNING_RATE, AVERAGE_DECAY = 128, 1500, 1e-3, 0.997
PROCESS = ks.DiscreteProcess.linear()


def adaptive(seed: int, **options: object) -> ks.TimestepSampler:
    """Return an adaptive sampler for digits."""
    return ks.Adaptive(ks.BetaPolicy.for_input((64,)), seed=seed, **options)


ARMS: dict[str, Callable[[int], ks.TimestepSampler]] = {
    "uniform": lambda seed: ks.Uniform(seed=seed),
    "loss, no floor": lambda seed: adaptive(seed, floor=0.0),
    "loss, floor 0.2": lambda seed: adaptive(seed, floor=0.2),
    "loss, floor 0.5": lambda seed: adaptive(seed, floor=0.5),
    "loss, floor 0.8": lambda seed: adaptive(seed, floor=0.8),
    "loss, floor 0.2, entropy 0.1": lambda seed: adaptive(seed, floor=0.2, entropy=0.1),
    "bound, no floor": lambda seed: adaptive(seed, floor=0.0, reward_weight=PROCESS.vlb_weight),
    "bound, floor 0.5": lambda seed: adaptive(seed, floor=0.5, reward_weight=PROCESS.vlb_weight),
    "loss, floor 0.5, batch credit": lambda seed: adaptive(seed, floor=0.5, probing=ks.Probing(credit="batch")),
}


def train(sampler: ks.TimestepSampler, seed: int, num_steps: int) -> tuple[float, float, float]:
    """Return the squared error, the bound and the squared error at high noise that this sampler led to."""
    torch.manual_seed(seed)
    data = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    model = nn.Sequential(nn.Linear(65, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 64))
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    objective = ks.Objective(PROCESS)
    order = torch.Generator().manual_seed(seed)

    def network(xt: Tensor, step: Tensor) -> Tensor:
        return model(torch.cat([xt, step[:, None] / PROCESS.num_steps], dim=1))

    for _ in range(num_steps):
        x0 = data[torch.randint(NUM_TRAINING, (BATCH,), generator=order)]

        def loss_at(rows: Tensor, t: Tensor, x0: Tensor = x0) -> Tensor:
            return objective(network, x0[rows], t)

        drawn = sampler.sample(x0)
        losses = loss_at(torch.arange(BATCH), drawn.t)
        optimizer.zero_grad()
        (losses * drawn.weight).mean().backward()
        with sampler.observe(x0, drawn, losses.detach(), loss_at):
            optimizer.step()
        torch._foreach_lerp_(average, list(model.parameters()), 1 - AVERAGE_DECAY)

    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), average)
        x0, fixed = data[NUM_TRAINING:].repeat(40, 1), torch.Generator().manual_seed(0)
        t = (torch.randperm(len(x0), generator=fixed) + 0.5) / len(x0)
        losses = objective(network, x0, t, noise=torch.randn(x0.shape, generator=fixed))
    return float(losses.mean()), 1e3 * float((losses * PROCESS.vlb_weight(t)).mean()), float(losses[t > 0.95].mean())


def main() -> None:
    """Run the arms and print the table, each seed as a ratio to uniform's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base: list[tuple[float, float, float]] = []
    print(f"{arguments.steps} steps, seeds 0 to {arguments.seeds - 1}; uniform: values, others: ratio to it\n")
    print(f"{'arm':30} {'error':>7} {'bound':>7} {'t>0.95':>7}   error by seed")
    for name, build in ARMS.items():
        results = [train(build(seed), seed, arguments.steps) for seed in range(arguments.seeds)]
        if not base:
            base = results
            shown = results
        else:
            shown = [
                tuple(a / b for a, b in zip(one, ref, strict=True)) for one, ref in zip(results, base, strict=True)
            ]
        means = " ".join(f"{statistics.mean(column):7.3f}" for column in zip(*shown, strict=True))
        print(f"{name:30} {means}   {' '.join(f'{one[0]:.3f}' for one in shown)}", flush=True)


if __name__ == "__main__":
    main()
