"""The signals that ask a command to stop."""

import signal


def stopping_signals() -> list[signal.Signals]:
    """Return SIGINT, SIGTERM and, unless it is ignored (nohup) or the platform has none, a lost terminal's SIGHUP."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def repeats(number: int) -> bool:
    """Whether one cause may send this signal twice: a lost terminal sends SIGHUP itself, and so does its shell."""
    return number == getattr(signal, "SIGHUP", None)
