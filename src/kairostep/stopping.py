"""The signals that ask a command to stop."""

import os
import signal

SECONDS_OF_ONE_EVENT = 2.0  # the same signal again within this time may be the launcher's copy of the first


def stopping_signals() -> list[signal.Signals]:
    """Return SIGINT, SIGTERM and, if the platform has it and it is not ignored (nohup), SIGHUP of a lost terminal."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def is_lost_terminal(number: int) -> bool:
    """Whether this is SIGHUP, which both the terminal and the shell send."""
    return number == getattr(signal, "SIGHUP", None)


def has_launcher() -> bool:
    """Whether a launcher started this process. It passes on a signal, which may have reached this process as well."""
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"


def is_copy(number: int, now: float, first: int, then: float) -> bool:
    """Whether a signal that comes now may be of the same event as the first, which came then."""
    return is_lost_terminal(number) or (number == first and now - then < SECONDS_OF_ONE_EVENT)


def repeats(number: int) -> bool:
    """Whether one event may send this signal twice."""
    return is_lost_terminal(number) or has_launcher()
