"""Counts the seconds of training, without those of evaluating and saving."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Counts seconds while it runs. On a GPU it waits for queued work before it reads the time.

    Args:
        device: Whose work is timed.
        seconds_before: Seconds that the run had trained before it was resumed.
    """

    def __init__(self, device: torch.device, seconds_before: float = 0.0) -> None:
        self.device, self.seconds_before = device, seconds_before
        self.started: float | None = None

    def start(self) -> None:
        """Start counting."""
        self.started = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds so far."""
        if self.started is None:
            return self.seconds_before
        self.synchronize()
        return self.seconds_before + time.perf_counter() - self.started

    def synchronize(self) -> None:
        """Wait until the GPU has finished its queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the seconds of this block."""
        was_running = self.started is not None
        self.seconds_before, self.started = self.seconds(), None
        try:
            yield
        finally:
            self.synchronize()
            if was_running:
                self.start()
