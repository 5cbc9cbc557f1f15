"""Rows of a data set on the device, for measurements."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kairostep.data import Dataset
from kairostep.diffusion.conditions import class_condition


@dataclass(frozen=True, slots=True)
class Rows:
    """Clean samples and, for a model with classes, their labels."""

    x0: Tensor  # (N, ...)
    labels: Tensor | None = None  # (N,)

    @classmethod
    def of(cls, dataset: Dataset, num: int, device: torch.device, *, classes: bool) -> "Rows":
        """Return `num` rows spread evenly over a data set, or all if there are fewer. None is mirrored."""
        samples, labels = dataset.read_some(num)
        return cls(dataset.to_x0(samples.to(device), None), labels.to(device) if classes else None)

    def cond(self, index: Tensor) -> dict[str, Tensor]:
        """Return the keyword arguments of the network for these rows."""
        return class_condition(self.labels, index)
