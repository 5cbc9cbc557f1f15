"""What the floor and the reward of the adaptive sampler do to a small U-Net on CIFAR-10.

    python benchmarks/adaptive_floor.py images.npy [--steps 4000] [--seconds 480] [--out results.json]

images.npy holds (N, 32, 32, 3) uint8. Arms of one seed share initial weights, data order and the number of steps; the
averaged weights are measured on the last 2000 images, held out, at stratified times with fixed noise. A new arm starts
only if it would end within `--seconds`.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import UNet2DModel
from torch import Tensor, nn

import kairostep as ks

BATCH, HELD_OUT, LEARNING_RATE, AVERAGE_DECAY = 128, 2000, 2e-4, 0.9995
PROCESS = ks.DiscreteProcess.linear()
ARMS = {
    "uniform, seed 0": ("uniform", None, 0.0, 0),
    "adaptive, VLB, floor 0.2": ("adaptive", PROCESS.vlb_weight, 0.2, 0),
    "adaptive, VLB, no floor": ("adaptive", PROCESS.vlb_weight, 0.0, 0),
    "adaptive, VLB, floor 0.5": ("adaptive", PROCESS.vlb_weight, 0.5, 0),
    "adaptive, MSE, floor 0.2": ("adaptive", None, 0.2, 0),
    "uniform, seed 1": ("uniform", None, 0.0, 1),
}


def build_unet() -> nn.Module:
    """Return a U-Net of 6 to 7 million parameters."""
    return UNet2DModel(
        sample_size=32,
        block_out_channels=(64, 128, 128),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=32,
    )


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Return the mean squared error of the noise, the bound per dimension, and the error at both ends of t."""
    generator = torch.Generator(images.device).manual_seed(0)
    x0 = images.repeat(4, 1, 1, 1)
    t = torch.arange(len(x0), device=x0.device)[torch.randperm(len(x0), generator=generator, device=x0.device)] + 0.5
    t = t / len(x0)
    noise = torch.randn(x0.shape, generator=generator, device=x0.device)
    objective = ks.Objective(PROCESS)
    with torch.autocast("cuda", torch.bfloat16):
        parts = zip(x0.split(500), t.split(500), noise.split(500), strict=True)
        losses = torch.cat([objective(model, x, s, noise=e) for x, s, e in parts])
    return {
        "mse": float(losses.mean()),
        "vlb": 1e3 * float((losses * PROCESS.vlb_weight(t)).mean()),
        "mse t<0.05": float(losses[t < 0.05].mean()),
        "mse t>0.95": float(losses[t > 0.95].mean()),
    }


def train(kind: str, weight: object, floor: float, seed: int, images: Tensor, num_steps: int) -> dict:
    """Return what one arm reached."""
    torch.manual_seed(seed)
    model = build_unet().cuda()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
    fast = torch.compile(model, mode="reduce-overhead")
    objective = ks.Objective(PROCESS)
    if kind == "uniform":
        sampler: ks.TimestepSampler = ks.Uniform(seed=seed)
    else:
        policy = ks.BetaPolicy.for_input((3, 32, 32), seed=seed)
        sampler = ks.Adaptive(policy, weight, floor=floor, model=model, seed=seed)
    sampler = sampler.cuda()
    training = images[:-HELD_OUT]
    order = torch.Generator("cuda").manual_seed(seed)
    every_row = torch.arange(BATCH, device="cuda")
    start = time.perf_counter()
    for step in range(num_steps):
        x0 = training[torch.randint(len(training), (BATCH,), generator=order, device="cuda")]

        def loss_at(rows: Tensor, t: Tensor, x0: Tensor = x0) -> Tensor:
            network = fast if torch.is_grad_enabled() else model
            with torch.autocast("cuda", torch.bfloat16):
                return objective(network, x0[rows], t)

        drawn = sampler.sample(x0)
        losses = loss_at(every_row, drawn.t)
        optimizer.zero_grad()
        (losses * drawn.weight).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with sampler.observe(x0, drawn, losses.detach(), loss_at):
            optimizer.step()
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - AVERAGE_DECAY)
        if step == 50:
            torch.cuda.synchronize()
            start = time.perf_counter()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / (num_steps - 51)
    result = evaluate(average, images[-HELD_OUT:])
    density = [round(float(d), 3) for d in sampler.density(20)]
    diagnostics = {key: round(float(value), 5) for key, value in sampler.diagnostics().items()}
    return {**result, "ms per step": 1e3 * seconds, "density": density, "diagnostics": diagnostics}


def main() -> None:
    """Run the arms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--out", type=Path, default=Path("adaptive_floor.json"))
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    pixels = torch.from_numpy(np.load(arguments.images)).cuda()
    images = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
    begin, slowest, results = time.perf_counter(), 0.0, {}
    print(f"{torch.cuda.get_device_name()}, {len(images)} images, {arguments.steps} steps of batch {BATCH}", flush=True)
    print(f"{'arm':26} {'MSE':>8} {'VLB':>8} {'t<.05':>8} {'t>.95':>8} {'ms/step':>8}  mass below 0.05, above 0.5")
    for name in arguments.arms:
        started = time.perf_counter()
        if started - begin + slowest > arguments.seconds:
            print(f"{name:26} left out for time")
            continue
        result = results[name] = train(*ARMS[name], images, arguments.steps)
        slowest = max(slowest, time.perf_counter() - started)
        ends = f"{result['density'][0]:.3f}, {sum(result['density'][10:]):.3f}"
        print(
            f"{name:26} {result['mse']:8.5f} {result['vlb']:8.3f} {result['mse t<0.05']:8.4f} "
            f"{result['mse t>0.95']:8.5f} {result['ms per step']:8.2f}  {ends}",
            flush=True,
        )
        arguments.out.write_text(json.dumps({"steps": arguments.steps, "arms": results}, indent=1))


if __name__ == "__main__":
    main()
