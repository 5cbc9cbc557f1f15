"""Images as the latents of an autoencoder, encoded once and kept on disk."""

import hashlib
import json
import shutil
import uuid
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairostep.checks import count
from kairostep.counters import RowRandom
from kairostep.data.autoencoder import Autoencoder, open_autoencoder
from kairostep.data.dataset import Dataset
from kairostep.data.streaming import stream
from kairostep.progress_meter import ProgressMeter

_FORMAT = 1  # raise it when files of an earlier version must not be read any more


class LatentSet(Dataset):
    """Latents of a set of images, read from the folder that `encode_latents` filled.

    With mirror images, row i + N is the mirror image of row i, and both are part of the set.
    """

    flip = False  # mirror images are rows of their own

    def __init__(self, folder: Path | str, autoencoder: Path | str) -> None:
        self.folder = Path(folder)
        self.autoencoder = open_autoencoder(autoencoder)
        description = json.loads((self.folder / "set.json").read_text())
        self.shape = tuple(description["shape"])
        self.num_classes = int(description["num_classes"])
        self._digest = str(description["digest"])
        self._moments = np.load(self.folder / "moments.npy", mmap_mode="r")  # (N, c or 2c, h, w) float16
        self._labels = np.load(self.folder / "labels.npy", mmap_mode="r")  # (N,) int64

    def __reduce__(self) -> tuple[Any, ...]:
        return LatentSet, (self.folder, self.autoencoder.folder)  # workers open the files, they are not sent them

    def __len__(self) -> int:
        return len(self._moments)

    def read(self, row: int) -> tuple[Tensor, int]:
        """Return the moments of one latent, (2c, h, w) or (c, h, w) float16, and its label."""
        return torch.from_numpy(np.array(self._moments[row])), int(self._labels[row])

    def read_all(self) -> tuple[Tensor, Tensor]:
        """Return the moments of all latents and their labels (N,)."""
        return torch.from_numpy(np.array(self._moments)), torch.from_numpy(np.array(self._labels))

    def to_x0(self, stored: Tensor, random: RowRandom | None) -> Tensor:
        """Return scaled latents (B, c, h, w): drawn with random noise, or their means without it."""
        stored = stored.to(torch.float32)
        latent = stored[:, : self.shape[0]]  # (B, c, h, w), the mean
        if self.autoencoder.has_std and random is not None:
            latent = latent + stored[:, self.shape[0] :] * random.normal(self.shape)
        return ((latent - self.autoencoder.shift_factor) * self.autoencoder.scaling_factor).contiguous()

    @torch.no_grad()
    def decode(self, x0: Tensor) -> Tensor:
        """Return the images (B, C, H, W) in [-1, 1] of scaled latents (B, c, h, w), on their device."""
        model = self._model.to(x0.device)
        return self.autoencoder.decode(model, x0.to(torch.float32))

    @cached_property
    def _model(self) -> Any:
        return self.autoencoder.load(torch.device("cpu"))

    def fingerprint(self) -> str:
        """Return a SHA-256 of the images' fingerprint, the autoencoder and how the two were combined."""
        return self._digest


def encode_latents(
    dataset: Dataset,
    autoencoder_path: Path | str,
    cache_dir: Path | str,
    device: torch.device | str = "cpu",
    batch_size: int = 32,
    *,
    num_workers: int = 0,
) -> LatentSet:
    """Return the latents of a set of images, encoded now or found in the cache.

    Args:
        dataset: The images. If it has `flip`, mirror images are encoded too.
        autoencoder_path: A folder with an AutoencoderKL or a VQModel of diffusers, in safetensors.
        cache_dir: Where the folder latents-<digest> goes. It has a temporary name until it is complete.
        device: Where images are encoded.
        batch_size: Of the encoding. Memory does not depend on the number of images.
        num_workers: Processes that read the images.
    """
    count("batch_size", batch_size, at_most=10**6, example=64)
    count("num_workers", num_workers, at_least=0)
    autoencoder = open_autoencoder(autoencoder_path)
    description = _describe(dataset, autoencoder)
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    target = Path(cache_dir) / f"latents-{digest[:16]}"
    if not target.is_dir():
        partial = target.with_name(f"{target.name}.partial-{uuid.uuid4().hex}")
        partial.mkdir(parents=True)
        try:
            _encode_into(partial, dataset, autoencoder, torch.device(device), batch_size, num_workers)
            (partial / "set.json").write_text(json.dumps({**description, "digest": digest}, indent=2))
            _move(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return LatentSet(target, autoencoder.folder)


def _describe(dataset: Dataset, autoencoder: Autoencoder) -> dict[str, Any]:
    """Return everything that the latents depend on."""
    return {
        "format": _FORMAT,
        "images": dataset.fingerprint(),
        "autoencoder": autoencoder.digest(),
        "mirrored": dataset.flip,
        "shape": autoencoder.latent_shape(dataset.shape),
        "num_classes": dataset.num_classes,
    }


def _move(partial: Path, target: Path) -> None:
    """Rename a complete folder, unless another process was faster."""
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():
            raise


@torch.no_grad()
def _encode_into(
    folder: Path, dataset: Dataset, autoencoder: Autoencoder, device: torch.device, batch_size: int, num_workers: int
) -> None:
    model = autoencoder.load(device)
    num_images, copies = len(dataset), 2 if dataset.flip else 1
    channels, *sides = autoencoder.latent_shape(dataset.shape)
    shape = (num_images * copies, channels * (2 if autoencoder.has_std else 1), *sides)
    moments = np.lib.format.open_memmap(folder / "moments.npy", mode="w+", dtype=np.float16, shape=shape)
    labels = np.lib.format.open_memmap(folder / "labels.npy", mode="w+", dtype=np.int64, shape=shape[:1])
    rows = (list(range(start, min(start + batch_size, num_images))) for start in range(0, num_images, batch_size))
    start = 0
    with ProgressMeter(num_images, "encoding", unit="image") as meter:
        for stored, batch_labels in stream(dataset, rows, device=device, num_workers=num_workers):
            x0 = dataset.to_x0(stored, None)
            for copy, images in enumerate((x0, x0.flip(-1))[:copies]):
                at = slice(copy * num_images + start, copy * num_images + start + len(x0))
                moments[at] = _to_half(autoencoder.encode(model, images))
                labels[at] = batch_labels.cpu().numpy()
            start += len(x0)
            meter.update(len(x0))
    moments.flush()
    labels.flush()


def _to_half(moments: Tensor) -> Any:
    """Return moments as float16 on the host; raise if they do not fit."""
    half = moments.to(torch.float16).cpu()
    if not bool(half.isfinite().all()):
        raise ValueError(
            "moments of latents must be finite and below 65504, the largest float16, got others: "
            "check the autoencoder's weights"
        )
    return half.numpy()
