"""`kairostep generate`: makes a folder of images with the model of a run."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kairostep.checks import count
from kairostep.commands.processes import open_processes

if TYPE_CHECKING:
    import torch
    from accelerate import PartialState

    from kairostep.generation.image_folder import Request
    from kairostep.runs import Trained

TEXT = """\
Makes images with the model of a run, as in

  kairostep generate runs/digits --num_images 1000 --solver heun
  kairostep generate runs/digits --solver ddpm --steps 250 --format npz --output digits-npz

Image i depends on the seed and on i, not on the batch size or the number of processes. The same command goes on where
it was stopped. Several GPUs: torchrun --nproc_per_node NUM -m kairostep generate ...
"""
PARSER = {"help": "make images", "description": TEXT}
DEFAULT_NUM = 64
TIMED_ROWS = 8  # rows of the timed evaluation on a CPU, where time is proportional to rows


class Renamed(argparse.Action):
    """Rejects the old name of an option and names the new one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None
    ) -> NoReturn:
        """Exit with an error."""
        parser.error(f"the solver is named by --solver, a sampler draws t in training: write --solver {values}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments. Defaults, except that of --num_images, are those of `Request` and `load_trained`."""
    add = parser.add_argument
    add("directory", type=Path, metavar="RUN", help="a run directory")
    meant = f"({DEFAULT_NUM}, or as many as were begun); FID is usually of 50000"
    add("--num_images", "--num", dest="num", type=int, metavar="N", help=meant)  # torchrun refuses --num
    add("--solver", choices=["ddpm", "ddim", "heun"], default="ddim", help="(ddim); flows and EDM have no ddpm")
    add("--sampler", action=Renamed, help=argparse.SUPPRESS)
    add("--steps", type=int, help="of the solver (ddpm 1000, ddim 200, heun 50)")
    add("--batch_size", type=int, default=256, help="images made at once by each process, at most (256)")
    add("--seed", type=int, default=0, help="of all noise (0)")
    add("--checkpoint", default="last", help="last, best, a step, or all (last)")
    add("--weights", choices=["ema", "model"], default="ema", help="averaged weights or the latest (ema)")
    add("--guidance", type=float, default=1.0, help="classifier-free guidance (1: none)")
    add("--classes", type=classes_of, default=(), metavar="0,1,2", help="made in turn (all classes)")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="of the network (fp32)")
    add("--format", choices=["png", "npz"], default="png", help="files 000000.png and so on, or images.npz (png)")
    add("--output", type=Path, help="folder (RUN/generated/ and the settings)")
    parser.set_defaults(run=run)


def classes_of(text: str) -> tuple[int, ...]:
    """Return the numbers of `0,1,2`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, got {text!r}") from None


def run(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Make images, or continue to make them."""
    import torch

    from kairostep.generation.image_folder import Request
    from kairostep.runs import load_trained
    from kairostep.runs.trained import find_checkpoints

    names = ("solver", "steps", "seed", "guidance", "classes", "precision", "format", "batch_size")
    num = DEFAULT_NUM if known.num is None else known.num
    count("--num_images", num, at_most=10**7, example=DEFAULT_NUM)  # `Request` knows it as num
    request = Request(num=num, **{name: getattr(known, name) for name in names})
    with open_processes(known.typed) as state:
        torch.backends.cudnn.benchmark = True
        for checkpoint in find_checkpoints(known.directory, known.checkpoint):
            trained = load_trained(known.directory, checkpoint, known.weights, state.device)
            output = known.output
            if output is not None and known.checkpoint == "all":
                output = output / f"step-{trained.step}"
            make_images(trained, request, output, state, extend=known.num is None)


def make_images(
    trained: "Trained", request: "Request", output: Path | None, state: "PartialState", *, extend: bool
) -> None:
    """Make the images of one checkpoint and print where they are. A signal raises `SystemExit`.

    Args:
        trained: The model of the checkpoint.
        request: Which images to make.
        output: The folder; None: one in the run directory.
        state: The processes.
        extend: If more images were begun in the folder, whether to make as many.
    """
    from dataclasses import replace

    from kairostep.generation.image_folder import Interrupted, default_folder, generate_images, interruptible, num_there
    from kairostep.generation.record import read_record
    from kairostep.runs.directory import alone_in

    folder = output or default_folder(trained, request)
    begun = read_record(folder)
    if extend and begun is not None:
        request = replace(request, num=max(request.num, begun["num"]))

    def tell_cost(num_missing: int) -> None:
        if state.is_main_process and num_missing:
            print(cost(trained, request, num_missing, state.device, state.num_processes), flush=True)

    try:
        with interruptible():
            made = generate_images(trained, request, folder, state, alone_in, before=tell_cost)
    except Interrupted as stopped:
        if state.is_main_process:
            there = f"{num_there(request, folder)} of {request.num} images in {folder}"
            print(f"stopped with {there}; the same command goes on", file=sys.stderr, flush=True)
        raise SystemExit(128 + stopped.number) from None
    if state.is_main_process:
        print(f"{request.num} images in {folder}, {made} of them made now", flush=True)


def cost(trained: "Trained", request: "Request", num: int, device: "torch.device", num_processes: int) -> str:
    """Return what `num` images cost: evaluations of the network, and the time, from one evaluation that is timed."""
    from kairostep.generation import network_evaluations, steps_of
    from kairostep.progress_meter import duration

    steps = steps_of(trained.process, request.solver, request.steps)
    each = network_evaluations(request.solver, steps, request.guidance)
    seconds = seconds_of_row(trained, request, min(request.batch_size, num), device) * each * num / num_processes
    return (
        f"making {num} images by {request.solver} in {steps} steps: {each * num:,} evaluations of the network, "
        f"about {duration(seconds)} on {num_processes} x {device.type}"
    )


def seconds_of_row(trained: "Trained", request: "Request", num: int, device: "torch.device") -> float:
    """Return the seconds that the network takes for each image of a batch of `num`."""
    from contextlib import nullcontext

    import torch

    from kairostep.diffusion.conditions import class_condition

    rows = num if device.type == "cuda" else min(num, TIMED_ROWS)
    x, t = torch.zeros(rows, *trained.shape, device=device), torch.zeros(rows, device=device)
    labels = torch.zeros(rows, dtype=torch.int64, device=device) if trained.num_classes else None
    seconds = []
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16) if request.precision == "bf16" else nullcontext():
        for _ in range(2):  # the first evaluation also loads kernels
            start = time.perf_counter()
            trained.model(x, t, **class_condition(labels))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
    return min(seconds) / rows
