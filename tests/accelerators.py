"""What accelerate keeps for a whole process, dropped: tests with settings of their own start afresh."""

from accelerate.state import AcceleratorState, GradientState


def forget_accelerators() -> None:
    """Drop it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
