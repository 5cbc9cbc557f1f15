"""Time spent training, apart from time spent looking at it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Counts seconds while it runs; on a GPU, once its work is done.

    Args:
        seconds_before: Seconds that earlier parts of the same run took.
    """

    def __init__(self, device: torch.device, seconds_before: float = 0.0) -> None:
        self.device, self.seconds_before = device, seconds_before
        self.started: float | None = None

    def start(self) -> None:
        """Run."""
        self.started = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds so far."""
        if self.started is None:
            return self.seconds_before
        self.synchronize()
        return self.seconds_before + time.perf_counter() - self.started

    def synchronize(self) -> None:
        """Wait until a GPU has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still for a block."""
        was_running = self.started is not None
        self.seconds_before, self.started = self.seconds(), None
        try:
            yield
        finally:
            self.synchronize()
            if was_running:
                self.start()
