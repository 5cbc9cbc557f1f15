"""The signals that ask a command to stop."""

import signal


def stopping_signals() -> list[signal.Signals]:
    """Return SIGINT, SIGTERM and, if the platform has it and it is not ignored (nohup), SIGHUP of a lost terminal."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def repeats(number: int) -> bool:
    """Whether one event may send this signal twice. On a lost terminal, both the terminal and the shell send SIGHUP."""
    return number == getattr(signal, "SIGHUP", None)
