"""What one training step costs on many GPUs, on paper: measured steps of one GPU, and assumed links between them.

`python benchmarks/speed/scaling.py` prints the tables of docs/performance.md. Nothing here was measured on more than
one GPU. Gradients are averaged after the backward pass, without overlap, which is the slowest that it can be.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "results"
PER_MACHINE = 8
SHARE = 0.7  # of a link's nominal speed that a collective reaches
NUM_GPUS = (1, 8, 64, 1024)
STRONG_BATCH = 2048
BINS = 20  # of RootLoss; a sum and a count each, float32


@dataclass(frozen=True)
class Link:
    """A link between GPUs: nominal bytes per second of each GPU in one direction, and seconds per hop."""

    name: str
    bandwidth: float
    latency: float

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that bytes take, without the latency."""
        return num_bytes / (SHARE * self.bandwidth)


NVLINK = Link("NVLink", 450e9, 5e-6)
INFINIBAND = Link("InfiniBand", 400e9 / 8, 10e-6)  # one adapter for each GPU
ETHERNET = Link("Ethernet", 100e9 / 8 / PER_MACHINE, 30e-6)  # one adapter for each machine


@dataclass(frozen=True)
class Network:
    """A network and its measured milliseconds per step on one H200, compiled, by batch size."""

    name: str
    num_parameters: int
    measured: dict[int, float]

    @property
    def gradient_bytes(self) -> int:
        """Bytes that processes exchange in each step."""
        return 4 * self.num_parameters

    def compute_ms(self, batch: float) -> float:
        """Return the milliseconds of a step on one GPU: measured, or on the least-squares line of what was measured."""
        if batch in self.measured:
            return self.measured[int(batch)]
        sizes, times = zip(*self.measured.items(), strict=True)
        mean_size, mean_time = sum(sizes) / len(sizes), sum(times) / len(times)
        squares = sum((size - mean_size) ** 2 for size in sizes)
        slope = sum((b - mean_size) * (t - mean_time) for b, t in self.measured.items()) / squares
        return mean_time + slope * (batch - mean_size)


def ring_seconds(num_bytes: float, num: int, link: Link) -> float:
    """Return the seconds of a ring all-reduce: 2 (W - 1) / W bytes over each link, in 2 (W - 1) hops."""
    return link.seconds(2 * (num - 1) / num * num_bytes) + 2 * (num - 1) * link.latency


def tree_seconds(num_bytes: float, num: int, link: Link) -> float:
    """Return the seconds of an all-reduce by two trees: 2 bytes over each link, in 2 log2(W) hops."""
    return link.seconds(2 * num_bytes) + 2 * math.ceil(math.log2(num)) * link.latency


def all_reduce_ms(num_bytes: float, num_gpus: int, between: Link) -> float:
    """Return the milliseconds of an all-reduce: a ring in each machine; between machines each GPU has its share."""
    inside = min(num_gpus, PER_MACHINE)
    if inside == 1:
        return 0.0
    seconds = ring_seconds(num_bytes, inside, NVLINK)
    machines = num_gpus // PER_MACHINE
    if machines > 1:
        part = num_bytes / PER_MACHINE
        seconds += min(function(part, machines, between) for function in (ring_seconds, tree_seconds))
    return 1000 * seconds


def images_per_second(log: Path, preset: str, batch: int) -> float:
    """Return the speed of mode compile from a log of train_speed."""
    part = log.read_text().split(f"{preset}, batch {batch}, torch")[1]
    found = re.search(r"^compile +(\d+)", part, re.MULTILINE)
    if found is None:
        raise ValueError(f"{log} must have a row `compile` for {preset} at batch {batch}")
    return float(found[1])


def study_ms(folder: str) -> float:
    """Return the mean milliseconds per step of runs of results/study, without their start."""
    times = []
    for path in sorted((RESULTS / "study/linear-8000/rate-16e-4/cifar10-small-linear" / folder).glob("seed-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        first, last = (line for line in (lines[1], lines[-2]))
        times.append(1000 * (last["seconds"] - first["seconds"]) / (last["step"] - first["step"]))
    return sum(times) / len(times)


def networks() -> list[Network]:
    """Return the networks that were measured."""
    speed = RESULTS / "train_speed"
    sizes = json.loads((RESULTS / "memory" / "cpu.json").read_text())["networks"]
    small = {
        128: 128e3 / images_per_second(speed / "h200.log", "cifar10-small", 128),
        256: study_ms("uniform-256"),
        512: 512e3 / images_per_second(speed / "h200_3.log", "cifar10-small", 512),
    }
    large = {
        128: 128e3 / images_per_second(speed / "h200.log", "cifar10-ddpm", 128),
        512: 512e3 / images_per_second(speed / "h200_2.log", "cifar10-ddpm", 512),
    }
    return [
        Network("6.5M", sizes["cifar10-small"]["parameters"], small),
        Network("35.7M", sizes["cifar10-ddpm"]["parameters"], large),
    ]


def inputs_rows() -> list[list[str]]:
    """Return the measured inputs of each network."""
    rows = []
    for network in networks():
        steps = ", ".join(f"{ms:.1f} at {batch}" for batch, ms in network.measured.items())
        rows.append([network.name, steps, f"{network.gradient_bytes / 1e6:.0f} MB", f"{network.compute_ms(0):.1f}"])
    return rows


def scaling_rows(total_batch: int | None = None, batch: int = 128) -> list[list[str]]:
    """Return rows of the table: the same batch for each GPU, or a total batch that GPUs share.

    Args:
        total_batch: Images of a step over all GPUs. None: `batch` for each GPU.
        batch: Images of a GPU.
    """
    rows = []
    for network in networks():
        for num_gpus in NUM_GPUS:
            own = batch if total_batch is None else total_batch / num_gpus
            compute, alone = network.compute_ms(own), network.compute_ms(total_batch or batch)
            cells = [network.name, str(num_gpus), f"{own:g}", f"{compute:.1f}"]
            for link in (INFINIBAND, ETHERNET):
                exchange = all_reduce_ms(network.gradient_bytes, num_gpus, link)
                ideal = alone if total_batch is None else alone / num_gpus
                cells.append(f"{exchange:.2f}, {100 * ideal / (compute + exchange):.0f} %")
            rows.append(cells)
    return rows


def as_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def inputs_table() -> str:
    """Return the table of measured inputs."""
    return as_markdown(
        ["network", "ms per step, by batch", "gradients", "ms that do not shrink with the batch"], inputs_rows()
    )


def scaling_table(total_batch: int | None = None) -> str:
    """Return the table of weak scaling, or of strong scaling with a total batch."""
    links = [f"{link.name}: ms of the exchange, efficiency" for link in (INFINIBAND, ETHERNET)]
    return as_markdown(["network", "GPUs", "batch of each", "ms of a GPU alone", *links], scaling_rows(total_batch))


if __name__ == "__main__":
    print(inputs_table(), scaling_table(), scaling_table(STRONG_BATCH), sep="\n\n")
    small = BINS * 2 * 4
    print(f"\nsampler's {small} bytes on 1024 GPUs: {all_reduce_ms(small, 1024, INFINIBAND):.2f} ms")
