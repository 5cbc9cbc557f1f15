"""Time of the trainer's noise, a function of (seed, step, row), beside torch.randn: each replayed as a CUDA graph.

python benchmarks/speed/noise_cost.py
"""

from collections.abc import Callable

import torch

from kairostep.training.row_noise import RowNoise

SHAPE = (128, 3, 32, 32)
REPLAYS = 200


def microseconds(make: Callable[[], object]) -> float:
    """Return the time of one replay."""
    for _ in range(3):
        make()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        make()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / REPLAYS


@torch.no_grad()
def main() -> None:
    """Measure both and print one line."""
    x0 = torch.zeros(SHAPE, device="cuda")
    noise = RowNoise(seed=0, rank=0, device=x0.device)
    key = noise.step_key(3, 0)
    ours, theirs = microseconds(lambda: noise.of_batch(key, x0)), microseconds(lambda: torch.randn_like(x0))
    print(f"counter noise {ours:.1f} us, randn {theirs:.1f} us")


if __name__ == "__main__":
    main()
