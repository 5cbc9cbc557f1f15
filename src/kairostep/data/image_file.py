"""Reads one image file: upright, cropped to the middle square, resized."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairostep.data.extras import require

ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
_MODES = {1: "L", 3: "RGB"}
_GAP = 3.0  # shrink cheaply down to three times the size, then with the filter: no visible difference
_WITHOUT_RANGE = ("I", "F")


def why_unfit(path: Path, size: int) -> str | None:
    """Return why an image cannot be used, by its header alone, or None."""
    pillow = _pillow("Image")
    try:
        with pillow.open(path) as image:
            _check(image, size)
    except Exception as error:  # readers raise whatever the libraries below them do
        return _reason(error)
    return None


def read_image(path: Path, size: int, channels: int) -> NDArray[np.uint8] | str:
    """Return pixels (channels, size, size), or the reason why they cannot be read."""
    pillow, operations = _pillow("Image"), _pillow("ImageOps")
    try:
        with pillow.open(path) as image:
            _check(image, size)
            image.draft(None, (int(_GAP * size), int(_GAP * size)))  # a JPEG decodes straight to a smaller size
            square = _flatten(_middle_square(operations.exif_transpose(image)), _MODES[channels])
        pixels = np.asarray(square.resize((size, size), pillow.Resampling.LANCZOS, reducing_gap=_GAP))
    except Exception as error:  # readers raise whatever the libraries below them do
        return _reason(error)
    return np.array(pixels.reshape(size, size, channels).transpose(2, 0, 1), order="C")  # a copy: Pillow's is read-only


def _pillow(module: str) -> Any:
    return require(f"PIL.{module}", "a folder of images")


def _check(image: Any, size: int) -> None:
    if min(image.size) < size:
        raise ValueError(f"its shorter side of {min(image.size)} pixels is below size={size}")
    if image.mode in _WITHOUT_RANGE:
        raise ValueError(f"its pixels of mode {image.mode} have no fixed range")


def _reason(error: Exception) -> str:
    if isinstance(error, _pillow("Image").UnidentifiedImageError):  # its own message repeats the path
        return "not an image, or of an unknown format"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _middle_square(image: Any) -> Any:
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side))


def _flatten(image: Any, mode: str) -> Any:
    """Return the image in this mode, with white behind transparent pixels."""
    if image.mode.startswith("I;16"):  # Pillow would clip instead of scaling
        image = _pillow("Image").fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        white = _pillow("Image").new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return image.convert(mode)
