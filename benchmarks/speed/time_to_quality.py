"""Seconds of training until a model is as good as another loop's: ours as it comes, and diffusers' example.

    python benchmarks/speed/time_to_quality.py --data.path=cifar10.npz --inception inception.pt --output FILE

Both train the same network from the same weights with the same hyper-parameters (Adam, learning rate, clipping, batch,
bf16, averaged weights) on the same GPU, one after the other: `diffusers` is the loop of train_speed.py on the real
images, `kairostep` what `kairostep train` does by default. Seconds are of training, from the first step on, recording
or compiling included, loading of the GPU's libraries and measuring left out. At each checkpoint the averaged weights
give the held-out error of the noise, with the same images, times and noise for both, and FID of images from the same
noise. The target is what the diffusers loop has at its end; between checkpoints values are linear in the logarithm.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from train_speed import Steps, diffusers_loop, our_steps_of

from kairostep.evaluation.features import INCEPTION_SHA256
from kairostep.experiments import Component, Experiment, build, preset
from kairostep.experiments.config import with_overrides
from kairostep.seed_statistics import cost_to_reach
from kairostep.training.assembly import make_accelerator, make_trainer
from kairostep.training.image_quality import ImageQuality
from kairostep.training.monitor import Monitor

BATCH = 512  # of images that are generated


@dataclass(frozen=True)
class Contender:
    """A loop: its steps, and a network with its averaged weights."""

    name: str
    steps: Steps
    averaged: Callable[[], nn.Module]
    num_steps: int


@dataclass(frozen=True)
class Checkpoint:
    """How good a model was after some training."""

    step: int
    seconds: float
    epsilon_mse: float
    fid: float


def diffusers_contender(parts: Experiment, accelerator: Accelerator, num_steps: int) -> Contender:
    """Return the loop of diffusers' components, with the preset's hyper-parameters."""
    network = copy.deepcopy(parts.model).to(accelerator.device).eval().requires_grad_(False)
    steps, average = diffusers_loop(parts, accelerator, as_preset=True)

    def averaged() -> nn.Module:
        average.copy_to(network.parameters())
        return network

    return Contender("diffusers", steps, averaged, num_steps)


def our_contender(parts: Experiment, accelerator: Accelerator, num_steps: int) -> Contender:
    """Return the trainer as `kairostep train` has it."""
    trainer = make_trainer(parts, accelerator)
    return Contender("kairostep", our_steps_of(trainer, parts, accelerator), lambda: trainer.ema.model, num_steps)


def follow(
    contender: Contender, parts: Experiment, accelerator: Accelerator, quality: ImageQuality, num_checkpoints: int
) -> Iterator[Checkpoint]:
    """Train, and yield what each checkpoint is worth."""
    seconds, done = 0.0, 0
    for number in range(1, num_checkpoints + 1):
        until = contender.num_steps * number // num_checkpoints
        torch.cuda.synchronize()
        start = time.perf_counter()
        contender.steps(until - done)
        torch.cuda.synchronize()
        seconds, done = seconds + time.perf_counter() - start, until
        model = contender.averaged()
        error = Monitor(parts, model, accelerator).evaluate()["loss"]
        point = Checkpoint(done, seconds, error, quality.measure(parts, model)["fid"])
        print(line_of(contender.name, point), flush=True)
        yield point


def seconds_to(target: float, checkpoints: Sequence[Checkpoint], measure: str) -> float | None:
    """Return the seconds at which a measure first was as low as the target, None if it never was."""
    values = [getattr(point, measure) for point in checkpoints]
    return cost_to_reach([point.seconds for point in checkpoints], values, target)


def line_of(name: str, point: Checkpoint) -> str:
    """Return a checkpoint as a line of the table."""
    return f"{name:10} {point.step:6} {point.seconds:8.1f} {point.epsilon_mse:8.5f} {point.fid:7.1f}"


def verdicts(curves: dict[str, list[Checkpoint]]) -> str:
    """Return the seconds to what the diffusers loop had at its end."""
    final, lines = curves["diffusers"][-1], []
    for measure in ("epsilon_mse", "fid"):
        target = getattr(final, measure)
        taken = seconds_to(target, curves["kairostep"], measure)
        found = "not reached" if taken is None else f"{taken:.1f} s, {final.seconds / taken:.2f} times as fast"
        lines.append(f"\n{measure} of {target:.5g}: diffusers {final.seconds:.1f} s, kairostep {found}")
    return "".join(lines)


def main() -> None:
    """Train both and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cifar10-small")
    parser.add_argument("--inception", type=Path, required=True)
    parser.add_argument("--inception-sha256", default=INCEPTION_SHA256)
    parser.add_argument("--steps", type=int, default=700, help="of the diffusers loop")
    parser.add_argument("--our-steps", type=int, default=2000)
    parser.add_argument("--checkpoints", type=int, default=5)
    parser.add_argument("--num-generated", type=int, default=2560)
    parser.add_argument("--output", type=Path, help="JSON file for the checkpoints")
    arguments, settings = parser.parse_known_args()
    images = [f"--fid_images={arguments.num_generated}", f"--inception={arguments.inception}"]
    images.append(f"--inception_sha256={arguments.inception_sha256}")
    usual = ["--precision=bf16", f"--steps={arguments.our_steps}", *images]
    config = with_overrides(preset(arguments.preset), [*usual, *settings])
    accelerator = make_accelerator(config)
    quality = ImageQuality.open(build(config, accelerator.device), accelerator.device, BATCH)
    print(f"{arguments.preset}, batch {config.batch_size}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'loop':10} {'step':>6} {'seconds':>8} {'eps-MSE':>8} {'FID':>7}", flush=True)
    makers: dict[str, Any] = {"diffusers": diffusers_contender, "kairostep": our_contender}
    num_steps = {"diffusers": arguments.steps, "kairostep": arguments.our_steps}
    curves: dict[str, list[Checkpoint]] = {}
    uniform = replace(config, sampler=Component("uniform"))
    diffusers_contender(build(uniform, accelerator.device), accelerator, 2).steps(2)  # loads the GPU's libraries
    for name, make in makers.items():
        parts = build(uniform if name == "diffusers" else config, accelerator.device)
        contender = make(parts, accelerator, num_steps[name])
        curves[name] = list(follow(contender, parts, accelerator, quality, arguments.checkpoints))
    print(verdicts(curves))
    if arguments.output:
        arguments.output.write_text(json.dumps({k: [vars(p) for p in v] for k, v in curves.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
