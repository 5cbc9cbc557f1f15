"""What `kairostep compare` costs beside the same runs by hand: seconds of this process, in turns.

    python benchmarks/speed/compare_overhead.py [--steps 300] [--rounds 3]

Both train the same configs of digits in one process; `compare` also plans, reads what was measured, chooses and writes
its table, json, csv and page. The same command once more, which trains nothing, shows what these take by themselves.
"""

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import kairostep.cli
from kairostep.comparison.stored_plan import read_plan
from kairostep.training import Run

ARMS = "uniform,root_loss"


def by_compare(output: Path, steps: int) -> None:
    """Train two arms with two seeds."""
    line = ["compare", "digits", "--arms", ARMS, "--seeds", "2", f"--steps={steps}", "--output", str(output)]
    kairostep.cli.main(line)


def by_hand(compared: Path, output: Path) -> None:
    """Train the runs of a comparison one after the other."""
    plan = read_plan(compared)
    for seed in plan.seeds:
        for arm in plan.names:
            (run,) = plan.runs(arm, seed)
            Run(replace(run.config, output=str(output / arm / str(seed)))).train()


def seconds_of(work: Callable[[], None]) -> float:
    """Return the processor time of a call that prints nothing."""
    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        work()
    return time.process_time() - began


def main() -> None:
    """Measure in turns and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"compare": [], "by hand": [], "compare with nothing to train": []}
    with tempfile.TemporaryDirectory() as folder:
        seconds_of(lambda: by_compare(Path(folder) / "first", 5))  # loads libraries
        for number in range(arguments.rounds):
            place = Path(folder) / str(number)
            found["compare"].append(seconds_of(lambda place=place: by_compare(place / "a", arguments.steps)))
            found["by hand"].append(seconds_of(lambda place=place: by_hand(place / "a", place / "b")))
            again = seconds_of(lambda place=place: by_compare(place / "a", arguments.steps))
            found["compare with nothing to train"].append(again)
    for name, seconds in found.items():
        print(f"{name:29} {' '.join(f'{each:.2f}' for each in seconds)} s")
    fastest = {name: min(seconds) for name, seconds in found.items()}
    print(f"ratio of the fastest: {fastest['compare'] / fastest['by hand']:.4f}")
    print(f"its own work over training: {fastest['compare with nothing to train'] / fastest['by hand']:.4f}")


if __name__ == "__main__":
    main()
