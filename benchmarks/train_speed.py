"""Images per second of training loops, side by side in one run: ours in each mode, and what people use today.

    python benchmarks/train_speed.py                                                  # digits, on a CPU
    python benchmarks/train_speed.py --device cuda --preset cifar10-small --batch 128 [--loops ...]

Loops: `diffusers` is written as the library's example of unconditional training is, with its own components
(accelerate, data loader, AdamW, learning-rate schedule, EMAModel); `bare` is plain PyTorch with everything resident,
`bare, compiled` the same with torch.compile; ours are `plain`, `graph` and `compile`, with the sampler beside the mode
where it is not uniform. They take turns in random order; speeds are medians, ratios are to uniform in `plain`, paired
within rounds. `first turn` has the seconds until ten steps are done, compilation included; `busy` is the share of it
in which the GPU runs kernels, later on; `ceiling` the share of the speed at which it multiplies matrices in bf16.
"""

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from side_by_side import Turn, ratio_of_speeds, seconds_of, take_turns
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode
from trainer_overhead import STEPS_PER_TURN, BareLoop, load_noise

from kairostep.data import InMemory
from kairostep.experiments import Component, Config, Experiment, build, experiment, preset
from kairostep.training.setup import make_batches, make_trainer

MODES = ("plain", "graph", "compile")
SAMPLERS = ("uniform", "root_loss", "progress", "adaptive")
BASE = "plain"


class Images(Dataset[dict[str, Tensor]]):
    """Images one by one, mirrored and scaled on the host, as a folder of them is read."""

    def __init__(self, stored: InMemory) -> None:
        self.stored = stored

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        image = self.stored.read(row)[0].float() / 127.5 - 1
        return {"input": image.flip(-1) if self.stored.flip and torch.rand(()) < 0.5 else image}


def diffusers_turn(parts: Experiment, accelerator: Accelerator) -> Turn:
    """Return a turn of a loop made of diffusers' and accelerate's components."""
    config = parts.config
    model, scheduler = parts.model, DDPMScheduler(num_train_timesteps=1000)
    average = EMAModel(model.parameters(), decay=0.9999, use_ema_warmup=True, inv_gamma=1.0, power=0.75)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6)
    loader = DataLoader(Images(parts.dataset), batch_size=config.batch_size, shuffle=True, drop_last=True)
    rate = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=500, num_training_steps=100_000)
    model, optimizer, loader, rate = accelerator.prepare(model, optimizer, loader, rate)
    average.to(accelerator.device)
    batches = endless(loader)

    def turn() -> None:
        for _ in range(STEPS_PER_TURN):
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

    return turn


def endless(loader: DataLoader[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from loader


def bare_turn(parts: Experiment, accelerator: Accelerator, *, compiled: bool) -> Turn:
    """Return a turn of the plain PyTorch loop."""
    loop = BareLoop(parts, accelerator.device)
    if compiled:
        loop.model.compile()
    return loop.turn


def our_turn(parts: Experiment, accelerator: Accelerator) -> Turn:
    """Return a turn of the trainer."""
    trainer = make_trainer(parts, accelerator)
    batches = make_batches(parts, accelerator).from_step(0)

    def turn() -> None:
        for _ in range(STEPS_PER_TURN):
            trainer.step([next(batches)])

    return turn


@dataclass(frozen=True)
class Loop:
    """How to make a loop's turn, and the settings it is made with."""

    make: Callable[[Experiment, Accelerator], Turn]
    sampler: str = "uniform"
    speed: str = "plain"


def loops_for(device: torch.device) -> dict[str, Loop]:
    """Return all loops that this device can run; a CPU has no graphs, and nothing is gained there by compiling."""
    found = {"diffusers": Loop(diffusers_turn), "bare": Loop(lambda *parts: bare_turn(*parts, compiled=False))}
    modes = MODES if device.type == "cuda" else MODES[:1]
    if device.type == "cuda":
        found["bare, compiled"] = Loop(lambda *parts: bare_turn(*parts, compiled=True))
    for speed in modes:
        for sampler in SAMPLERS:
            found[speed if sampler == "uniform" else f"{speed}, {sampler}"] = Loop(our_turn, sampler, speed)
    return found


def busy_share(turn: Turn, seconds: float) -> float:
    """Return the share of the turn's usual time in which the GPU ran kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        turn()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 / seconds


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
    return build(replace(config, sampler=Component(loop.sampler), speed=loop.speed), device)


def measure(config: Config, chosen: dict[str, Loop], rounds: int, accelerator: Accelerator) -> None:
    """Measure the loops of one preset and print their table."""
    device, turns, first, memory = accelerator.device, {}, {}, {}
    for name, loop in chosen.items():
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        start = time.perf_counter()
        turns[name] = loop.make(build_parts(config, loop, device), accelerator)
        seconds_of(turns[name], device)
        first[name] = time.perf_counter() - start
        memory[name] = (torch.cuda.max_memory_allocated() - held) / 2**30 if device.type == "cuda" else 0.0
    seconds = take_turns(turns, rounds, device)
    flops = flops_of_step(build_parts(config, Loop(our_turn), device), device) if device.type == "cuda" else 0
    top = ceiling(device) if device.type == "cuda" else 1.0
    base = BASE if BASE in seconds else next(iter(seconds))
    print(f"{'loop':20} {'images/s':>9} {'first turn, s':>13} {'GiB':>6} {'busy':>6} {'ceiling':>8}   speed x {base}")
    for name, taken in seconds.items():
        usual = statistics.median(taken)
        rate = STEPS_PER_TURN * config.batch_size / usual
        busy = f"{busy_share(turns[name], usual):6.0%}" if device.type == "cuda" else "     -"
        share = f"{STEPS_PER_TURN * flops / usual / top:8.1%}" if device.type == "cuda" else "       -"
        speed = ratio_of_speeds(seconds[base], taken)
        print(f"{name:20} {rate:9.0f} {first[name]:13.1f} {memory[name]:6.2f} {busy} {share}   {speed}", flush=True)


def main() -> None:
    """Measure the presets that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", action="append")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=10)
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
        measure(config, chosen, arguments.rounds, accelerator)


if __name__ == "__main__":
    main()
