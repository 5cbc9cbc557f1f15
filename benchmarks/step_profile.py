"""Where the time of a training step goes: kernels by kind, as train_speed.py --profile writes it, and as a picture.

python benchmarks/step_profile.py results/train_speed/*.json --output docs/step_profile.png
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from kairostep.analysis.picture import COLOURS, INK, SCALE, SOFT, Canvas

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
LEFT, BAR, GAP, WIDTH = 190, 20, 9, 620


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
    rows = sum(len([loop for loop in loops if loop in file["milliseconds"]]) for file in files)
    canvas = Canvas(LEFT + WIDTH + 90, 40 + rows * (BAR + GAP) + len(files) * 44 + 60)
    top = 14.0
    for file in files:
        shown = {loop: file["milliseconds"][loop] for loop in loops if loop in file["milliseconds"]}
        longest = max(kinds[WHOLE] for kinds in shown.values())
        canvas.text((LEFT, top + 10), f"{file['title']}, {file['device']}: milliseconds of a step", 14)
        top += 30
        for loop, kinds in shown.items():
            draw_bar(canvas, top, loop, kinds, WIDTH / longest)
            top += BAR + GAP
        top += 14
    for position, kind in enumerate(COLOUR):
        left, line = 30 + position % 4 * 215, top + 10 + position // 4 * 20
        fill(canvas, left, line - 6, 12, 12, COLOUR[kind])
        canvas.text((left + 18, line), kind, 11, SOFT)
    canvas.finished().save(output)


def draw_bar(canvas: Canvas, top: float, loop: str, kinds: Mapping[str, float], scale: float) -> None:
    """Draw one loop's step: its kernels, then what is left of it."""
    canvas.text((LEFT - 12, top + BAR / 2), loop, 12, INK, anchor="rm")
    left = float(LEFT)
    idle = max(0.0, kinds[WHOLE] - sum(value for kind, value in kinds.items() if kind != WHOLE))
    for kind in COLOUR:
        width = scale * (idle if kind == IDLE else kinds.get(kind, 0.0))
        fill(canvas, left, top, width, BAR, COLOUR[kind])
        left += width
    canvas.text((left + 8, top + BAR / 2), f"{kinds[WHOLE]:.1f}", 12, INK)


def fill(canvas: Canvas, left: float, top: float, width: float, height: float, colour: str) -> None:
    """Fill a rectangle."""
    corners = [left * SCALE, top * SCALE, (left + width) * SCALE, (top + height) * SCALE]
    canvas.draw.rectangle(corners, fill=colour)


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
