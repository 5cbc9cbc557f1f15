"""Shows the progress of a loop: a bar on a terminal, plain lines elsewhere (nohup, SLURM, CI)."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TextIO

from torch import Tensor, nn

UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))  # each with the next smaller unit
FIRST_LINE, EVERY = 10.0, 60.0  # seconds before the first line, and between lines


class ProgressMeter:
    """Counts what a loop has done and shows it.

        with ProgressMeter(len(dataset), "encoding", unit="image") as meter:
            for batch in batches:
                ...
                meter.update(len(batch))

    Args:
        total: How much there is to do.
        what: Names the loop.
        unit: What is counted, in the singular.
        done: How much was done before.
        shown: Whether to show anything; False in all processes but the first.
        file: Where plain lines go. Default: stderr.
    """

    def __init__(
        self, total: int, what: str, *, unit: str, done: int = 0, shown: bool = True, file: TextIO | None = None
    ) -> None:
        self.total, self.what, self.unit, self.file = total, what, unit, file
        self.done = float(done)
        self.bar: Any = None
        if shown and on_terminal():
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=done, desc=what or None, unit=unit, leave=False)
        self.plain = shown and self.bar is None
        self.next_line = time.monotonic() + FIRST_LINE
        self.restart()

    def restart(self) -> None:
        """Measure the rate from here on, since the first rounds of a loop are slower."""
        self.started, self.done_before = time.monotonic(), self.done

    def update(self, amount: float = 1) -> None:
        """Count progress, and write a line if one is due."""
        self.advance(amount)
        if self.due:
            self.tell(self.line())

    def advance(self, amount: float = 1) -> None:
        """Count progress."""
        self.done = min(self.done + amount, self.total)  # several processes are shown as multiples of the first
        if self.bar is not None:
            self.bar.update(int(self.done + 1e-6) - self.bar.n)

    @property
    def due(self) -> bool:
        """Whether it is time for the next line."""
        return self.plain and time.monotonic() >= self.next_line

    @property
    def seconds_each(self) -> float | None:
        """Seconds of one unit, None before the first is done."""
        done = self.done - self.done_before
        return (time.monotonic() - self.started) / done if done > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the rest takes, None if unknown."""
        return None if self.seconds_each is None else self.seconds_each * max(0.0, self.total - self.done)

    @property
    def left(self) -> str:
        """The time left, as text to append; empty if unknown."""
        return "" if self.seconds_left is None else f", {duration(self.seconds_left)} left"

    def line(self) -> str:
        """Return a line on the progress, the rate and the time left."""
        rate = f", {1 / self.seconds_each:.3g} {self.unit}s/s" if self.seconds_each else ""
        return f"{self.what}: {int(self.done)} of {self.total} {self.unit}s{rate}{self.left}"

    def tell(self, text: str) -> None:
        """Write a line, above the bar if there is one."""
        self.next_line = time.monotonic() + EVERY
        if self.bar is not None:
            self.bar.write(text, file=self.file or sys.stderr)
        elif self.plain:
            print(text, file=self.file or sys.stderr, flush=True)

    @contextmanager
    def watching(self, model: Callable[..., Any], amount: Callable[[int], float] = float) -> Iterator[None]:
        """Count the calls of a network within a block.

        Args:
            model: The network. A plain function is not counted, since it has no hooks.
            amount: Progress of a call as a function of its number of rows.
        """

        def count_call(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
            self.update(amount(len(inputs[0])))

        handle = model.register_forward_hook(count_call) if isinstance(model, nn.Module) else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()


def on_terminal() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: 45 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 1:
        return f"{seconds:.1g} s"
    whole = round(seconds)
    for size, unit, part, part_unit in UNITS:
        if whole >= size:
            number, rest = divmod(whole, size)
            return f"{number} {unit}" + (f" {rest // part} {part_unit}" if rest >= part else "")
    return f"{whole} s"
