"""One seed per image: noise as a function of (seed, image, step), whatever else is in the batch."""

import math

import torch
from torch import Tensor

from kairostep.timesteps.draws import mix


def noise_of_images(seed: int, images: Tensor, step: int, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal noise (B, *shape), float32, on the device of the images' numbers (B,), int64.

    Step 0 is what generation starts from. The same numbers come on every device and in every batch: what the
    logarithms and sines of two processors differ in is lost when float64 is rounded.
    """
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be a whole number in [0, 2**63), got {seed!r}: pass for instance seed=0")
    device, num = images.device, math.prod(shape)
    images = images.cpu() if device.type == "mps" else images  # which has no float64
    num_pairs = -(-num // 2)
    start = int(mix(mix(torch.tensor(seed)) + (step + 1)))  # on the host: nothing waits for the device
    keys = mix(images ^ start)[:, None]  # (B, 1)
    places = mix(torch.arange(num_pairs, device=images.device))  # (P,); mixed, or streams with near keys would overlap
    bits = mix(keys ^ places)  # (B, P)
    # Box and Muller: 40 bits for the radius, which reach 7.5 standard deviations, 24 for the angle
    radius = (((bits >> 24) & (2**40 - 1)).double().add_(0.5).mul_(2**-40)).log_().mul_(-2).sqrt_()
    angle = (bits & (2**24 - 1)).double().mul_(2 * math.pi * 2**-24)
    pairs = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)  # (B, 2, P)
    return pairs.flatten(1)[:, :num].float().view(-1, *shape).to(device)
