"""Whether reading a folder of images keeps up with training: streamed from JPEG files beside resident on the device.

    python benchmarks/speed/loader_speed.py [--device cuda] [--workers 4,8,16]

Makes JPEG files a quarter larger than asked for, so that each is decoded, resized and cut as photographs are. `reads`
is images per second of the stream alone, decoded by so many worker processes; `trains` is the `images` preset's network
fed by it, in bf16 with graphs on a GPU, and `x resident` its speed beside the same training on a set that lies on the
device, in turns; `--rounds 0` leaves training out.
"""

import argparse
import itertools
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from PIL import Image
from side_by_side import Turn, ratio_of_speeds, take_turns

from kairostep.data import Batch, Batches
from kairostep.experiments import Component, Config, Experiment, build, preset
from kairostep.training.assembly import make_trainer

STEPS_PER_TURN, NUM_READ = 20, 60  # batches


def write_images(folder: Path, num: int, size: int) -> None:
    """Write smooth random pictures, which compress about as photographs do."""
    generator = torch.Generator().manual_seed(0)
    for number in range(num):
        coarse = torch.randint(256, (size // 8, size // 8, 3), dtype=torch.uint8, generator=generator)
        picture = Image.fromarray(coarse.numpy()).resize((size, size), Image.Resampling.BICUBIC)
        picture.save(folder / f"{number:05d}.jpg", quality=92)


def reading_speed(batches: Iterator[Batch], batch_size: int, device: torch.device) -> float:
    """Return the images per second of a stream that nothing else is done with, once its workers run."""
    for _ in range(10):
        next(batches)
    start = time.perf_counter()
    for batch in itertools.islice(batches, NUM_READ):
        batch.x0.sum()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return NUM_READ * batch_size / (time.perf_counter() - start)


def batches_of(config: Config, parts: Experiment, device: torch.device, *, num_workers: int | None) -> Batches:
    """Return what feeds a training: a stream by so many workers, or a resident set."""
    streams = {"num_workers": num_workers or 0, "resident": num_workers is None}
    return Batches(parts.dataset, config.batch_size, device=device, label_dropout=None, **streams)


def training_turn(parts: Experiment, batches: Batches, accelerator: Accelerator) -> Turn:
    """Return a turn of training."""
    trainer, stream = make_trainer(parts, accelerator), batches.from_step(0)

    def turn() -> None:
        for _ in range(STEPS_PER_TURN):
            trainer.step([next(stream)])

    return turn


def measure(size: int, batch_size: int, all_workers: list[int], rounds: int, accelerator: Accelerator) -> None:
    """Print a line for each number of workers."""
    device, usual = accelerator.device, preset("images")
    usual = replace(usual, batch_size=batch_size, sampler=Component("uniform"), steps=1000, held_out_images=0)
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), 20 * batch_size, size + size // 4)
        data = {"folder": folder, "size": size}
        turns: dict[str, Turn] = {}
        if rounds:
            parts = build(replace(usual, data=Component("images", data)), device)
            turns["resident"] = training_turn(parts, batches_of(usual, parts, device, num_workers=None), accelerator)
        for num_workers in all_workers:
            parts = build(replace(usual, data=Component("images", {**data, "in_memory_bytes": 0})), device)
            batches = batches_of(usual, parts, device, num_workers=num_workers)
            reads = reading_speed(batches.from_step(0), batch_size, device)
            line = f"{size:4} {batch_size:6} {num_workers:8} {reads:9.0f}"
            if rounds:
                turns["streamed"] = training_turn(parts, batches, accelerator)
                seconds = take_turns(turns, rounds, device)
                rate = STEPS_PER_TURN * batch_size / statistics.median(seconds["streamed"])
                line += f" {rate:9.0f}   {ratio_of_speeds(seconds['resident'], seconds['streamed'])}"
            print(line, flush=True)


def main() -> None:
    """Measure at 64 x 64 and at 256 x 256."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--workers", default="4,8,16")
    parser.add_argument("--sizes", default="64:128,256:16", help="pixels:batch")
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    use_cuda = arguments.device == "cuda"
    accelerator = Accelerator(cpu=not use_cuda, mixed_precision="bf16" if use_cuda else "no")
    torch.backends.cudnn.benchmark = True
    where = torch.cuda.get_device_name() if use_cuda else platform.processor() or platform.machine()
    rounds = f", {arguments.rounds} rounds of {STEPS_PER_TURN} steps" if arguments.rounds else ""
    trains = f" {'trains':>9}   x resident      (images/s; ratio)" if arguments.rounds else "   (images/s)"
    print(f"torch {torch.__version__}, {where}{rounds}\n")
    print(f"{'size':>4} {'batch':>6} {'workers':>8} {'reads':>9}{trains}")
    for pair in arguments.sizes.split(","):
        size, batch_size = (int(number) for number in pair.split(":"))
        measure(size, batch_size, [int(n) for n in arguments.workers.split(",")], arguments.rounds, accelerator)


if __name__ == "__main__":
    main()
