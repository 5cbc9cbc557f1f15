"""Images per second of our generation beside diffusers' pipelines with the same model, steps, batch and precision.

    python benchmarks/speed/generate_speed.py                                          # the digits preset, for a CPU
    python benchmarks/speed/generate_speed.py --device cuda --preset cifar10-small --preset cifar10-ddpm

DDPM beside DDPMPipeline and DDIM beside DDIMPipeline, from noise to pixels on the host. A turn is one batch; both take
turns in every round, in random order; the ratio of speeds is that of turns in the same round, averaged over rounds,
with its 95 % interval. Ours is what `kairostep generate` does for a batch, its noise seeded by image. The last column
is the same ratio for the pipeline beside itself: what the machine's noise alone gives. Repeat the command: on a shared
CPU the ratio moves more between runs than its interval says.
"""

import argparse
import platform
import statistics
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import DDIMPipeline, DDIMScheduler, DDPMPipeline
from diffusers.utils import logging
from side_by_side import Turn, ratio_of_speeds, take_turns

from kairostep.experiments import Component, preset
from kairostep.experiments.experiment import make_network, make_objective
from kairostep.generation import scheduler_for
from kairostep.generation.image_folder import Request, make_batch
from kairostep.runs import Trained


def untrained(name: str, device: torch.device) -> Trained:
    """Return the model of a preset as it is before training: speed does not depend on the weights."""
    config, objective = make_objective(replace(preset(name), sampler=Component("uniform")))
    shape = (1, 8, 8) if config.data.name == "digits" else (3, 32, 32)
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    model = make_network(config, shape, 0).to(device, memory_format=layout).eval().requires_grad_(False)
    return Trained(
        config=config,
        process=objective.process,
        prediction=objective.prediction,
        objective=objective,
        model=model,
        shape=shape,
        num_classes=0,
        to_pixels=lambda x0: x0,
        clip=True,
        checkpoint=Path("none"),
        step=0,
        weights="ema",
        digest="",
    )


def our_turn(trained: Trained, request: Request, device: torch.device) -> Turn:
    """Return a function that makes a batch."""

    def turn() -> None:
        make_batch(trained, request, list(range(request.batch_size)), device).pixels.cpu()

    return turn


def pipeline_turn(trained: Trained, request: Request, device: torch.device) -> Turn:
    """Return a function that makes a batch with the pipeline of diffusers."""
    scheduler = scheduler_for(trained.process, trained.prediction, clip=True)
    if request.solver == "ddim":
        pipeline = DDIMPipeline(trained.model, DDIMScheduler.from_config(scheduler.config))
    else:
        pipeline = DDPMPipeline(trained.model, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    bf16 = request.precision == "bf16"

    def turn() -> None:
        with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            pipeline(request.batch_size, num_inference_steps=request.steps, output_type="np")

    return turn


def measure(name: str, request: Request, rounds: int, device: torch.device) -> str:
    """Return the line of one preset and solver."""
    trained = untrained(name, device)
    turns = {"ours": our_turn(trained, request, device)}
    turns |= {key: pipeline_turn(trained, request, device) for key in ("pipeline", "again")}
    seconds = take_turns(turns, rounds, device)
    rate = {key: request.batch_size / statistics.median(values) for key, values in seconds.items()}
    ratios = [ratio_of_speeds(seconds["pipeline"], seconds[key]) for key in ("ours", "again")]
    return f"{name:15} {request.solver:6} {rate['ours']:9.1f} {rate['pipeline']:9.1f}   {ratios[0]:21}   {ratios[1]}"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", action="append")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    arguments = parser.parse_args()
    logging.set_verbosity_error()  # pipelines of one channel, and the like
    device = torch.device(arguments.device)
    torch.backends.cudnn.benchmark = True

    where = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    print(
        f"torch {torch.__version__}, {where}, {arguments.precision}, {arguments.rounds} rounds of a batch of "
        f"{arguments.batch_size} in {arguments.steps} steps\n"
    )
    print(
        f"{'preset':15} {'solver':6} {'ours':>9} {'pipeline':>9}   ours / pipeline         pipeline / itself       "
        "(images/s; ratios)"
    )
    for name in arguments.preset or ["digits"]:
        for solver in ("ddpm", "ddim"):
            request = Request(
                solver=solver,
                steps=arguments.steps,
                batch_size=arguments.batch_size,
                precision=arguments.precision,
            )
            print(measure(name, request, arguments.rounds, device), flush=True)


if __name__ == "__main__":
    main()
