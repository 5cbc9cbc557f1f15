"""A diffusers autoencoder on disk: images to the moments of their latents, and latents to images."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kairostep.data.extras import require

WEIGHTS = "diffusion_pytorch_model.safetensors"
DEFAULT_SCALE = 0.18215  # diffusers' default, that of Stable Diffusion's autoencoder
_CLASSES = ("AutoencoderKL", "VQModel")


@dataclass(frozen=True, slots=True)
class Autoencoder:
    """What `config.json` says, before any weight is read."""

    folder: Path
    kind: str
    in_channels: int
    latent_channels: int
    downsampling: int  # pixels per latent, in each direction
    scaling_factor: float
    shift_factor: float

    @property
    def has_std(self) -> bool:
        """Whether latents are drawn from a normal distribution or known exactly."""
        return self.kind == "AutoencoderKL"

    def latent_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the latent of an image of this shape (C, H, W)."""
        if len(shape) != 3 or shape[0] != self.in_channels or any(side % self.downsampling for side in shape[1:]):
            raise ValueError(
                f"images must have {self.in_channels} channels and sides that are multiples of {self.downsampling} "
                f"for {self.folder}, got {shape}: choose another size, or another autoencoder"
            )
        return (self.latent_channels, *(side // self.downsampling for side in shape[1:]))

    def digest(self) -> str:
        """Return a SHA-256 of configuration and weights."""
        with (self.folder / WEIGHTS).open("rb") as file:
            weights = hashlib.file_digest(file, "sha256").hexdigest()
        return hashlib.sha256((self.folder / "config.json").read_bytes() + weights.encode()).hexdigest()

    def load(self, device: torch.device) -> Any:
        """Return the diffusers model in float32, without gradients, from local safetensors alone."""
        kind = getattr(require("diffusers", "an autoencoder"), self.kind)
        model = kind.from_pretrained(
            self.folder, local_files_only=True, use_safetensors=True, low_cpu_mem_usage=False, torch_dtype=torch.float32
        )
        return model.to(device).eval().requires_grad_(False)

    def encode(self, model: Any, x0: Tensor) -> Tensor:
        """Return the moments (B, 2c, h, w) of images in [-1, 1], mean first, std second; the mean alone without std."""
        encoded = model.encode(x0)
        if not self.has_std:
            return torch.as_tensor(encoded.latents)
        return torch.cat([encoded.latent_dist.mean, encoded.latent_dist.std], 1)

    def decode(self, model: Any, x0: Tensor) -> Tensor:
        """Return images in [-1, 1] (B, C, H, W) of scaled latents (B, c, h, w)."""
        return torch.as_tensor(model.decode(x0 / self.scaling_factor + self.shift_factor).sample).clamp(-1, 1)


def scaling_factor(kind: str, written: float) -> float:
    """Return the factor on latents; LDM leaves those of a VQModel alone, whatever default diffusers writes."""
    return 1.0 if kind == "VQModel" and written == DEFAULT_SCALE else written


def open_autoencoder(folder: Path | str) -> Autoencoder:
    """Return the autoencoder in a folder as diffusers' `save_pretrained` writes it."""
    folder = Path(folder)
    for name in ("config.json", WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(
                f"the folder of an autoencoder must hold {name}, got {folder}: pass the folder that diffusers' "
                "save_pretrained wrote, such as the `vae` of a pipeline"
            )
    try:
        config = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / 'config.json'} must be JSON: {error}") from error
    kind = config.get("_class_name")
    if kind not in _CLASSES:
        raise ValueError(
            f"an autoencoder must be one of {', '.join(_CLASSES)}, got {kind!r} in {folder / 'config.json'}: "
            "choose another model"
        )
    return Autoencoder(
        folder,
        kind,
        config.get("in_channels", 3),
        config.get("vq_embed_dim") or config.get("latent_channels", 4 if kind == "AutoencoderKL" else 3),
        2 ** (len(config.get("block_out_channels", (64,))) - 1),
        scaling_factor(kind, config.get("scaling_factor", DEFAULT_SCALE)),
        config.get("shift_factor") or 0.0,
    )
