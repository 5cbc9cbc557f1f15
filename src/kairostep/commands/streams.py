"""Output streams that never fail: work continues when the terminal closes or the disk is full."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class LossyStream:
    """A text stream whose writes never fail. It drops what cannot be written and keeps the first error.

    Args:
        stream: The stream to wrap. Other attributes are passed through.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write the text, or keep the error."""
        try:
            return self.stream.write(text)
        except OSError as error:
            self.error = self.error or error
            return len(text)

    def flush(self) -> None:
        """Flush the stream, or keep the error."""
        try:
            self.stream.flush()
        except OSError as error:
            self.error = self.error or error

    def end(self) -> None:
        """After an error, redirect the stream to the null device: the interpreter flushes it once more at exit."""
        self.flush()
        if self.error is None:
            return
        with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor needs no other
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
            self.stream.flush()


@contextmanager
def lossy_output(wanted: bool = True) -> Iterator[None]:
    """Let no print, bar or log line of a block fail, not even if stdout or stderr is closed."""
    if not wanted:
        yield
        return
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123, a stream
        before = sys.stdout, sys.stderr
        streams = LossyStream(before[0] or nowhere), LossyStream(before[1] or nowhere)
        sys.stdout, sys.stderr = streams
        try:
            yield
        finally:
            streams[0].end()
            lost = streams[0].error
            if lost is not None and lost.errno != errno.EPIPE:  # expected after `| head`
                print(f"kairostep: note: output was lost, the work was not: {lost}", file=sys.stderr)
            streams[1].end()
            sys.stdout, sys.stderr = before


@contextmanager
def silent_without_reader() -> Iterator[None]:
    """Exit without a message if nobody reads stdout any more, as in `kairostep train --help | head`."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # None if a parent closed it
                sys.stdout.flush()  # now: at exit, the interpreter would print an error
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
