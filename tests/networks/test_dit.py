"""DiT: how it starts, who can load it, its errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel
from torch import nn
from torch.testing import assert_close

from kairostep.networks import DiT2DModel, dit

TINY = {"sample_size": 8, "in_channels": 3, "hidden_size": 32, "depth": 2, "num_heads": 4}


def moved(num_classes: int | None) -> DiT2DModel:
    torch.manual_seed(0)
    model = dit(**TINY, num_classes=num_classes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def x_t(num_rows: int = 3) -> torch.Tensor:
    return torch.randn(num_rows, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_it_predicts_zero_and_its_blocks_are_the_identity_at_the_start() -> None:
    model = dit(**TINY, num_classes=5)
    time, labels = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 5])
    assert not model(x_t(), time, class_labels=labels).sample.any()
    h = torch.randn(3, 16, 32)
    assert_close(model.transformer_blocks[0](h, timestep=time, class_labels=labels), h, rtol=0, atol=0)


@pytest.mark.parametrize("num_classes", [None, 5])
def test_diffusers_own_class_loads_it(num_classes: int | None, tmp_path: Path) -> None:
    model = moved(num_classes)
    model.save_pretrained(tmp_path)
    theirs = DiTTransformer2DModel.from_pretrained(tmp_path)
    assert type(theirs) is DiTTransformer2DModel
    time = torch.tensor([1.0, 20.5, 300.0])
    labels = torch.tensor([0, 2, 5]) if num_classes else torch.zeros(3, dtype=torch.long)
    ours = model(x_t(), time, class_labels=labels if num_classes else None).sample
    assert_close(ours, theirs(x_t(), time, class_labels=labels).sample, rtol=0, atol=0)


def test_it_loads_what_diffusers_own_class_saved(tmp_path: Path) -> None:
    theirs = DiTTransformer2DModel(4, 8, 3, None, 2, sample_size=8, num_embeds_ada_norm=5).eval()
    theirs.save_pretrained(tmp_path)
    time, labels = torch.tensor([1, 20, 300]), torch.tensor([0, 2, 5])
    ours = DiT2DModel.from_pretrained(tmp_path)
    assert_close(
        ours(x_t(), time, class_labels=labels).sample, theirs(x_t(), time, class_labels=labels).sample, rtol=0, atol=0
    )


def test_labels_are_not_dropped_after_loading(tmp_path: Path) -> None:
    moved(5).save_pretrained(tmp_path)
    model = DiT2DModel.from_pretrained(tmp_path)
    rows, labels = x_t(1).expand(200, -1, -1, -1), torch.zeros(200, dtype=torch.long)
    expected = model(rows, 10, class_labels=labels).sample
    assert_close(model.train()(rows, 10, class_labels=labels).sample, expected)


def test_config_names_what_it_was_built_of() -> None:
    config = DiT2DModel.from_config(moved(5).config).config
    assert (config.sample_size, config.in_channels, config.patch_size, config.num_layers) == (8, 3, 2, 2)
    assert config.out_channels == config.in_channels
    assert (config.num_attention_heads, config.attention_head_dim, config.num_embeds_ada_norm) == (4, 8, 5)


def test_rows_of_the_label_table_are_the_classes_and_the_null_class() -> None:
    for num_classes, num_rows in ((None, 1), (1, 2), (5, 6)):
        tables = [m for m in dit(**TINY, num_classes=num_classes).modules() if isinstance(m, nn.Embedding)]
        assert [table.num_embeddings for table in tables] == [num_rows] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, "hidden_size must be divisible by num_heads, got 30 and 4: .*hidden_size=32"),
        ({"hidden_size": 6, "num_heads": 3}, "hidden_size must be divisible by 4.*got 6: .*hidden_size=24"),
        ({"sample_size": 9}, "sample_size must be divisible by patch_size, got 9 and 2: .*sample_size=10"),
        ({"depth": 0}, "depth must be"),
        ({"in_channels": 0}, "in_channels must be"),
    ],
)
def test_arguments_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dit(**{**TINY, **changes})


@pytest.mark.parametrize("timestep", [None, torch.zeros(3, 1), torch.zeros(2)])
def test_times_are_one_per_row(timestep: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"timestep must be a number or one time per row, \(3,\), got"):
        dit(**TINY)(x_t(), timestep)
