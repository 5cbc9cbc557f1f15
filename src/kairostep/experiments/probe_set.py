"""Rows that never change, asked for their losses now and then."""

from typing import Any

import torch
from torch import Tensor, nn

from kairostep.data import Dataset
from kairostep.diffusion import Objective


class ProbeSet:
    """`probe_set(rows, t)` gives the losses (N,) of rows (N,) of a fixed sample of the training set at t (N,).

    A set with fewer than `num_rows` images has them repeated. Labels are those that training has, none dropped.
    """

    def __init__(
        self, objective: Objective, model: nn.Module, dataset: Dataset, num_rows: int, *, with_classes: bool
    ) -> None:
        self.objective, self.model = objective, model
        samples, labels = dataset.read_some(num_rows)
        rows = torch.arange(num_rows) % len(samples)
        self.x0, self.labels = dataset.to_x0(samples, None)[rows], labels[rows] if with_classes else None

    def __call__(self, rows: Tensor, t: Tensor) -> Tensor:
        """Return one loss per row."""
        if self.x0.device != t.device:  # once: the model has moved since the set was read
            self.x0 = self.x0.to(t.device)
            self.labels = None if self.labels is None else self.labels.to(t.device)
        cond: dict[str, Any] = {} if self.labels is None else {"class_labels": self.labels[rows]}
        return self.objective(self.model.forward, self.x0[rows], t, **cond)  # not compiled: a shape of its own
