"""What a network is told besides x_t and time."""

from torch import Tensor


def class_condition(labels: Tensor | None, rows: Tensor | None = None) -> dict[str, Tensor]:
    """Return the keyword arguments that tell a network its classes.

    Args:
        labels: Classes (B,), None for a network without classes.
        rows: Which of them (N,), by default all.
    """
    if labels is None:
        return {}
    return {"class_labels": labels if rows is None else labels[rows]}
