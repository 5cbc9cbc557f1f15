"""What the adaptive sampler costs per training step, beside uniform sampling, in one run.

    python benchmarks/adaptive_cost.py                     # a small U-Net, for a CPU
    python benchmarks/adaptive_cost.py --device cuda       # the 35.7M U-Net of the paper (Table 7) in bf16

One model is trained throughout; the samplers take turns of 40 steps each, in every round in another order, so that one
turn holds exactly one update of the policy. The ratio is that of a turn to uniform's turn in the same round.
"""

import argparse
import platform
import random
import statistics
import time

import torch
from diffusers import UNet2DModel
from torch import Tensor, nn

import kairostep as ks

STEPS_PER_TURN = 40


def build_unet(size: str) -> nn.Module:
    """Return the paper's U-Net for CIFAR-10, or one of the same kind that a CPU trains."""
    width, image, layers = (128, 32, 2) if size == "paper" else (32, 8, 1)
    return UNet2DModel(
        sample_size=image,
        block_out_channels=(width, 2 * width, 2 * width, 2 * width),
        layers_per_block=layers,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        dropout=0.1,
    )


class Training:
    """A training loop with clipping and a running average of the weights, as the paper's."""

    def __init__(self, model: nn.Module, x0: Tensor, *, use_bf16: bool) -> None:
        self.model, self.x0, self.use_bf16 = model, x0, use_bf16
        self.objective = ks.Objective(ks.DiscreteProcess.linear())
        self.optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, fused=x0.is_cuda)
        self.average = [p.detach().clone() for p in model.parameters()]

    def loss_at(self, rows: Tensor, t: Tensor) -> Tensor:
        """Return the losses (N,) of these rows at t (N,)."""
        with torch.autocast(self.x0.device.type, torch.bfloat16, enabled=self.use_bf16):
            return self.objective(self.model, self.x0[rows], t)

    def step(self, sampler: ks.TimestepSampler) -> None:
        """Train by one step."""
        drawn = sampler.sample(self.x0)
        losses = self.loss_at(torch.arange(len(self.x0), device=self.x0.device), drawn.t)
        self.optimizer.zero_grad()
        (losses * drawn.weight).mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        with sampler.observe(self.x0, drawn, losses.detach(), self.loss_at):
            self.optimizer.step()
        torch._foreach_lerp_(self.average, list(self.model.parameters()), 1e-4)


def seconds_of_turn(training: Training, sampler: ks.TimestepSampler) -> float:
    """Return the time of one turn."""
    if training.x0.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS_PER_TURN):
        training.step(sampler)
    if training.x0.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)

    model = build_unet("paper" if device.type == "cuda" else "small").to(device, memory_format=torch.channels_last)
    size = model.config.sample_size
    x0 = torch.randn(arguments.batch, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    training = Training(model, x0, use_bf16=device.type == "cuda")
    weight = ks.DiscreteProcess.linear().vlb_weight
    shape = (3, size, size)
    samplers: dict[str, ks.TimestepSampler] = {
        "uniform": ks.Uniform(),
        "adaptive": ks.Adaptive(ks.BetaPolicy.for_input(shape), weight, model=model),
        "adaptive, one pair": ks.Adaptive(ks.BetaPair(), weight, model=model),
        "adaptive, all T, all x0": ks.Adaptive(
            ks.BetaPolicy.for_input(shape),
            weight,
            probing=ks.Probing(sweep=1000, reward_rows=arguments.batch),
            model=model,
        ),
    }
    samplers = {name: sampler.to(device) for name, sampler in samplers.items()}

    turns: dict[str, list[float]] = {name: [] for name in samplers}
    order = list(samplers)
    for round_ in range(arguments.rounds + 1):
        random.Random(round_).shuffle(order)
        for name in order:
            seconds = seconds_of_turn(training, samplers[name])
            if round_:  # the first warms up
                turns[name].append(seconds)

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"U-Net of {parameters:.1f}M, batch {arguments.batch}, torch {torch.__version__}, {where}\n")
    print(
        f"{'sampler':23} {'ms per step':>11} {'x uniform':>9} {'lowest':>7} {'highest':>7} {'forwards per update':>19}"
    )
    for name, turn in turns.items():
        ratios = [one / base for one, base in zip(turn, turns["uniform"], strict=True)]
        probes = samplers[name].diagnostics().get("probe_evaluations", torch.zeros(()))
        forwards = float(probes) / (arguments.rounds + 1) / arguments.batch
        print(
            f"{name:23} {1e3 * statistics.median(turn) / STEPS_PER_TURN:11.2f} {statistics.median(ratios):9.3f} "
            f"{min(ratios):7.3f} {max(ratios):7.3f} {forwards:15.1f}"
        )


if __name__ == "__main__":
    main()
