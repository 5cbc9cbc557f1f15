"""Networks as diffusers models, called `model(x_t, time)` or, with classes, `model(x_t, time, class_labels=labels)`.

They bring diffusers, which takes seconds, and are imported when they are used.
"""

from typing import TYPE_CHECKING

from kairostep.lazy import import_at_first_use
from kairostep.registry import networks

if TYPE_CHECKING:
    from kairostep.networks.dit_model import DiT2DModel as DiT2DModel
    from kairostep.networks.dit_model import dit as dit
    from kairostep.networks.unet import ddpm_unet as ddpm_unet
    from kairostep.networks.uvit import UViT2DModel as UViT2DModel

networks.register_later("unet", "kairostep.networks.unet:ddpm_unet")
networks.register_later("dit", "kairostep.networks.dit_model:dit")
networks.register_later("uvit", "kairostep.networks.uvit:UViT2DModel")

__getattr__ = import_at_first_use(
    __name__, {"DiT2DModel": "dit_model", "dit": "dit_model", "ddpm_unet": "unet", "UViT2DModel": "uvit"}
)
