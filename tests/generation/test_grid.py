"""A grid shows every pixel of every image."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kairostep.generation import save_grid


def images_of(num: int, channels: int, height: int, width: int) -> torch.Tensor:
    levels = torch.randint(256, (num, channels, height, width), generator=torch.Generator().manual_seed(0))
    return levels / 127.5 - 1


@pytest.mark.parametrize("num", [1, 2, 3, 5, 9, 64, 65])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("margin", [0, 1, 3])
def test_every_pixel_is_in_its_place(num: int, channels: int, margin: int, tmp_path: Path) -> None:
    images, height, width = images_of(num, channels, 5, 7), 5, 7
    path = tmp_path / "new" / "folder" / "grid.png"
    save_grid(images, path, margin=margin)
    columns = math.ceil(math.sqrt(num))
    rows = math.ceil(num / columns)
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        found = np.asarray(picture.convert("RGB"))
    shown = (rows * (height + margin) - margin, columns * (width + margin) - margin)
    factor = max(1, round(256 / shown[1]))
    assert found.shape == (shown[0] * factor, shown[1] * factor, 3)
    assert found.shape[1] >= 128
    small = found[::factor, ::factor]
    assert (small.repeat(factor, 0).repeat(factor, 1) == found).all()
    seen = np.zeros(small.shape[:2], bool)
    for number, image in enumerate(images):
        top, left = number // columns * (height + margin), number % columns * (width + margin)
        expected = ((image + 1) * 127.5).round().to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0).numpy()
        assert (small[top : top + height, left : left + width] == expected).all()
        seen[top : top + height, left : left + width] = True
    assert (small[~seen] == 255).all()


def test_only_the_picture_is_left_and_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "grid.png"
    save_grid(torch.full((4, 1, 8, 8), -1.0), path)
    save_grid(torch.full((4, 1, 8, 8), 1.0), path)
    assert list(tmp_path.iterdir()) == [path]
    with Image.open(path) as picture:
        assert np.asarray(picture).min() == 255


def test_values_out_of_range_are_clipped_and_what_is_no_number_is_black(tmp_path: Path) -> None:
    images = torch.tensor([-7.0, 7.0, math.nan, math.inf]).view(4, 1, 1, 1).expand(4, 1, 8, 8)
    save_grid(images.to(torch.bfloat16).requires_grad_(), tmp_path / "grid.png", margin=0)
    with Image.open(tmp_path / "grid.png") as picture:
        found = np.asarray(picture)[..., 0]
    half = len(found) // 2
    corners = found[:half, :half], found[:half, half:], found[half:, :half], found[half:, half:]
    assert [set(np.unique(corner).tolist()) for corner in corners] == [{0}, {255}, {0}, {255}]
