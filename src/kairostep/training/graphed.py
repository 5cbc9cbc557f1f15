"""A computation on the GPU recorded once and replayed: one launch where an eager step has thousands."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kairostep.data import Batch
from kairostep.timesteps import Timesteps

NUM_EAGER = 3  # calls before recording: libraries choose their kernels and gradients get their place


@dataclass(frozen=True, slots=True)
class Seen:
    """A batch as it was trained on."""

    x0: Tensor  # (B, ...)
    labels: Tensor | None  # (B,)
    drawn: Timesteps
    losses: Tensor  # (B,) detached


Compute = Callable[[Batch, int], Seen]
"""`compute(batch, num_batches)`: adds the gradient of one of so many batches, and returns what was seen."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A graph, what it reads and what it writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    num_batches: int
    seen: Seen

    def fits(self, batch: Batch, num_batches: int) -> bool:
        """Return whether this batch can be put in the place of the recorded one."""
        same_labels = (self.batch.labels is None) == (batch.labels is None)
        return same_labels and self.batch.x0.shape == batch.x0.shape and self.num_batches == num_batches

    def replay(self, batch: Batch) -> Seen:
        """Return what is seen of this batch."""
        self.batch.x0.copy_(batch.x0)
        if self.batch.labels is not None and batch.labels is not None:
            self.batch.labels.copy_(batch.labels)
        self.graph.replay()
        drawn = Timesteps(self.seen.drawn.t.clone(), self.seen.drawn.weight.clone())  # the next replay writes over them
        return Seen(self.seen.x0, self.seen.labels, drawn, self.seen.losses.clone())


class Graphed:
    """Calls `compute` as a CUDA graph after a few batches; those of another shape or number are computed eagerly.

    Random numbers come from the generators as they are seeded before each call, and gradients have to stay where they
    are: zero them, do not drop them.
    """

    def __init__(self, compute: Compute) -> None:
        self.compute, self.num_calls = compute, 0
        self.recording: Recording | None = None

    def __call__(self, batch: Batch, num_batches: int) -> Seen:
        """Return what `compute` returns."""
        self.num_calls += 1
        if self.num_calls <= NUM_EAGER:
            return self._beside(batch, num_batches)
        if self.recording is None:
            self.recording = self._record(batch, num_batches)
        if not self.recording.fits(batch, num_batches):
            return self.compute(batch, num_batches)
        return self.recording.replay(batch)

    def _beside(self, batch: Batch, num_batches: int) -> Seen:
        """Compute on a stream of its own, as recording will."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            seen = self.compute(batch, num_batches)
        torch.cuda.current_stream().wait_stream(stream)
        return seen

    def _record(self, batch: Batch, num_batches: int) -> Recording:
        own = Batch(batch.x0.clone(), None if batch.labels is None else batch.labels.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            seen = self.compute(own, num_batches)
        return Recording(graph, own, num_batches, seen)
