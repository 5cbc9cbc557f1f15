"""Samplers and variance reduction where the best prediction is known: excess error on Gaussian mixtures, many seeds.

    python benchmarks/mixtures/exact_mixture.py [--arms uniform root-loss ...] [--settings linear-8] [--output FOLDER]
    python benchmarks/mixtures/exact_mixture.py --list

Data are mixtures of 8 Gaussians in 2, 8 and 32 dimensions; x_t of the linear, the cosine and the flow process. An MLP
of three hidden layers of 64 predicts the noise, for flow the velocity; batch 64, Adam at 1e-3, averaged weights. What
counts is the excess over the exact optimum, with no irreducible part, so that differences of a percent show. All seeds
of an arm are one batched network; arms share initial weights, data, noise, the random numbers behind the times, and
what they are measured on. Every network evaluation is charged, probes included; the oracle's alone are free.

What the ratios say is explained under the table. OUTPUT gets table.md, outcomes.json and curves.png.
"""

import argparse
import json
import shlex
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch
from mixture_arms import ARMS, BASELINE, DEFAULT
from mixture_picture import draw_curves
from mixture_report import HEADER, LEGEND, Outcomes, as_record, as_text, rows_by_setting, rows_of
from mixture_training import BATCH, Outcome, train

SETTINGS = ("linear-2", "linear-8", "linear-32", "cosine-8", "flow-2", "flow-8", "flow-32")
FURTHER_SETTINGS = ("cosine-2", "cosine-32")  # when asked for


def prepare_process() -> None:
    """Give this process one thread; the samplers of all seeds at once are not contiguous, which is no news."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    warnings.filterwarnings("ignore", message=r"torch.searchsorted\(\): boundary tensor is non-contiguous")


def train_named(setting: str, arm: str, num_seeds: int, num_steps: int) -> Outcome:
    """Return the outcome of the arm of this name."""
    return train(setting, ARMS[arm], num_seeds, num_steps)


def train_all(arguments: argparse.Namespace) -> Outcomes:
    """Return the outcomes of all arms in all settings, worked off by several processes, the longest runs first."""
    jobs = [(setting, arm) for setting in arguments.settings for arm in arguments.arms]
    jobs.sort(key=lambda job: ("stable" in job[1], int(job[0].split("-")[1])), reverse=True)
    found: dict[tuple[str, str], Outcome] = {}
    with ProcessPoolExecutor(arguments.processes, get_context("spawn"), prepare_process) as pool:
        waiting = {pool.submit(train_named, *job, arguments.seeds, arguments.steps): job for job in jobs}
        for number, done in enumerate(as_completed(waiting), 1):
            found[waiting[done]] = done.result()
            setting, arm = waiting[done]
            print(f"{number}/{len(jobs)} {setting}, {arm}: {done.result().seconds:.1f} s", file=sys.stderr, flush=True)
    return {setting: {arm: found[setting, arm] for arm in arguments.arms} for setting in arguments.settings}


def report(outcomes: Outcomes, arguments: argparse.Namespace, seconds: float) -> str:
    """Write table, outcomes and picture, and return what is to be read."""
    arms = arguments.arms
    title = f"{arguments.steps} steps of batch {BATCH}, {arguments.seeds} seeds, {len(outcomes)} settings"
    by_setting = as_text(["cost, noise", *outcomes], rows_by_setting(outcomes, arms, BASELINE))
    made = f"`{shlex.join(['python', *sys.argv])}`, torch {torch.__version__}, {arguments.processes} processes"
    parts = [
        title,
        as_text(HEADER, rows_of(outcomes, arms, BASELINE)),
        LEGEND,
        by_setting,
        f"{made}, {seconds:.0f} seconds in all.",
    ]
    text = "\n\n".join(parts) + "\n"
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "table.md").write_text(text)
    raw = {setting: {arm: asdict(outcome) for arm, outcome in by_arm.items()} for setting, by_arm in outcomes.items()}
    record = {"command": made, "seconds": seconds, "ratios": as_record(outcomes, arms, BASELINE), "outcomes": raw}
    (arguments.output / "outcomes.json").write_text(json.dumps(rounded(record)))
    draw_curves(outcomes, arms, BASELINE, arguments.output / "curves.png")
    return text


def rounded(value: object) -> object:
    """Return the record with five digits of every fraction, which is what the file needs."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if value < 1 else round(value, 3)
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def parse() -> argparse.Namespace:
    """Return the arguments, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(DEFAULT), choices=list(ARMS), metavar="ARM")
    settings = SETTINGS + FURTHER_SETTINGS
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=settings, metavar="SETTING")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("results/exact_mixture"))
    parser.add_argument("--list", action="store_true", help="show all arms and stop")
    arguments = parser.parse_args()
    if BASELINE not in arguments.arms:
        arguments.arms = [BASELINE, *arguments.arms]
    if (arguments.output / "table.md").exists() and not arguments.list:
        parser.error(f"results are never written over, and {arguments.output} has some: pass another --output")
    if arguments.seeds < 2 or arguments.steps < 10:
        parser.error(f"at least 2 seeds and 10 steps are needed, got {arguments.seeds} and {arguments.steps}")
    return arguments


def main() -> None:
    """Train the arms and print the table."""
    arguments = parse()
    if arguments.list:
        print("\n".join(f"{name}{' (default)' if name in DEFAULT else ''}" for name in ARMS))
        return
    start = time.perf_counter()
    outcomes = train_all(arguments)
    print(report(outcomes, arguments, time.perf_counter() - start))


if __name__ == "__main__":
    main()
