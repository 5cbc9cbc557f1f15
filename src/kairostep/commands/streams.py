"""Standard output and error that outlive their reader: a lost terminal or a full disk ends no work."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class LossyStream:
    """A text stream whose writes never fail: what cannot be written is dropped, and the first reason is kept.

    All else is the wrapped stream's own.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write what can be written."""
        try:
            return self.stream.write(text)
        except OSError as error:
            self.error = self.error or error
            return len(text)

    def flush(self) -> None:
        """Hand over what can be handed over."""
        try:
            self.stream.flush()
        except OSError as error:
            self.error = self.error or error

    def end(self) -> None:
        """Send what could not be written to nowhere, or the interpreter would try once more at its exit."""
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
    """Let no print, bar or log line of a block fail; a closed stdout or stderr takes everything and shows nothing."""
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
            if lost is not None and lost.errno != errno.EPIPE:  # whoever wrote `| head` knows
                print(f"kairostep: note: output was lost, the work was not: {lost}", file=sys.stderr)
            streams[1].end()
            sys.stdout, sys.stderr = before


@contextmanager
def silent_without_reader() -> Iterator[None]:
    """End in silence where nobody reads stdout any more, as in `kairostep train --help | head`."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # as it is where a parent closed it
                sys.stdout.flush()  # here and not at the interpreter's end, which would complain
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
