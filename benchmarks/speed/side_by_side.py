"""Measuring two ways of doing the same work in one run: turns in random order, ratios paired within rounds."""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from kairostep.training.cuda_graphs import NUM_EAGER

Turn = Callable[[], None]
TURNS_TO_SETTLE = NUM_EAGER + 1  # of one probe each: after those that are eager, probes are recorded


def take_turns(
    turns: Mapping[str, Turn], rounds: int, device: torch.device, *, warm_up: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of each one's turns, in another order in every round; the first so many only warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    order = list(turns)
    for round_ in range(-warm_up, rounds):
        random.Random(round_).shuffle(order)
        for name in order:
            taken = seconds_of(turns[name], device)
            if round_ >= 0:
                seconds[name].append(taken)
    return seconds


def seconds_of(turn: Turn, device: torch.device) -> float:
    """Return the time of one turn, until the device is done with it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    turn()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ratio_of_speeds(base: list[float], other: list[float], digits: int = 3) -> str:
    """Return the geometric mean of base / other over rounds and its 95 % interval, which one round does not give."""
    logs = [math.log(b / o) for b, o in zip(base, other, strict=True)]
    if len(logs) == 1:
        return f"{math.exp(logs[0]):.{digits}f} (one round)"
    mean, half = statistics.fmean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    value, low, high = (f"{math.exp(log):.{digits}f}" for log in (mean, mean - half, mean + half))
    return f"{value} ({low}, {high})"
