"""DDPM's U-Net: its published sizes, where it attends, its groups, its errors."""

from typing import Any

import pytest
import torch

from kairostep.networks import ddpm_unet

LDM = {"channels": 224, "multipliers": (1, 2, 3, 4), "attention": (32, 16, 8), "head_channels": 32}


def num_parameters(sample_size: int, in_channels: int, **arguments: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in ddpm_unet(sample_size, in_channels, **arguments).parameters())


def test_the_published_models_have_their_published_sizes() -> None:
    assert num_parameters(32, 3) == 35_746_307  # DDPM for CIFAR-10
    assert num_parameters(64, 3, **LDM) == 274_056_163  # LDM for CelebA-HQ


def test_attention_is_at_the_given_resolutions_and_in_the_middle() -> None:
    with torch.device("meta"):
        model = ddpm_unet(32, 3)
        without = ddpm_unet(32, 3, attention=())
    assert model.config.down_block_types == ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D")
    assert model.config.up_block_types == ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D")
    assert set(without.config.down_block_types) == {"DownBlock2D"}
    assert without.mid_block.attentions[0] is not None


@pytest.mark.parametrize(("head_channels", "num_heads"), [(None, 1), (32, 8)])
def test_heads_have_the_given_channels(head_channels: int | None, num_heads: int) -> None:
    with torch.device("meta"):
        model = ddpm_unet(32, 3, head_channels=head_channels)
    assert model.down_blocks[1].attentions[0].heads == num_heads
    assert model.mid_block.attentions[0].heads == num_heads


@pytest.mark.parametrize(("channels", "num_groups"), [(64, 32), (48, 16), (20, 4), (9, 1)])
def test_groups_are_32_or_the_most_that_divide_the_channels(channels: int, num_groups: int) -> None:
    model = ddpm_unet(8, 1, channels=channels, multipliers=(1, 3), blocks=1, attention=(4,))
    assert model.config.norm_num_groups == num_groups
    assert model(torch.zeros(1, 1, 8, 8), torch.tensor([0.5])).sample.shape == (1, 1, 8, 8)


def test_dropout_acts_in_training_alone() -> None:
    model = ddpm_unet(8, 1, channels=32, multipliers=(1,), attention=(), dropout=0.5)
    x_t, time = torch.ones(1, 1, 8, 8), torch.tensor([3])
    assert (model.train()(x_t, time).sample - model(x_t, time).sample).abs().amax() > 1e-4
    assert torch.equal(model.eval()(x_t, time).sample, model(x_t, time).sample)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"sample_size": 28},
            r"by 8 to be halved 3 times, got 28: pad to 32 \(sample_size=32\), or pass at most 3 mul",
        ),
        ({"sample_size": 7}, r"got 7: pad to 8 \(sample_size=8\), or pass at most 1 multiplier$"),
        ({"multipliers": ()}, r"len\(multipliers\) must be a whole number of at least 1, got 0"),
        ({"multipliers": (1, 0)}, "multipliers must be a whole number of at least 1, got 0"),
        ({"attention": (16, 7)}, r"attention must name resolutions of this U-Net, \[32, 16, 8, 4\], got \[7\]"),
        ({"head_channels": 48}, r"head_channels must divide .*\[256\], got 48: pass for instance head_channels=32"),
        ({"channels": 2}, "channels must be a whole number of at least 4, got 2"),
        ({"in_channels": 0}, "in_channels must be"),
        ({"blocks": 0}, "blocks must be"),
        ({"dropout": 1.0}, "dropout must be"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ddpm_unet(**{"sample_size": 32, "in_channels": 3, **arguments})
