"""U-ViT: its published sizes, its long skips, its tokens, its errors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from kairostep.networks import UViT2DModel
from kairostep.networks.uvit import UViTBlock

TINY = {"sample_size": 8, "in_channels": 3, "hidden_size": 32, "depth": 4, "num_heads": 4}


def tiny(**changes: Any) -> UViT2DModel:
    torch.manual_seed(0)
    return UViT2DModel(**{**TINY, **changes}).eval()


def x_t(num_rows: int = 2) -> Tensor:
    return torch.randn(num_rows, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("arguments", "millions"),
    [
        ({"num_classes": 1000}, 501),  # H/2 for ImageNet's latents
        ({"in_channels": 3, "hidden_size": 512, "depth": 12, "num_heads": 8}, 44),  # S/2 for CIFAR-10
    ],
)
def test_the_published_models_have_their_published_sizes(arguments: dict[str, Any], millions: int) -> None:
    with torch.device("meta"):
        model = UViT2DModel(**arguments)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.01)


def test_each_long_skip_matters() -> None:
    model = tiny()
    expected = model(x_t(), 10).sample
    assert len(model.long_skips) == 2
    for long_skip in model.long_skips:
        weight = long_skip.weight.detach().clone()
        with torch.no_grad():
            long_skip.weight[:, 32:] = 0  # the half that the earlier block enters by
            assert (model(x_t(), 10).sample - expected).abs().amax() > 1e-5
            long_skip.weight.copy_(weight)
    assert_close(model(x_t(), 10).sample, expected, rtol=0, atol=0)


def test_the_first_block_is_skipped_to_the_last() -> None:
    model = tiny()
    entered: list[Tensor] = []
    left: list[Tensor] = []
    for block in model.in_blocks:
        block.register_forward_hook(lambda _module, _args, output: left.append(output))
    for long_skip in model.long_skips:
        long_skip.register_forward_pre_hook(lambda _module, args: entered.append(args[0][:, :, 32:]))
    model(x_t(), 10)
    assert_close(entered, left[::-1], rtol=0, atol=0)


def test_patches_come_back_where_they_were() -> None:
    model = tiny(final_conv=False, patch_size=4)
    pixels = F.pixel_unshuffle(x_t(), 4).flatten(2).transpose(1, 2)  # (B, HW / p^2, C p^2)
    tokens = torch.cat([torch.zeros(2, 1, 48), pixels], dim=1)
    assert_close(model._image(tokens), x_t(), rtol=0, atol=0)


def test_a_block_is_torchs_own_transformer_layer() -> None:
    block = UViTBlock(32, 4, 4.0, qkv_bias=True, dropout=0.0)
    layer = nn.TransformerEncoderLayer(32, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
    pairs = [
        (block.attention.qkv.weight, layer.self_attn.in_proj_weight),
        (block.attention.qkv.bias, layer.self_attn.in_proj_bias),
        *zip(block.attention.out.parameters(), layer.self_attn.out_proj.parameters(), strict=True),
        *zip(block.mlp.parameters(), [*layer.linear1.parameters(), *layer.linear2.parameters()], strict=True),
    ]
    for ours, theirs in pairs:
        nn.init.normal_(theirs, std=0.2)
        ours.data.copy_(theirs.data)
    h = torch.randn(2, 5, 32)
    assert_close(block(h), layer(h), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("enabled", [True, False])
def test_checkpointed_blocks_run_again_in_the_backward_pass(enabled: bool) -> None:
    model = tiny()
    runs: list[int] = []
    for index, block in enumerate([*model.in_blocks, model.mid_block, *model.out_blocks]):
        block.register_forward_pre_hook(lambda _module, _args, index=index: runs.append(index))
    if enabled:
        model.enable_gradient_checkpointing()
    model(x_t(), 10).sample.sum().backward()
    assert runs == [0, 1, 2, 3, 4] + [4, 3, 2, 1, 0] * enabled


@pytest.mark.parametrize("patch_size", [1, 2, 4])
@pytest.mark.parametrize("final_conv", [True, False])
def test_patches_and_channels_may_be_of_any_size(patch_size: int, final_conv: bool) -> None:
    model = tiny(patch_size=patch_size, out_channels=6, final_conv=final_conv, qkv_bias=True, mlp_ratio=1.5)
    assert model(x_t(), torch.tensor([1.5, 999.0])).sample.shape == (2, 6, 8, 8)


def test_only_the_positions_tell_the_patches_apart() -> None:
    model = tiny(final_conv=False)
    turned = [1, 0, 3, 2]
    order = [4 * turned[i] + turned[j] for i in range(4) for j in range(4)]  # of the 4x4 patches

    def permute(image: Tensor) -> Tensor:
        tokens = F.pixel_unshuffle(image, 2).flatten(2)[:, :, order]
        return F.pixel_shuffle(tokens.unflatten(2, (4, 4)), 2)

    assert (model(permute(x_t()), 10).sample - permute(model(x_t(), 10).sample)).abs().amax() > 1e-4
    nn.init.zeros_(model.position)
    assert_close(model(permute(x_t()), 10).sample, permute(model(x_t(), 10).sample), rtol=1e-4, atol=1e-5)


def test_weights_start_small_and_biases_at_zero() -> None:
    model = tiny(num_classes=3, hidden_size=64)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            expected = torch.ones_like if name.endswith("weight") else torch.zeros_like
            assert_close(parameter.detach(), expected(parameter))
        elif name.endswith("bias"):
            assert not parameter.any()
        else:
            spread = 5 / (2 * parameter.numel()) ** 0.5  # five standard errors of a standard deviation
            assert parameter.std().item() == pytest.approx(0.02, rel=spread), name


def test_dropout_acts_in_training_alone() -> None:
    model = tiny(dropout=0.5)
    assert_close(model(x_t(), 1).sample, model(x_t(), 1).sample, rtol=0, atol=0)
    model.train()
    assert (model(x_t(), 1).sample - model(x_t(), 1).sample).abs().amax() > 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, r"hidden_size must be divisible by num_heads, got 30 and 4: .*hidden_size=32"),
        ({"hidden_size": 9, "num_heads": 3}, "hidden_size must be even.*got 9: .*hidden_size=18"),
        ({"sample_size": 9}, r"sample_size must be divisible by patch_size, got 9 and 2: .*sample_size=10"),
        ({"depth": 5}, "depth must be even.*got 5: pass depth=4 or 6"),
        ({"depth": 0}, "depth must be a whole number of at least 2"),
        ({"in_channels": 0}, "in_channels must be"),
        ({"out_channels": 0}, "out_channels must be"),
        ({"mlp_ratio": 0.0}, "mlp_ratio must be"),
        ({"dropout": 1.0}, "dropout must be"),
    ],
)
def test_arguments_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (2, 3, 8, 16), (2, 4, 8, 8), (3, 8, 8)])
def test_samples_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"sample must be \(B, 3, 8, 8\), got .*: .*build the model for its size"):
        tiny()(torch.zeros(shape), 0)


@pytest.mark.parametrize("shape", [(2, 1), (3,)])
def test_times_and_labels_are_one_per_row(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"timestep must be a number or one time per row, \(2,\), got"):
        tiny()(x_t(), torch.zeros(shape))
    with pytest.raises(ValueError, match=r"class_labels must be one whole number per row, \(2,\).*4 where there is"):
        tiny(num_classes=4)(x_t(), 0, torch.zeros(shape, dtype=torch.long))
