"""Pictures of samples."""

import math
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from kairostep.files import whole_file

MIN_WIDTH = 256  # small images are enlarged until a grid is about as wide


def to_bytes(images: Tensor) -> Tensor:
    """Return images in [-1, 1] as uint8; what is not a number becomes 0."""
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).nan_to_num(0).to(torch.uint8)


def save_grid(images: Tensor, path: Path, *, margin: int = 1) -> None:
    """Write images (N, C, H, W) in [-1, 1], of one or three channels, as one PNG, in rows of about as many."""
    num, channels, height, width = images.shape
    columns = math.ceil(math.sqrt(num))
    pixels = F.pad(to_bytes(images.detach()).cpu(), (0, margin, 0, margin), value=255)
    blank = pixels.new_full((columns * math.ceil(num / columns) - num, *pixels.shape[1:]), 255)
    cells = torch.cat([pixels, blank]).view(-1, columns, channels, height + margin, width + margin)
    grid = cells.permute(0, 3, 1, 4, 2).reshape(-1, columns * (width + margin), channels)  # H, W, C
    grid = grid[: len(grid) - margin, : grid.shape[1] - margin]
    picture = Image.fromarray(grid.expand(-1, -1, 3).contiguous().numpy())
    factor = max(1, round(MIN_WIDTH / picture.width))
    picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        picture.save(temporary, format="PNG")
