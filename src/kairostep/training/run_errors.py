"""Why a run cannot go on."""


class RunError(RuntimeError):
    """A run that cannot go on; the message says what is left and what to do."""


class Diverged(RunError):
    """A run whose loss or weights are no longer finite: it would get there again."""
