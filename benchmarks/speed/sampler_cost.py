"""What a sampler costs: `sample` + `observe` beside `torch.randint` and nothing, and the memory it holds.

    python benchmarks/speed/sampler_cost.py [--device cuda] [--batch 128] [--rounds 30]

Samplers are measured in turn, round after round, so that a slow moment of the machine hits all of them; the table gives
medians. Network evaluations are counted by a loss that counts, per step over the whole measurement.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import kairostep as ks

STEPS_PER_ROUND = 50


class CountingLoss:
    """A loss of one small layer that counts the rows it is asked for."""

    def __init__(self, model: nn.Module, x0: Tensor) -> None:
        self.model, self.x0, self.num_rows = model, x0, 0

    def __call__(self, rows: Tensor, t: Tensor) -> Tensor:
        """Return losses (N,)."""
        self.num_rows += len(t)
        output: Tensor = self.model(self.x0[rows])
        return output.square().mean(1) * (1 - t)


def build_samplers(model: nn.Module) -> dict[str, ks.TimestepSampler]:
    """Return every sampler with its default arguments."""
    process = ks.DiscreteProcess.linear()
    return {
        "Uniform": ks.Uniform(),
        "LogitNormal": ks.LogitNormal(),
        "Mode": ks.Mode(),
        "FixedBeta": ks.FixedBeta(2.0, 2.0),
        "Tabulated": ks.Tabulated(torch.ones(1000)),
        "LogNormalSigma": ks.LogNormalSigma(process),
        "Laplace": ks.Laplace(process),
        "Speed": ks.Speed(process),
        "Speed v1": ks.Speed(process, "v1"),
        "LossSecondMoment": ks.LossSecondMoment(),
        "RootLoss": ks.RootLoss(),
        "LeastNoise": ks.LeastNoise(torch.optim.AdamW(model.parameters())),
        "InfoNoise": ks.InfoNoise(process),
        "Curriculum": ks.Curriculum(ks.LogitNormal(), ks.Uniform(), start=0, end=1000),
        "GradientVariance": ks.GradientVariance(model.parameters()),
        "Adaptive": ks.Adaptive(ks.BetaPolicy.for_input((64,)), model=model),
    }


def seconds_per_step(step: Callable[[], None], device: torch.device) -> float:
    """Return the time of one step, averaged over a round."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(STEPS_PER_ROUND):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / STEPS_PER_ROUND


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)

    x0 = torch.randn(arguments.batch, 64, device=device)
    model = nn.Linear(64, 64).to(device)
    samplers = {name: sampler.to(device) for name, sampler in build_samplers(model).items()}
    losses_at = {name: CountingLoss(model, x0) for name in samplers}
    losses = torch.rand(arguments.batch, device=device)

    def randint() -> None:
        torch.randint(0, 1000, (arguments.batch,), device=device)

    def step_of(name: str) -> Callable[[], None]:
        def step() -> None:
            drawn = samplers[name].sample(x0)
            with samplers[name].observe(x0, drawn, losses, losses_at[name]):
                pass

        return step

    steps = {"torch.randint": randint, **{name: step_of(name) for name in samplers}}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(arguments.rounds + 2):
        for name, step in steps.items():
            seconds = seconds_per_step(step, device)
            if round_ >= 2:  # the first two warm up
                times[name].append(seconds)

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU, one thread"
    print(f"batch {arguments.batch}, torch {torch.__version__}, {where}, median of {arguments.rounds} rounds\n")
    print(f"{'sampler':18} {'µs per step':>11} {'x randint':>9} {'state, bytes':>12} {'network rows per step':>21}")
    base = statistics.median(times["torch.randint"])
    num_steps = (arguments.rounds + 2) * STEPS_PER_ROUND
    for name, measured in times.items():
        seconds = statistics.median(measured)
        held = sum(b.numel() * b.element_size() for b in samplers[name].buffers()) if name in samplers else 0
        rows = losses_at[name].num_rows / num_steps if name in samplers else 0
        print(f"{name:18} {1e6 * seconds:11.1f} {seconds / base:9.1f} {held:12,} {rows:21.1f}")


if __name__ == "__main__":
    main()
