"""One seed per image: noise as a function of (seed, image, step), whatever else is in the batch."""

import math

import torch
from torch import Tensor

from kairostep.counters import mix

MOST_STEPS, MOST_NUMBERS = 16, 2**20  # that are made at once


def noise_of_images(seed: int, images: Tensor, step: int, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal noise (B, *shape), float32, on the device of the images' numbers (B,), int64.

    Step 0 is the noise that generation starts from. The numbers are the same on every device and in every batch:
    differences of logarithms and sines between processors vanish when float64 is rounded.
    """
    return _noise_of_steps(seed, images, range(step, step + 1), shape)[0]


class NoiseOfImages:
    """`noise(step)` is `noise_of_images(seed, images, step, shape)`, computed for several steps at once."""

    def __init__(self, seed: int, images: Tensor, shape: tuple[int, ...]) -> None:
        self.seed, self.images, self.shape = seed, images, shape
        self.at_once = max(1, min(MOST_STEPS, MOST_NUMBERS // (len(images) * math.prod(shape))))
        self.steps = range(0)
        self.made = torch.empty(0)  # (S, B, *shape)

    def __call__(self, step: int) -> Tensor:
        """Return the noise of a step (B, *shape)."""
        if step not in self.steps:
            self.steps = range(step, step + self.at_once)
            self.made = _noise_of_steps(self.seed, self.images, self.steps, self.shape)
        return self.made[step - self.steps.start]


def _noise_of_steps(seed: int, images: Tensor, steps: range, shape: tuple[int, ...]) -> Tensor:
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be a whole number in [0, 2**63), got {seed!r}: pass for instance seed=0")
    device, num = images.device, math.prod(shape)
    images = images.cpu() if device.type == "mps" else images  # which has no float64
    starts = mix(mix(torch.tensor(seed)) + (torch.tensor(steps) + 1)).to(images.device, non_blocking=True)  # (S,)
    keys = mix(images ^ starts[:, None])[..., None]  # (S, B, 1)
    num_pairs = -(-num // 2)
    places = mix(torch.arange(num_pairs, device=images.device))  # (P,); mixed, or streams with near keys would overlap
    bits = mix(keys ^ places)  # (S, B, P)
    # Box and Muller: 40 bits for the radius, which reach 7.5 standard deviations, 24 for the angle
    radius = (((bits >> 24) & (2**40 - 1)).double().add_(0.5).mul_(2**-40)).log_().mul_(-2).sqrt_()
    angle = (bits & (2**24 - 1)).double().mul_(2 * math.pi * 2**-24)
    pairs = torch.stack([radius * angle.cos(), radius * angle.sin()], 2)  # (S, B, 2, P)
    return pairs.flatten(2)[..., :num].float().view(len(steps), len(images), *shape).to(device)
