"""Watches the processes of a run: if one ends, fails or hangs, the others say which and end, in a stated time.

Each process has a thread for this, since its main thread may wait in C++ for the lost one, where it cannot even react
to a signal. The thread sends a heartbeat to process 0, and process 0 to all.
"""

import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch

from kairostep.progress_meter import duration
from kairostep.ranks import is_lost_rank, world_size
from kairostep.stopping import is_copy, stopping_signals
from kairostep.training.process_links import Link, Links, meet
from kairostep.training.process_losses import QUIET, Loss, Silence, reason_of, speaks
from kairostep.training.run_errors import LostProcess

log = logging.getLogger("kairostep")

SECONDS_TO_END = 10.0  # for the main thread to end by itself after the loss of a process, before it is ended
SECONDS_TO_REACT = 0.5  # for the main thread to react to a second signal, unless it is stuck
SECONDS_TO_LEARN = 3.0  # for the main thread to learn who is lost, after a collective has failed
SECONDS_TO_TELL = 2.0  # for the others to read the last words of a process
SUSPICIOUS_SILENCE = 5.0  # seconds after which a process that was sent a signal no longer waits for another one
BUSY_FACTOR = 30  # a process that writes may be silent, and write or take a step, so many times as long as another


class Watch:
    """The watch of a run with one process: there is nothing to watch."""

    @contextmanager
    def guard(self) -> Iterator[None]:
        """If the block fails, tell the others why. If it fails due to a lost process, raise `LostProcess`."""
        yield

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Let this process be silent for long within the block, in which it writes and the others wait."""
        yield

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Tell the others how long this process has been in the block, one training step, if it is not the first."""
        yield

    def hear_signals(self) -> None:
        """From now on, end this process on a signal if another one hangs."""

    def ignore_signals(self) -> None:
        """Undo `hear_signals`."""

    def end_agreed(self) -> None:
        """All processes have agreed to end on a signal, so that nothing is left to do here."""

    def close(self) -> None:
        """End the watch: this process has finished in good order."""


def watch_processes(timeout: float, device: torch.device, where: Callable[[], str]) -> Watch:
    """Start the watch of a run. All its processes call this at once.

    Args:
        timeout: Seconds that a process may be silent. 0: no watch.
        device: Of this process.
        where: Returns what is lost and how to go on. A thread calls it, and it must not wait for anything.
    """
    return ProcessWatch(meet(device), timeout, where) if timeout > 0 and world_size() > 1 else Watch()


class ProcessWatch(Watch):
    """The watch of one of several processes. See `watch_processes`."""

    def __init__(self, links: Links, timeout: float, where: Callable[[], str]) -> None:
        self.links, self.timeout, self.where = links, timeout, where
        self.interval, self.next_beat, self.started = min(1.0, timeout / 5), 0.0, time.monotonic()
        self.work: tuple[str, float] | None = None  # what this process writes, and since when
        self.num_steps, self.step_began = 0, float("inf")
        self.silence = QUIET  # the longest one that process 0 knows of
        self.loss: Loss | None = None
        self.deadline = float("inf")  # when the watch ends this process, after a loss
        self.signals: list[tuple[int, float]] = []  # number and time
        self.agreed = False  # to end on a signal
        self.last_words: dict[str, Any] | None = None
        self.loss_known, self.beat_sent, self.all_told = (threading.Event() for _ in range(3))
        self.closing, self.wakeup_before = False, -1
        self.thread = threading.Thread(target=self._run, name="process watch", daemon=True)
        self.thread.start()
        own = weakref.ref(self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: forget(own()))

    # For the main thread

    @contextmanager
    def guard(self) -> Iterator[None]:
        """If the block fails, tell the others why. If it fails due to a lost process, raise `LostProcess`."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, SystemExit) and (self.agreed or not error.code):
                raise
            if is_lost_rank(error) and self.loss_known.wait(SECONDS_TO_LEARN):
                lost = LostProcess(self._message(), speaks=self.loss is None or speaks(self.loss.rank))
                self.close()
                raise lost from error
            self._tell_end(reason_of(error))
            self.close()
            raise

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Let this process be silent for long within the block, in which it writes and the others wait."""
        self.work = what, time.monotonic()
        self.beat_sent.clear()
        self.next_beat = 0.0
        self.links.wake()
        self.beat_sent.wait(self.interval)  # before the block, which may hold the interpreter's lock
        try:
            yield
        finally:
            self.work = None

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Tell the others how long this process has been in the block, one training step, if it is not the first."""
        self.step_began = time.monotonic() if self.num_steps else float("inf")  # the first may compile
        yield
        self.num_steps, self.step_began = self.num_steps + 1, float("inf")

    def hear_signals(self) -> None:
        """From now on, end this process on a signal if another one hangs."""
        self.wakeup_before = signal.set_wakeup_fd(self.links.waker.fileno(), warn_on_full_buffer=False)

    def ignore_signals(self) -> None:
        """Undo `hear_signals`."""
        signal.set_wakeup_fd(self.wakeup_before)

    def end_agreed(self) -> None:
        """All processes have agreed to end on a signal, so that nothing is left to do here."""
        self.agreed = True
        self.signals.clear()

    def close(self) -> None:
        """End the watch: this process has finished in good order."""
        if self.closing:
            return
        self._tell_end(None)
        self.closing = True
        self.links.wake()
        self.thread.join(2 * SECONDS_TO_TELL)
        self.links.close()

    def _tell_end(self, reason: str | None) -> None:
        """Tell the others that this process ends, and wait until they know."""
        self.all_told.clear()
        self.last_words = {"end": reason}
        self.links.wake()
        self.all_told.wait(SECONDS_TO_TELL)

    # The thread

    def _run(self) -> None:
        before = time.monotonic()
        try:
            while not self.closing:
                before = self._look(before)
        except Exception as error:  # a fault of the watch must not end the run
            log.warning("processes are no longer watched: %r", error)
            self.links.send({"end": None})
            self.all_told.set()

    def _look(self, before: float) -> float:
        """Take what has come since the time `before`, and decide. Return the time."""
        messages, signals = self.links.wait(self.interval / 2)
        now = time.monotonic()
        for link, message in messages:
            self._take(link, message)
        for number in () if self.agreed else signals:
            if number in stopping_signals() and not (self.signals and is_copy(number, now, *self.signals[0])):
                self.signals.append((number, now))
        if now - before > self.timeout / 2:  # this process was stopped: what the others sent is still to be read
            self.started, self.step_began = now, max(self.step_began, now)
            for link in self.links.known:
                link.heard = now
        self._beat(now)
        self._speak_last_words()
        self._judge(now)
        self._end_process(now)
        return now

    def _take(self, link: Link, message: dict[str, Any] | None) -> None:
        """Act on a message, None for the end of a link."""
        if message is None:
            self._lose(link, "ended without a word, as if killed")
            return
        link.name = message.get("name", link.name)
        link.acknowledged = link.acknowledged or "acknowledged" in message
        if "beat" in message:
            link.busy, link.busy_seconds, link.step_seconds = message["beat"]
            self.silence = Silence(*message["silence"])
        if "lost" in message:
            self._conclude(Loss(*message["lost"]))
        if "end" in message:
            link.send({"acknowledged": True})
            self.links.forget(link)
            if message["end"] is not None:
                self._lose(link, f"ended: {message['end']}")

    def _beat(self, now: float) -> None:
        if now >= self.next_beat:
            work = (self.work[0], now - self.work[1]) if self.work else (None, 0.0)
            beat = (*work, max(0.0, now - self.step_began))
            self.links.send({"beat": beat, "silence": self._longest_silence(now)})
            self.next_beat = now + self.interval
            self.beat_sent.set()

    def _longest_silence(self, now: float) -> Silence:
        return max([Silence(now - link.heard, link.rank or 0, link.name) for link in self.links.known], default=QUIET)

    def _speak_last_words(self) -> None:
        if self.last_words is None:
            return
        if self.last_words:
            for link in self.links.known:
                link.acknowledged = False
            self.links.send(self.last_words)
            self.last_words = {}  # sent
        if all(link.acknowledged for link in self.links.known):
            self.last_words = None
            self.all_told.set()

    def _judge(self, now: float) -> None:
        """Find a process that has been silent, or has written, for too long."""
        if self.links.absent and now - self.started > self.timeout:
            self._conclude(Loss(min(self.links.absent), "", f"has not been heard of for {duration(self.timeout)}"))
        for link in tuple(self.links.known):
            limit, silence = self.timeout * (BUSY_FACTOR if link.busy else 1), now - link.heard
            if silence > limit:
                doing = f" while {link.busy}" if link.busy else ""
                self._lose(link, f"has been silent for {duration(silence)}{doing}: it hangs, or cannot be reached")
            elif link.busy and link.busy_seconds > limit:
                self._lose(link, f"has been {link.busy} for {duration(link.busy_seconds)}: its disk hangs, or is slow")
            elif link.step_seconds > BUSY_FACTOR * self.timeout:
                stuck = "it, or a process that it waits for, is stuck in its data, its disk or its GPU"
                self._lose(link, f"has been at one step for {duration(link.step_seconds)}: {stuck}")

    def _lose(self, link: Link, what: str) -> None:
        self._conclude(Loss(link.rank or 0, link.name, what))

    def _conclude(self, loss: Loss) -> None:
        """Take the first loss for the cause, and tell the others."""
        if self.loss is None:
            self.loss, self.deadline = loss, time.monotonic() + SECONDS_TO_END
            self.links.send({"lost": (loss.rank, loss.name, loss.what)})
            self.loss_known.set()

    def _message(self) -> str:
        return f"{self.loss}; {self.where()}"

    def _end_process(self, now: float) -> None:
        """End this process if another is lost, or if a signal came and another hangs: the main thread is stuck."""
        if self.work is not None and now - self.work[1] < BUSY_FACTOR * self.timeout:
            return
        if self.loss is not None and now > self.deadline:
            self._leave(1, self._message(), self.loss.rank)
        if not self.signals:
            return
        name, silence = signal.Signals(self.signals[0][0]).name, max(self._longest_silence(now), self.silence)
        hangs = silence.seconds > SUSPICIOUS_SILENCE
        why = f", since {silence} has been silent for {duration(silence.seconds)}" if hangs else ""
        if len(self.signals) > 1 and now > self.signals[1][1] + SECONDS_TO_REACT:
            self._leave(128 + self.signals[0][0], f"{name} came twice, nothing is saved{why}", silence.rank)
        elif hangs and now > self.signals[0][1] + SECONDS_TO_END:
            self._leave(128 + self.signals[0][0], f"{name} came, but nothing can be saved{why}", silence.rank)

    def _leave(self, code: int, message: str, lost: int) -> NoReturn:
        self.links.send({"end": f"left, since {self.loss}" if self.loss else message})
        if speaks(lost):
            after = "" if self.loss else f"; {self.where()}"
            print(f"kairostep: error: {message}{after}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)


def forget(watch: ProcessWatch | None) -> None:
    """Leave a watch to the parent process: a worker that reads data must not pass on its own signals or hold a link."""
    if watch is not None and not watch.closing:
        with suppress(ValueError):  # not the main thread
            signal.set_wakeup_fd(-1)
        watch.closing = True
        watch.links.close()
