"""Errors that stop a run."""


class RunError(RuntimeError):
    """A run cannot continue. The message says what was saved and what to do."""


class Diverged(RunError):
    """Loss or weights are no longer finite. A retry would diverge again."""


class LostProcess(RunError):
    """Another process of the run ended, failed or hangs.

    Args:
        message: Which one, what is lost, and the command to go on.
        speaks: Whether this process is the one of its machine that tells the user.
    """

    def __init__(self, message: str, *, speaks: bool) -> None:
        super().__init__(message)
        self.speaks = speaks
