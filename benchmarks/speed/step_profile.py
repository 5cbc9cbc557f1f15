"""Where the time of a training step goes: kernels by kind, as train_speed.py --profile writes it, and as a picture.

python benchmarks/speed/step_profile.py results/train_speed/cifar10-{small,ddpm}-128.json --output docs/step_profile.png
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kairostep.analysis.picture import COLOURS, INK, new_figure, style

KINDS: dict[str, tuple[str, ...]] = {  # the first whose words occur in a kernel's name
    "attention": ("flash", "fmha", "attention", "softmax", "sdpa"),
    "optimizer, clipping, average": ("multi_tensor", "fusedadam", "fused_adam", "lpnorm"),
    "convolution, matrix product": ("conv", "gemm", "cudnn", "xmma", "cutlass", "nvjet", "wgrad", "dgrad", "implicit"),
    "compiled, fused": ("triton",),
    "normalisation": ("groupnorm", "group_norm", "rowwisemoments", "computefused", "gammabeta", "computeinternal"),
    "copies, casts, layout": ("copy", "memcpy", "memset", "nchwtonhwc", "nhwctonchw", "transpose", "cat"),
    "reduction": ("reduce",),
    "elementwise": ("elementwise", "vectorized", "unrolled"),
}
OTHER, IDLE, WHOLE = "other", "waiting for the host", "whole step"
COLOUR = dict(zip([*KINDS, OTHER], [*COLOURS, "#98a2b3"], strict=True)) | {IDLE: "#eceef2"}


def kind_of(kernel: str) -> str:
    """Return what kind of kernel has this name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), OTHER)


def kernel_seconds(turn: Callable[[], None], num_steps: int) -> dict[str, float]:
    """Return the seconds of a step in which the GPU runs kernels, by kind."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        turn()
        torch.cuda.synchronize()
    seconds: dict[str, float] = {}
    for event in profile.key_averages():
        if event.self_device_time_total:
            kind = kind_of(event.key)
            seconds[kind] = seconds.get(kind, 0.0) + event.self_device_time_total / 1e6 / num_steps
    return seconds


def write_profile(path: Path, title: str, device: str, profiles: Mapping[str, Mapping[str, float]]) -> None:
    """Write the milliseconds of a step of each loop."""
    steps = {loop: {kind: round(1e3 * s, 3) for kind, s in kinds.items()} for loop, kinds in profiles.items()}
    path.write_text(json.dumps({"title": title, "device": device, "milliseconds": steps}, indent=1) + "\n")


def draw(paths: Sequence[Path], loops: Sequence[str], output: Path) -> None:
    """Draw a bar for each loop of each file, as long as its step takes."""
    files = [json.loads(path.read_text()) for path in paths]
    shown = [{loop: file["milliseconds"][loop] for loop in loops if loop in file["milliseconds"]} for file in files]
    figure = new_figure(9, 0.9 + sum(0.6 + 0.29 * len(bars) for bars in shown))
    grid = figure.subplots(len(files), squeeze=False, height_ratios=[2 + len(bars) for bars in shown])
    for axes, file, bars in zip(grid[:, 0], files, shown, strict=True):
        draw_bars(axes, bars)
        style(axes, f"{file['title']}, {file['device']}: milliseconds of a step", "", "")
        axes.grid(visible=False)
        axes.tick_params(length=0, labelcolor=INK)
        axes.set_xticks([])
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(output)


def draw_bars(axes: Any, bars: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the steps of loops: their kernels, then what is left of them, and the milliseconds of all."""
    left = [0.0] * len(bars)
    for kind, colour in COLOUR.items():
        widths = [idle_of(kinds) if kind == IDLE else kinds.get(kind, 0.0) for kinds in bars.values()]
        drawn = axes.barh(list(bars), widths, left=left, color=colour, height=0.7, label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.bar_label(drawn, [f"{kinds[WHOLE]:.1f}" for kinds in bars.values()], padding=4, color=INK)
    axes.set_xlim(0, 1.06 * max(left))
    axes.invert_yaxis()


def idle_of(kinds: Mapping[str, float]) -> float:
    """Return the milliseconds in which no kernel runs."""
    return max(0.0, kinds[WHOLE] - sum(value for kind, value in kinds.items() if kind != WHOLE))


def main() -> None:
    """Draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", type=Path, nargs="+")
    parser.add_argument("--loops", default="diffusers;bare;bare, compiled;plain;graph;compile", help="separated by ;")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    draw(arguments.profiles, arguments.loops.split(";"), arguments.output)


if __name__ == "__main__":
    main()
