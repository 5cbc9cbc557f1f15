"""Stops a training in good order on SIGINT, SIGTERM or SIGHUP."""

import signal
import sys
import time
from types import FrameType
from typing import NoReturn, Self

import torch

from kairostep.ranks import sum_over_ranks, world_size
from kairostep.stopping import has_launcher, repeats, stopping_signals
from kairostep.training.process_watch import Watch

SECONDS_BETWEEN = 2.0  # between agreements of several processes; each agreement waits for the device


class Interruption:
    """Catches SIGINT, SIGTERM and SIGHUP within a block; a second SIGINT or SIGTERM acts at once.

    Under a launcher it does not, since the launcher passes on a signal that the processes may have got too. There the
    watch ends the process if the signal comes again later.

    Args:
        device: Of this process.
        watch: Ends this process on a signal if another one hangs. Default: none does.
    """

    def __init__(self, device: torch.device, watch: Watch | None = None) -> None:
        self.device, self.watch = device, watch or Watch()
        self.signal: signal.Signals | None = None
        self.before: dict[signal.Signals, object] = {}
        self.next_agreement, self.interval, self.last = 0, 1, (0, time.monotonic())

    def __enter__(self) -> Self:
        for number in stopping_signals():
            self.before[number] = signal.signal(number, self._note)
        self.watch.hear_signals()
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.ignore_signals()
        for number, handler in self.before.items():
            ends = number == self.signal and has_launcher()  # a late copy must not end the process before it has ended
            signal.signal(number, signal.SIG_IGN if ends else handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        if not repeats(number):
            signal.signal(number, self.before[self.signal])  # type: ignore[arg-type]

    def agreed(self, step: int) -> bool:
        """Whether any process got a signal. All processes give the same answer at the same step."""
        if world_size() == 1:
            return self.signal is not None
        if step < self.next_agreement:
            return False
        now = time.monotonic()
        seconds = (now - self.last[1]) / max(1, step - self.last[0])
        signalled, total = sum_over_ranks(
            torch.tensor([float(self.signal is not None), seconds], device=self.device)
        ).tolist()
        self.last = step, now
        wanted = max(1, min(100, int(SECONDS_BETWEEN * world_size() / max(total, 1e-6))))
        self.interval = min(wanted, 2 * self.interval)  # grow slowly: the first steps are not typical
        self.next_agreement = step + self.interval
        if signalled > 0:
            self.watch.end_agreed()
        return bool(signalled > 0)

    @property
    def exit_code(self) -> int:
        """Of a process that its signal ends, or that of another process."""
        return 128 + (self.signal or signal.SIGTERM)

    def leave(self, message: str, *, speak: bool) -> NoReturn:
        """End the process with the exit code of its signal; print the message first if `speak`."""
        if speak:
            print(message, file=sys.stderr, flush=True)
        raise SystemExit(self.exit_code)
