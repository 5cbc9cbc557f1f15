"""Errors that stop a run."""


class RunError(RuntimeError):
    """A run cannot continue. The message says what was saved and what to do."""


class Diverged(RunError):
    """Loss or weights are no longer finite. A retry would diverge again."""
