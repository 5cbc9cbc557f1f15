"""Images per second of the trainer beside a bare PyTorch loop with the same network, batch and precision, in one run.

    python benchmarks/trainer_overhead.py                                        # the digits preset, for a CPU
    python benchmarks/trainer_overhead.py --device cuda --preset cifar10-small --preset cifar10-ddpm

The bare loop does the same work in plain torch: batch from a resident set, flips, uniform t, noise, loss, backward,
clipping, Adam, averaged weights. Both take turns of 10 steps, in every round in another order; the ratio of speeds is
that of turns in the same round, averaged over rounds, with its 95 % interval. The trainer's turn includes its batches
and the recorder. The last column is the same ratio for a second bare loop: what the machine's noise alone gives.
"""

import argparse
import copy
import platform
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from side_by_side import Turn, ratio_of_speeds, take_turns
from torch import Tensor, nn
from torch.nn import functional as F

from kairostep.data import InMemory
from kairostep.experiments import Component, Config, Experiment, build, experiment, preset
from kairostep.training.recorder import Recorder
from kairostep.training.setup import make_batches, make_trainer

STEPS_PER_TURN = 10


def load_noise(config: Config, device: torch.device) -> tuple[InMemory, None]:
    """Return random images in the shape of the preset's data: speed does not depend on what they show."""
    shape = (1, 8, 8) if config.data.name == "digits" else (3, 32, 32)
    pixels = torch.randint(256, (10_000, *shape), dtype=torch.uint8)
    return InMemory(pixels, flip=config.data.name != "digits"), None


def trainer_turn(parts: Experiment, accelerator: Accelerator, directory: Path) -> Turn:
    """Return a function that trains for a turn with the trainer, as `kairostep train` does."""
    trainer = make_trainer(parts, accelerator)
    batches = make_batches(parts, accelerator).from_step(0)
    recorder = Recorder(directory)

    def turn() -> None:
        for _ in range(STEPS_PER_TURN):
            recorder.add(trainer.step([next(batches)]))
        recorder.write({"step": trainer.step_number, **recorder.summary()})

    return turn


class BareLoop:
    """The same training in plain torch."""

    def __init__(self, parts: Experiment, device: torch.device, *, channels_last: bool = False) -> None:
        config = parts.config
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.model: nn.Module = copy.deepcopy(parts.model).to(device, memory_format=layout)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-4, fused=device.type == "cuda")
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.alphas_cumprod = parts.process.alphas_cumprod.float().to(device)
        self.data, self.flip = parts.dataset.stored.to(device), parts.dataset.flip
        self.batch_size, self.layout, self.bf16 = config.batch_size, layout, config.precision == "bf16"

    def batch(self) -> Tensor:
        """Return images in [-1, 1], half of them mirrored."""
        rows = torch.randint(len(self.data), (self.batch_size,), device=self.data.device)
        x0 = self.data[rows].float() / 127.5 - 1
        if self.flip:
            mirrored = torch.rand(len(x0), 1, 1, 1, device=x0.device) < 0.5
            x0 = torch.where(mirrored, x0.flip(-1), x0)
        return x0.contiguous(memory_format=self.layout)

    def turn(self, num_steps: int = STEPS_PER_TURN) -> None:
        """Train for a turn."""
        total = torch.zeros((), device=self.data.device)
        for _ in range(num_steps):
            x0 = self.batch()
            t = torch.randint(len(self.alphas_cumprod), (len(x0),), device=x0.device)
            alpha_bar = self.alphas_cumprod[t].view(-1, 1, 1, 1)
            noise = torch.randn_like(x0)
            with torch.autocast(x0.device.type, torch.bfloat16, enabled=self.bf16):
                output = self.model(alpha_bar.sqrt() * x0 + (1 - alpha_bar).sqrt() * noise, t).sample
            loss = F.mse_loss(output.float(), noise)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            torch._foreach_lerp_(self.average, list(self.model.parameters()), 1e-4)
            total += loss.detach()
        total.item()


def measure(name: str, rounds: int, accelerator: Accelerator) -> str:
    """Return the line of one preset."""
    device = accelerator.device
    config = replace(preset(name), sampler=Component("uniform"))
    if config.data.name != "digits":
        config = replace(config, data=Component(config.data.name, {"path": "not read"}))
    config = config if device.type == "cuda" else replace(config, precision="fp32")
    parts = build(config, device)
    bare, again = BareLoop(parts, device), BareLoop(parts, device)
    with tempfile.TemporaryDirectory() as directory:
        turns = {"trainer": trainer_turn(parts, accelerator, Path(directory)), "bare": bare.turn, "again": again.turn}
        seconds = take_turns(turns, rounds, device)
    rate = {key: STEPS_PER_TURN * config.batch_size / statistics.median(values) for key, values in seconds.items()}
    ratios = [ratio_of_speeds(seconds["bare"], seconds[key]) for key in ("trainer", "again")]
    return f"{name:15} {rate['trainer']:9.0f} {rate['bare']:9.0f}   {ratios[0]:21}   {ratios[1]}"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", action="append")
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    experiment.load_data = load_noise
    use_cuda = arguments.device == "cuda"
    accelerator = Accelerator(cpu=not use_cuda, mixed_precision="bf16" if use_cuda else "no")
    torch.backends.cudnn.benchmark = True

    where = torch.cuda.get_device_name() if use_cuda else platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, {where}, {arguments.rounds} rounds of {STEPS_PER_TURN} steps\n")
    print(
        f"{'preset':15} {'trainer':>9} {'bare':>9}   trainer / bare          bare / itself           (images/s; ratios)"
    )
    for name in arguments.preset or ["digits"]:
        print(measure(name, arguments.rounds, accelerator), flush=True)


if __name__ == "__main__":
    main()
