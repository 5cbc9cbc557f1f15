"""The whole system in minutes: digits trained with several samplers, same seeds and budget, side by side.

    python examples/demo.py [--steps 500] [--output runs/demo]

Ends with a table (held-out loss, network evaluations, seconds), a picture of samples and a report to open in a browser.
Run again, it goes on where it was stopped; once finished, it shows the same table.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from kairostep.experiments import Component, Config, preset
from kairostep.reports import comparison_table, write_report
from kairostep.training import Run
from PIL import Image, ImageDraw

ARMS: dict[str, dict[str, Component]] = {
    "uniform": {"sampler": Component("uniform")},
    "min_snr": {"sampler": Component("uniform"), "weighting": Component("min_snr")},
    "root_loss": {"sampler": Component("root_loss")},
    "adaptive": {"sampler": Component("adaptive")},
}


def train(config: Config) -> None:
    run = Run(config)
    print(f"\n{run.description}", flush=True)
    run.train()


def draw_samples(directories: list[Path], path: Path) -> None:
    """Put the last sample grid of each run beside the others, its name above it."""
    grids = [Image.open(max((directory / "samples").glob("*.png"))).convert("RGB") for directory in directories]
    gap, title = 12, 20
    width = sum(grid.width + gap for grid in grids) + gap
    picture = Image.new("RGB", (width, max(grid.height for grid in grids) + title + gap), "white")
    left = gap
    for directory, grid in zip(directories, grids, strict=True):
        ImageDraw.Draw(picture).text((left, 4), directory.name, fill="black")
        picture.paste(grid, (left, title))
        left += grid.width + gap
    picture.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    arguments = parser.parse_args()
    directories = [arguments.output / name for name in ARMS]
    for directory, parts in zip(directories, ARMS.values(), strict=True):
        config = replace(preset("digits"), steps=arguments.steps, evaluate_every=50, output=str(directory))
        train(replace(config, **parts))
    picture = arguments.output / "samples.png"
    draw_samples(directories, picture)
    print(f"\n{comparison_table(directories)}\n")
    print("held-out loss: squared error of the predicted noise on digits never trained on, all times alike, ± standard")
    print(
        "error; the noise is the same for all runs. evaluations: of the network, in training + by the sampler's probes."
    )
    print("A few minutes on one seed show that everything works, not which sampler is best.")
    report = write_report(directories, arguments.output / "report.html")
    print(f"\nLook at {report} in a browser, at {picture}, and at one run's files in {directories[0]}")


if __name__ == "__main__":
    main()
