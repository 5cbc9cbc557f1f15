"""How steps are executed: eagerly (plain), replayed as CUDA graphs (graph), with a compiled network (compile)."""

import os
import shutil
import warnings
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils._triton import has_triton

from kairostep.shares import share_of_process

COMPILE_FROM = 1_280_000  # images on one device from which on compiling a U-Net, which takes minutes, pays
MAX_COMPILED = 64  # compiled networks in a process; torch's limit of 8 also counts networks that are gone


@dataclass(frozen=True, slots=True)
class StepMode:
    """A way to execute steps, and why it was chosen."""

    mode: str  # plain, graph or compile
    why: str
    replays: bool  # whether steps are replayed as CUDA graphs


def choose_step_mode(asked: str, num_images: int, accelerator: Accelerator) -> StepMode:
    """Return how to execute steps.

    Args:
        asked: plain, graph, compile, or auto: the fastest mode that works here and pays.
        num_images: Images of the whole training, over all processes.
        accelerator: The device and the processes.
    """
    num_processes, device = accelerator.num_processes, accelerator.device.type
    on_gpu = device == "cuda"
    can_compile = on_gpu and all(share_of_process().gather(has_compiler()))  # processes must train in one mode
    if asked == "graph" and not on_gpu:
        raise ValueError(
            f"speed graph must have a CUDA GPU, got {device}: pass --speed=auto, which takes what is possible"
        )
    if asked == "compile" and on_gpu and not can_compile:
        raise ValueError("speed compile needs Triton and a C compiler on a GPU, got not both: pass --speed=auto")
    if asked != "auto":
        return StepMode(asked, "as asked", on_gpu and asked != "plain")
    if not on_gpu:
        return StepMode("plain", f"{device} has no graphs to replay and gains little from compiling", replays=False)
    own = num_images // num_processes
    if can_compile and own >= COMPILE_FROM:
        return StepMode("compile", f"{own:,} images make up for the minutes of compiling", replays=True)
    too_few = f"{own:,} images, under {COMPILE_FROM:,}, do not make up for compiling"
    short = too_few if can_compile else "no Triton or no C compiler is there"
    return StepMode("graph", short, replays=True)


def has_compiler() -> bool:
    """Return whether torch.compile can make kernels for a GPU."""
    return has_triton() and bool(os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang"))))


def compile_network(model: nn.Module) -> None:
    """Compile a network in place, once for each shape. Parts that torch cannot compile run eagerly, with a warning."""
    settings = torch._dynamo.config
    settings.suppress_errors = True
    settings.cache_size_limit = max(settings.cache_size_limit, MAX_COMPILED)  # newer torch calls it recompile_limit
    of_diffusers = "Dynamo detected a call to a `functools.lru_cache`-wrapped function at 'upsampling.py"
    warnings.filterwarnings("ignore", of_diffusers, UserWarning)  # diffusers asks for torch's version there
    model.compile(dynamic=False)
