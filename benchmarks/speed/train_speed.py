"""Images per second of training loops, side by side in one run: ours in each mode, and what people use today.

    python benchmarks/speed/train_speed.py  # digits, on a CPU
    python benchmarks/speed/train_speed.py --device cuda --preset cifar10-small --batch 128 [--loops ...] [--profile F]

Loops: `diffusers` is written as the library's example of unconditional training is, with its own components
(accelerate, data loader, AdamW, learning-rate schedule, EMAModel); `bare` is plain PyTorch with everything resident,
`bare, compiled` the same with torch.compile; ours are `plain`, `graph` and `compile`, with uniform draws. What other
samplers add is measured by learning_cost.py. Loops take turns of 10 steps in random order; speeds are medians, ratios
are of turns in the same round. `first step` has the seconds until the first step is done, loading and compiling
included; `busy` is the share of time in which the GPU runs kernels; `ceiling` the share of the speed at which it
multiplies large matrices in bf16, measured in the same run. `--profile` writes the milliseconds of a step by kind of
kernel, which step_profile.py draws.
"""

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from bare_loop import BareLoop, load_noise
from diffusers import DDPMScheduler
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from side_by_side import ratio_of_speeds, seconds_of, take_turns
from step_profile import kernel_seconds, write_profile
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from kairostep.data import InMemory
from kairostep.experiments import Component, Config, Experiment, build, experiment, preset
from kairostep.training.assembly import make_batches, make_trainer

MODES = ("plain", "graph", "compile")
STEPS_PER_TURN, STEPS_PROFILED = 10, 3
Steps = Callable[[int], None]
"""`steps(n)` trains n steps."""


class Images(Dataset[dict[str, Tensor]]):
    """Images one by one, mirrored and scaled on the host, as a folder of them is read."""

    def __init__(self, stored: InMemory) -> None:
        self.stored = stored

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        image = self.stored.read(row)[0].float() / 127.5 - 1
        return {"input": image.flip(-1) if self.stored.flip and torch.rand(()) < 0.5 else image}


def diffusers_steps(parts: Experiment, accelerator: Accelerator) -> Steps:
    """Return the steps of a loop made of diffusers' and accelerate's components."""
    return diffusers_loop(parts, accelerator)[0]


def diffusers_loop(
    parts: Experiment, accelerator: Accelerator, *, learning_rate: float = 1e-4, num_steps: int = 100_000
) -> tuple[Steps, EMAModel]:
    """Return the steps and the averaged weights.

    Optimizer, schedule, clipping and average are the example's by default. Batch size, precision and mirroring are the
    experiment's, where the example has 16 images, float32 and none. It averages weights only with `--use_ema`.
    """
    set_seed(parts.config.seed)  # the example draws order, flips, noise and times from the global generators
    model, scheduler = parts.model, DDPMScheduler(num_train_timesteps=1000)
    average = EMAModel(model.parameters(), decay=0.9999, use_ema_warmup=True, power=0.75)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.95, 0.999), weight_decay=1e-6)
    loader = DataLoader(Images(parts.dataset), batch_size=parts.config.batch_size, shuffle=True, drop_last=True)
    rate = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=500, num_training_steps=num_steps)
    model, optimizer, loader, rate = accelerator.prepare(model, optimizer, loader, rate)
    average.to(accelerator.device)
    batches = endless(loader)

    def steps(num: int) -> None:
        for _ in range(num):
            clean = next(batches)["input"]
            noise = torch.randn(clean.shape, device=clean.device)
            t = torch.randint(0, 1000, (len(clean),), device=clean.device).long()
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(scheduler.add_noise(clean, noise, t), t).sample.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                rate.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(model.parameters())
            loss.detach().item()  # shown by its progress bar in every step

    return steps, average


def endless(loader: DataLoader[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from loader


def bare_steps(parts: Experiment, accelerator: Accelerator, *, compiled: bool) -> Steps:
    """Return the steps of the plain PyTorch loop, in the layout that is faster for it."""
    loop = BareLoop(parts, accelerator.device, channels_last=compiled)
    if compiled:
        loop.model.compile()
    return loop.turn


def our_steps(parts: Experiment, accelerator: Accelerator) -> Steps:
    """Return the steps of the trainer, batches included."""
    trainer = make_trainer(parts, accelerator)
    batches = make_batches(parts, accelerator).from_step(0)

    def steps(num: int) -> None:
        for _ in range(num):
            trainer.step([next(batches)])

    return steps


@dataclass(frozen=True)
class Loop:
    """How to make a loop's steps, and the settings it is made with."""

    make: Callable[[Experiment, Accelerator], Steps]
    speed: str = "plain"


def loops_for(device: torch.device) -> dict[str, Loop]:
    """Return all loops that this device can run; a CPU has no graphs, and nothing is gained there by compiling."""
    found = {"diffusers": Loop(diffusers_steps), "bare": Loop(lambda *parts: bare_steps(*parts, compiled=False))}
    modes = MODES if device.type == "cuda" else MODES[:1]
    if device.type == "cuda":
        found["bare, compiled"] = Loop(lambda *parts: bare_steps(*parts, compiled=True))
    for speed in modes:
        found[speed] = Loop(our_steps, speed)
    return found


def ceiling(device: torch.device, size: int = 8192) -> float:
    """Return the multiply-adds per second, counted twice, of large matrices in bf16."""
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    turns = [seconds_of(lambda: torch.mm(a, b), device) for _ in range(20)]
    return 2 * size**3 / statistics.median(turns)


def flops_of_step(parts: Experiment, device: torch.device) -> int:
    """Return the floating-point operations of the forward and backward passes of one step."""
    model = parts.model.to(device)
    x0 = torch.zeros(parts.config.batch_size, *parts.dataset.shape, device=device)
    with FlopCounterMode(display=False) as counter:
        parts.objective(model, x0, torch.full((len(x0),), 0.5, device=device)).mean().backward()
    return counter.get_total_flops()


def build_parts(config: Config, loop: Loop, device: torch.device) -> Experiment:
    """Return a network and data of the loop's own, the same for all."""
    return build(replace(config, sampler=Component("uniform"), speed=loop.speed), device)


def measure(
    config: Config, chosen: dict[str, Loop], rounds: int, accelerator: Accelerator
) -> dict[str, dict[str, float]]:
    """Measure the loops of one preset, print their table, and return the milliseconds of a step by kind of kernel."""
    device, on_gpu = accelerator.device, accelerator.device.type == "cuda"
    steps, first, memory = {}, {}, {}
    for name, loop in chosen.items():
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        held, start = torch.cuda.memory_allocated() if on_gpu else 0, time.perf_counter()
        steps[name] = loop.make(build_parts(config, loop, device), accelerator)
        seconds_of(partial(steps[name], 1), device)
        first[name] = time.perf_counter() - start
        steps[name](STEPS_PER_TURN)
        memory[name] = (torch.cuda.max_memory_allocated() - held) / 2**30 if on_gpu else 0.0
    turns = {name: partial(steps[name], STEPS_PER_TURN) for name in chosen}
    taken = take_turns(turns, rounds, device, warm_up=0)
    seconds = {name: [turn / STEPS_PER_TURN for turn in turns] for name, turns in taken.items()}
    flops = flops_of_step(build_parts(config, Loop(our_steps), device), device) if on_gpu else 0
    top = ceiling(device) if on_gpu else 1.0
    bases = [name for name in ("diffusers", "bare", "plain", "graph", "compile") if name in seconds]
    print(f"{'loop':20} {'images/s':>9} {'first step, s':>13} {'GiB':>6} {'busy':>6} {'ceiling':>8}", *headings(bases))
    profiles = {}
    for name, own in seconds.items():
        usual = statistics.median(own)
        if on_gpu:
            profiles[name] = kernel_seconds(partial(steps[name], STEPS_PROFILED), STEPS_PROFILED)
        busy = f"{sum(profiles[name].values()) / usual:6.0%}" if on_gpu else "     -"
        share = f"{flops / usual / top:8.1%}" if on_gpu else "       -"
        ratios = [f"{ratio_of_speeds(seconds[base], own):>22}" for base in bases]
        facts = f"{name:20} {config.batch_size / usual:9.0f} {first[name]:13.1f} {memory[name]:6.2f} {busy} {share}"
        print(facts, *ratios, flush=True)
        profiles.setdefault(name, {})["whole step"] = usual
    return profiles


def headings(bases: list[str]) -> list[str]:
    """Return the titles of the columns of ratios."""
    return [f"{f'x {base}':>22}" for base in bases]


def main() -> None:
    """Measure the presets that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", action="append")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--profile", type=Path, help="JSON file for the milliseconds of a step by kind of kernel")
    parser.add_argument("--loops", help="names of some, separated by ;")
    arguments = parser.parse_args()
    experiment.load_data = load_noise
    use_cuda = arguments.device == "cuda"
    accelerator = Accelerator(cpu=not use_cuda, mixed_precision="bf16" if use_cuda else "no")
    torch.backends.cudnn.benchmark = True
    where = torch.cuda.get_device_name() if use_cuda else platform.processor() or platform.machine()
    chosen = loops_for(accelerator.device)
    if arguments.loops:
        chosen = {name: chosen[name] for name in arguments.loops.split(";")}
    for name in arguments.preset or ["digits"]:
        config = replace(preset(name), precision="bf16" if use_cuda else "fp32")
        if config.data.name != "digits":
            config = replace(config, data=Component(config.data.name, {"path": "not read"}))
        config = replace(config, batch_size=arguments.batch or config.batch_size)
        print(f"\n{name}, batch {config.batch_size}, torch {torch.__version__}, {where}, {arguments.rounds} rounds")
        profiles = measure(config, chosen, arguments.rounds, accelerator)
        if arguments.profile:
            write_profile(arguments.profile, f"{name}, batch {config.batch_size}", where, profiles)


if __name__ == "__main__":
    main()
