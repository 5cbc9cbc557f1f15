"""A small U-Net with random weights, and the noise of its two images."""

from typing import Any

import torch
from diffusers import UNet2DModel
from torch import Tensor

from kairostep.generation import noise_of_images
from kairostep.networks import ddpm_unet

SHAPE = (3, 8, 8)
IMAGES = torch.arange(2)


def network(**options: Any) -> UNet2DModel:
    torch.manual_seed(0)
    model = ddpm_unet(8, 3, channels=8, multipliers=(1, 2), blocks=1, attention=(), dropout=0.0, **options)
    for parameter in model.parameters():  # diffusers starts some at 0
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def our_noise(step: int) -> Tensor:
    return noise_of_images(0, IMAGES, step, SHAPE)
