"""Networks as diffusers models, called `model(x_t, time)` or, with classes, `model(x_t, time, class_labels=labels)`."""

from kairostep.networks.dit import DiT2DModel as DiT2DModel
from kairostep.networks.dit import dit as dit
from kairostep.networks.unet import ddpm_unet as ddpm_unet
from kairostep.networks.uvit import UViT2DModel as UViT2DModel
