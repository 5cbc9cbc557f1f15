"""Comparisons that take seconds."""

from pathlib import Path

SMALL = (
    *("--network=dit", "--network.patch_size=4", "--network.hidden_size=16", "--network.depth=1"),
    *("--network.num_heads=1", "--batch_size=8", "--held_out_images=64", "--sample_steps=1", "--log_every=50"),
    *("--density_every=1000", "--checkpoint_every=50", "--workers=0"),
)


def command(output: Path, *arguments: str, arms: str = "uniform,root_loss", preset: str = "digits") -> list[str]:
    """Return what follows `kairostep` on the command line."""
    return ["compare", preset, "--arms", arms, "--output", str(output), *SMALL, *arguments]
