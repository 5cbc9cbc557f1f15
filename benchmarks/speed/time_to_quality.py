"""Seconds of training until a model is as good as diffusers' example makes it: `kairostep train` as it comes.

    python benchmarks/speed/time_to_quality.py --data.path=cifar10.npz --inception inception.pt --output FILE

On one GPU, one after the other: the loop of diffusers' example of unconditional training (that of train_speed.py on
real images) with its own learning rate, then with each of `--rates`, and `kairostep train` with the preset's recipe.
All train the same network from the same weights on batches of the same size, and are judged by their averaged weights:
the held-out error of the noise, with the same images, times and noise for all, and FID of images from the same noise.
The targets are what the example's loop has at its end. Between our checkpoints values are linear in the logarithm.

Seconds are of training, from the first step on, with recording and compiling, without loading the GPU's libraries and
without measuring.
"""

import argparse
import copy
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from train_speed import Steps, diffusers_loop, our_steps_of

from kairostep.evaluation.features import INCEPTION_SHA256
from kairostep.experiments import Component, Config, Experiment, build, preset
from kairostep.experiments.command_line import settle
from kairostep.experiments.config import with_overrides
from kairostep.seed_statistics import cost_to_reach
from kairostep.training.assembly import make_accelerator, make_trainer
from kairostep.training.image_quality import ImageQuality
from kairostep.training.monitor import Monitor
from kairostep.training.stopwatch import Stopwatch

BATCH = 512  # of images that are generated
EXAMPLE_RATE = 1e-4  # the example's own
OURS = "kairostep"


@dataclass(frozen=True)
class Contender:
    """A loop: its steps, a network with its averaged weights, and when to measure."""

    name: str
    steps: Steps
    averaged: Callable[[], nn.Module]
    checkpoints: Sequence[int]


@dataclass(frozen=True)
class Checkpoint:
    """How good a model was after some training."""

    step: int
    seconds: float
    epsilon_mse: float
    fid: float


def diffusers_contender(config: Config, accelerator: Accelerator, rate: float, num_steps: int) -> Contender:
    """Return the loop of diffusers' example at a learning rate."""
    parts = build(replace(config, sampler=Component("uniform")), accelerator.device)
    network = copy.deepcopy(parts.model).to(accelerator.device).eval().requires_grad_(False)
    steps, average = diffusers_loop(parts, accelerator, learning_rate=rate, num_steps=num_steps)

    def averaged() -> nn.Module:
        average.copy_to(network.parameters())
        return network

    return Contender(f"diffusers, {rate:g}", steps, averaged, [num_steps])


def our_contender(config: Config, accelerator: Accelerator, checkpoints: Sequence[int]) -> Contender:
    """Return the trainer as `kairostep train` has it."""
    parts = build(config, accelerator.device)
    trainer = make_trainer(parts, accelerator)
    return Contender(OURS, our_steps_of(trainer, parts, accelerator), lambda: trainer.ema.model, checkpoints)


def follow(
    contender: Contender, parts: Experiment, accelerator: Accelerator, quality: ImageQuality
) -> Iterator[Checkpoint]:
    """Train, and yield what each checkpoint is worth."""
    clock, done = Stopwatch(accelerator.device), 0
    clock.synchronize()
    clock.start()
    for until in contender.checkpoints:
        contender.steps(until - done)
        done = until
        with clock.paused():
            model = contender.averaged()
            error = Monitor(parts, model, accelerator).evaluate()["loss"]
            point = Checkpoint(done, clock.seconds(), error, quality.measure(parts, model)["fid"])
            print(line_of(contender.name, point), flush=True)
            yield point


def line_of(name: str, point: Checkpoint) -> str:
    """Return a checkpoint as a line of the table."""
    return f"{name:18} {point.step:6} {point.seconds:8.1f} {point.epsilon_mse:8.5f} {point.fid:7.1f}"


def verdicts(curves: dict[str, list[Checkpoint]]) -> str:
    """Return the seconds of ours to what each other loop had at its end."""
    ours, lines = curves[OURS], []
    for name, curve in curves.items():
        for measure in ("epsilon_mse", "fid") if name != OURS else ():
            seconds, target = curve[-1].seconds, getattr(curve[-1], measure)
            taken = cost_to_reach([p.seconds for p in ours], [getattr(p, measure) for p in ours], target)
            found = "not reached" if taken is None else f"{taken:.1f} s, {seconds / taken:.2f} times as fast"
            lines.append(f"\n{measure} of {target:.5g}: {name} {seconds:.1f} s, {OURS} {found}")
    return "".join(lines)


def numbers(kind: type[int] | type[float]) -> Callable[[str], list[float]]:
    """Return a reader of numbers between commas."""
    return lambda text: [kind(word) for word in text.split(",") if word]


def main() -> None:
    """Train all and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cifar10-small")
    parser.add_argument("--inception", type=Path)
    parser.add_argument("--inception-sha256", default=INCEPTION_SHA256)
    parser.add_argument("--diffusers-steps", type=int, default=3000, help="of the example's loop")
    parser.add_argument("--rates", type=numbers(float), default=[16e-4], help="of the example's loop, beside its own")
    parser.add_argument("--checkpoints", type=numbers(int), default=[250, 500, 750, 1000, 1500, 2000, 3000])
    parser.add_argument("--num-generated", type=int, default=5000)
    parser.add_argument("--output", type=Path, help="JSON file for the checkpoints")
    known, settings = parser.parse_known_args()
    images = [f"--fid_images={known.num_generated}", f"--steps={known.checkpoints[-1]}", "--precision=bf16"]
    if known.inception:
        images += [f"--inception={known.inception}", f"--inception_sha256={known.inception_sha256}"]
    settings = [*images, *settings]
    config = settle(with_overrides(preset(known.preset), settings), settings)
    accelerator = make_accelerator(config)
    parts = build(config, accelerator.device)
    quality = ImageQuality.open(parts, accelerator.device, BATCH)
    device = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else platform.machine()
    print(f"{known.preset}, batch {config.batch_size}, seed {config.seed}, {device}, torch {torch.__version__}")
    print(f"{'loop':18} {'step':>6} {'seconds':>8} {'eps-MSE':>8} {'FID':>7}", flush=True)
    diffusers_contender(config, accelerator, EXAMPLE_RATE, 2).steps(2)  # loads the GPU's libraries
    curves: dict[str, list[Checkpoint]] = {}
    for rate in [EXAMPLE_RATE, *known.rates]:
        contender = diffusers_contender(config, accelerator, rate, known.diffusers_steps)
        curves[contender.name] = list(follow(contender, parts, accelerator, quality))
    curves[OURS] = list(follow(our_contender(config, accelerator, known.checkpoints), parts, accelerator, quality))
    print(verdicts(curves))
    if known.output:
        known.output.write_text(json.dumps({k: [vars(p) for p in v] for k, v in curves.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
