"""Checks of what the transformers are built of and called with."""

import torch
from torch import Tensor


def divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raise ValueError unless `divisor` divides `value`."""
    if value % divisor:
        raise ValueError(
            f"{name} must be divisible by {divisor_name}, got {value} and {divisor}: "
            f"pass for instance {name}={-(-value // divisor) * divisor}"
        )


def time_per_row(timestep: Tensor | float | None, sample: Tensor) -> Tensor:
    """Return the times (B,) given as a number, a tensor () or a tensor (B,), on the device of the sample (B, ...)."""
    time = None if timestep is None else torch.as_tensor(timestep, device=sample.device)
    if time is None or time.shape not in ((), (1,), sample.shape[:1]):
        shape = None if time is None else tuple(time.shape)
        raise ValueError(
            f"timestep must be a number or one time per row, ({len(sample)},), got {shape}: "
            "pass for instance time.flatten()"
        )
    return time.expand(len(sample))  # (B,)


def check_labels(class_labels: Tensor | None, num_classes: int | None, sample: Tensor) -> None:
    """Raise unless there are labels (B,) exactly if there are classes; to check their range would synchronise."""
    if not num_classes:
        if class_labels is not None:
            raise ValueError(
                f"class_labels must be None for a model without classes, got {tuple(class_labels.shape)}: "
                "leave them out, or build the model with num_classes"
            )
        return
    if class_labels is None or class_labels.shape != sample.shape[:1]:
        shape = None if class_labels is None else tuple(class_labels.shape)
        raise ValueError(
            f"class_labels must be one whole number per row, ({len(sample)},), for a model of {num_classes} classes, "
            f"got {shape}: pass the labels, {num_classes} where there is none"
        )
