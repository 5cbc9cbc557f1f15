"""The U-Net of DDPM (Ho et al., NeurIPS 2020) in the papers' terms, built of diffusers' blocks."""

import math

from diffusers.models.unets.unet_2d import UNet2DModel

from kairostep.checks import below_one, count

MAX_ATTENTION = 16  # the resolution up to which there is attention unless told: beyond, it costs more than the rest


def ddpm_unet(
    sample_size: int,  # height and width of the input
    in_channels: int,  # and of the output
    *,
    channels: int = 128,
    multipliers: tuple[int, ...] = (1, 2, 2, 2),  # of channels, one per resolution
    blocks: int = 2,  # residual blocks per resolution
    attention: tuple[int, ...] | None = (16,),  # resolutions with attention; None: all up to 16
    head_channels: int | None = None,  # None: one head
    dropout: float = 0.1,
    num_classes: int | None = None,  # real classes; label num_classes is the null class
) -> UNet2DModel:
    """Return a U-Net that halves the sample between resolutions; the defaults are DDPM's for CIFAR-10.

    The middle block always has attention. LDM's for CelebA-HQ has channels=224, multipliers=(1, 2, 3, 4),
    attention=(32, 16, 8), head_channels=32.
    """
    resolutions = _resolutions(sample_size, len(multipliers))
    count("channels", channels, at_least=4, at_most=2**16, example=64)
    widths = tuple(channels * count("multipliers", m, at_most=2**10) for m in multipliers)
    attends = _attends(attention, resolutions)
    _check_heads(head_channels, [*(w for w, attend in zip(widths, attends, strict=True) if attend), widths[-1]])
    model: UNet2DModel = UNet2DModel(
        sample_size=sample_size,
        in_channels=count("in_channels", in_channels),
        out_channels=in_channels,
        freq_shift=1,  # this, sines before cosines and the one-sided padding are DDPM's
        flip_sin_to_cos=False,
        downsample_padding=0,
        down_block_types=tuple("AttnDownBlock2D" if attend else "DownBlock2D" for attend in attends),
        up_block_types=tuple("AttnUpBlock2D" if attend else "UpBlock2D" for attend in reversed(attends)),
        block_out_channels=widths,
        layers_per_block=count("blocks", blocks, at_most=2**8),
        attention_head_dim=head_channels,
        norm_num_groups=math.gcd(32, *widths),
        norm_eps=1e-6,
        dropout=below_one("dropout", dropout, example=0.1),
        num_class_embeds=None if num_classes is None else count("num_classes", num_classes) + 1,
    )
    return model


def _resolutions(sample_size: int, num_resolutions: int) -> list[int]:
    factor = 2 ** (count("len(multipliers)", num_resolutions) - 1)
    if count("sample_size", sample_size) % factor:
        at_most, padded = (sample_size & -sample_size).bit_length(), -(-sample_size // factor) * factor
        raise ValueError(
            f"sample_size must be divisible by {factor} to be halved {num_resolutions - 1} times, got {sample_size}: "
            f"pad to {padded} (sample_size={padded}), or pass at most {at_most} multiplier{'s' * (at_most > 1)}"
        )
    return [sample_size >> level for level in range(num_resolutions)]


def _attends(attention: tuple[int, ...] | None, resolutions: list[int]) -> list[bool]:
    if attention is None:
        return [resolution <= MAX_ATTENTION for resolution in resolutions]
    unknown = sorted(set(attention) - set(resolutions))
    if unknown:
        raise ValueError(
            f"attention must name resolutions of this U-Net, {resolutions}, got {unknown}: "
            "pass some of them, [] for the middle block alone, or None (null) for all up to 16"
        )
    return [resolution in attention for resolution in resolutions]


def _check_heads(head_channels: int | None, widths: list[int]) -> None:
    if head_channels is not None and any(width % count("head_channels", head_channels) for width in widths):
        raise ValueError(
            f"head_channels must divide the channels where there is attention, {sorted(set(widths))}, "
            f"got {head_channels}: pass for instance head_channels={math.gcd(32, *widths)}"
        )
