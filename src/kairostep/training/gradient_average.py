"""Averages gradients over processes, always in the same order."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kairostep.ranks import world_size

BUCKET_BYTES = 25 * 2**20  # sent at once: large enough to use the network well, small enough to start early


@dataclass
class Bucket:
    """Parameters whose gradients are sent together."""

    parameters: list[nn.Parameter]
    num_waiting: int = 0  # gradients that this backward pass has not made yet
    flat: Tensor | None = None  # all gradients in one piece
    views: list[Tensor] = field(default_factory=list)  # of `flat`, one per parameter
    work: Any = None  # the exchange under way

    def send(self) -> None:
        """Start to sum the gradients over processes."""
        if self.flat is None:
            sizes = [p.numel() for p in self.parameters]
            self.flat = self.parameters[0].new_zeros(sum(sizes))
            starts = itertools.accumulate(sizes, initial=0)
            self.views = [
                self.flat.as_strided(p.shape, p.stride(), start)  # in the parameter's own memory layout
                for p, start in zip(self.parameters, starts, strict=False)
            ]
        pairs = list(zip(self.views, self.parameters, strict=True))
        for view, parameter in pairs:
            if parameter.grad is None:  # not part of the loss, here and on the other processes
                view.zero_()
        present = [(view, p.grad) for view, p in pairs if p.grad is not None]
        if present:
            torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        self.work = dist.all_reduce(self.flat, async_op=True)

    def receive(self, num_processes: int) -> None:
        """Wait for the sums, and make their means the gradients."""
        assert self.flat is not None
        self.work.wait()
        self.work = None
        self.flat.div_(num_processes)
        present = [(p.grad, view) for view, p in zip(self.views, self.parameters, strict=True) if p.grad is not None]
        if present:
            torch._foreach_copy_([grad for grad, _ in present], [view for _, view in present])


class GradientAverage:
    """Makes the gradients of all processes their mean.

        with average.overlapped():  # optional: sends gradients while the backward pass makes others
            loss.backward()
        average.finish()

    Buckets follow from the order of the parameters alone, so that a resumed run sums in the order of the run before it.
    DDP does not: it makes its buckets anew after the first backward pass. With one process nothing happens.

    BatchNorm keeps the statistics of the first process's rows, as under DDP.
    """

    def __init__(self, model: nn.Module) -> None:
        self.num_processes = world_size()
        trained = [p for p in model.parameters() if p.requires_grad]
        self.buckets = make_buckets(trained) if self.num_processes > 1 else []
        self.running = running_statistics(model) if self.num_processes > 1 else []
        self.num_sent, self.is_open = 0, False
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook_of(bucket))  # type: ignore[no-untyped-call]

    def _hook_of(self, bucket: Bucket) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            if self.is_open:
                bucket.num_waiting -= 1
                self._send_ready()

        return note

    def _send_ready(self) -> None:
        """Send the buckets that are complete, in their order: all processes have to send in the same one."""
        while self.num_sent < len(self.buckets) and self.buckets[self.num_sent].num_waiting == 0:
            self.buckets[self.num_sent].send()
            self.num_sent += 1

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Send gradients as soon as the backward pass in this block has made them."""
        for bucket in self.buckets:
            bucket.num_waiting = len(bucket.parameters)
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def finish(self) -> None:
        """Send what has not been sent, and wait until every gradient is the mean over processes."""
        for bucket in self.buckets[self.num_sent :]:
            bucket.send()
        for bucket in self.buckets:
            bucket.receive(self.num_processes)
        self.num_sent = 0
        for value in self.running:
            dist.broadcast(value, 0)


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[Bucket]:
    """Return the parameters in buckets, the last ones first: a backward pass makes their gradients first."""
    buckets: list[Bucket] = []
    num_bytes = 0
    for parameter in reversed(parameters):
        same = bool(buckets) and buckets[-1].parameters[0].dtype == parameter.dtype
        if not same or num_bytes + parameter.nbytes > BUCKET_BYTES:
            buckets.append(Bucket([]))
            num_bytes = 0
        buckets[-1].parameters.append(parameter)
        num_bytes += parameter.nbytes
    return buckets


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the buffers that a forward pass changes: those of BatchNorm."""
    return [value for module in model.modules() if isinstance(module, _BatchNorm) for value in module.buffers()]


@torch.no_grad()
def share_start(model: nn.Module) -> None:
    """Give all processes the weights and buffers of the first one."""
    if world_size() > 1:
        for value in (*model.parameters(), *model.buffers()):
            dist.broadcast(value.detach(), 0)
