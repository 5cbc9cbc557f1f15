"""A trainer that records its steps as CUDA graphs and replays them: one launch where an eager step has thousands."""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

from kairostep.data import Batch
from kairostep.timesteps import Timesteps
from kairostep.training.trainer import SeenBatch, Trainer

NUM_EAGER = 3  # eager calls before recording, in which libraries choose kernels and gradients are allocated
MAX_RECORDINGS = 4  # one for each shape of inputs; further shapes run eagerly

log = logging.getLogger("kairostep")

Values = tuple[Any, ...]
"""Tensors, None and plain values. A plain value is a constant of the recording."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A CUDA graph, with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Values
    outputs: Values

    def replay(self, inputs: Values) -> Values:
        """Copy the inputs in, run the graph and return its outputs."""
        for own, given in zip(self.inputs, inputs, strict=True):
            if isinstance(own, Tensor):
                own.copy_(given)
        self.graph.replay()
        return clone_tensors(self.outputs)  # the next replay overwrites them


class Graphs:
    """The memory pool and stream that all graphs of one trainer share.

    Eager calls use the same stream: torch only reuses freed memory on the stream that freed it.
    """

    everywhere: ClassVar["WeakSet[Graphs]"] = WeakSet()

    def __init__(self, device: torch.device) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]
        self.all: list[Replayed] = []
        self.everywhere.add(self)

    def wrap(self, name: str, compute: Callable[..., Values]) -> "Replayed":
        """Return a callable that computes the same, and records and replays it."""
        self.all.append(Replayed(name, compute, self))
        return self.all[-1]

    @contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record a block. After a failure, restore the streams and generators; torch keeps the memory it took.

        The capture is thread-local, since the thread of a data loader may pin memory at the same time.
        """
        random, random_here = torch.get_rng_state(), torch.cuda.get_rng_state(self.index)
        current = torch.cuda.current_stream(self.index)
        options: Any = {"stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.device(self.index), torch.cuda.graph(graph, self.pool, **options):
                yield
        except RuntimeError:
            torch.cuda.set_stream(current)  # torch leaves the capture stream current if the capture cannot end
            self._recover()
            torch.set_rng_state(random)
            torch.cuda.set_rng_state(random_here, self.index)
            raise

    def _recover(self) -> None:
        """Make the device usable after a failed recording. This drops all recordings made on it."""
        with suppress(RuntimeError):  # raised if torch has ended it; if nobody does, torch frees no cached memory
            end_allocation(self.index, self.pool)
        for graphs in [graphs for graphs in self.everywhere if graphs.index == self.index]:
            graphs.pool = torch.cuda.graph_pool_handle()  # a pool cannot be reused once its graphs are gone
            for replayed in graphs.all:
                replayed.recordings.clear()
        # After a failed capture the generator still believes it is capturing: give it a fresh state
        torch.cuda.default_generators[self.index].graphsafe_set_state(fresh_generator_state(self.index))


class Replayed:
    """Calls `compute`. After a few calls it replays a CUDA graph instead, one graph for each shape of inputs.

    A replay draws from the global generators as they are seeded before the call. Tensors that `compute` writes to must
    keep their address, so gradients are zeroed, not dropped. If `compute` cannot be recorded, it runs eagerly and a
    warning says why.
    """

    def __init__(self, name: str, compute: Callable[..., Values], graphs: Graphs) -> None:
        self.name, self.compute, self.graphs = name, compute, graphs
        self.num_calls: dict[Hashable, int] = {}
        self.recordings: dict[Hashable, Recording] = {}
        self.can_record = True

    def __call__(self, *inputs: Any) -> Values:
        """Return what `compute` returns. A replay returns copies of the tensors."""
        key = tuple(recording_key(value) for value in inputs)
        if key not in self.recordings and self._worth_recording(key):
            self._record(key, inputs)
        if key in self.recordings:
            return self.recordings[key].replay(inputs)
        return self._compute_eagerly(inputs)

    def _worth_recording(self, key: Hashable) -> bool:
        self.num_calls[key] = self.num_calls.get(key, 0) + 1
        return self.can_record and self.num_calls[key] > NUM_EAGER and len(self.recordings) < MAX_RECORDINGS

    def _record(self, key: Hashable, inputs: Values) -> None:
        own, graph = clone_tensors(inputs), torch.cuda.CUDAGraph()
        try:
            with self.graphs.recording(graph):
                outputs = self.compute(*own)
        except RuntimeError as error:
            self.can_record = False
            cause = error.__context__ or error
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            log.warning("%s cannot be recorded as a CUDA graph and goes on without, slower: %s", self.name, reason)
        else:
            self.recordings[key] = Recording(graph, own, outputs)

    def _compute_eagerly(self, inputs: Values) -> Values:
        """Compute without a graph, on the stream that recordings use."""
        stream, current = self.graphs.stream, torch.cuda.current_stream(self.graphs.index)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                return self.compute(*inputs)
        finally:
            current.wait_stream(stream)


def end_allocation(device: int, pool: tuple[int, int]) -> None:
    """Stop allocating from this pool. torch before 2.12 does not do so after a failed recording."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    end = end or torch._C._cuda_endAllocateCurrentStreamToPool  # type: ignore[attr-defined]  # before torch 2.8
    end(device, pool)


def fresh_generator_state(device: int) -> torch.Generator:
    """Return the state of a random generator that took part in no recording."""
    return torch.Generator(torch.device("cuda", device)).graphsafe_get_state()


def recording_key(value: Any) -> Hashable:
    """Return what a recording depends on: a tensor's shape and dtype, or a plain value itself."""
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def clone_tensors(values: Values) -> Values:
    """Return the values, each tensor copied."""
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in values)


class ReplayedUpdate:
    """Records and replays `update`, which steps a fused optimizer. Learning rates may change between calls."""

    def __init__(self, update: Callable[[], None], optimizer: torch.optim.Optimizer, graphs: Graphs) -> None:
        self.update, self.optimizer = update, optimizer
        device = optimizer.param_groups[0]["params"][0].device
        self.rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self.replayed = graphs.wrap("the optimizer's step", self._compute)

    def __call__(self) -> None:
        """Take a step with the optimizer's present learning rates."""
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self.replayed()

    def _compute(self) -> Values:
        """Step with learning rates in device tensors, which a graph reads at each replay. Then restore the floats."""
        groups, capturing = self.optimizer.param_groups, torch.cuda.is_current_stream_capturing()
        settings = [{"lr": group["lr"], "capturable": group["capturable"]} for group in groups]
        for rate, group in zip(self.rates, groups, strict=True):
            group.update(lr=rate, capturable=capturing or group["capturable"])
        try:
            self.update()
        finally:
            for group, before in zip(groups, settings, strict=True):
                group.update(before)
        return ()


class ReplayedTrainer(Trainer):
    """A trainer on a GPU. It replays backward pass, update and probes as CUDA graphs.

    Several processes exchange their gradients between the replay of the backward pass and that of the update. It takes
    the arguments of `Trainer`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.record_anew()

    def record_anew(self) -> None:
        """Drop all recordings, for instance because tensors that they write to have moved."""
        graphs = Graphs(self.accelerator.device)
        self.replayed_backward = graphs.wrap("the gradient", self._compute_backward)
        self.replayed_losses = graphs.wrap("a probe", self._compute_losses)
        self.replayed_size = graphs.wrap("a probe of the gradient", self._compute_size)
        self.replayed_update: Callable[[], None] = super().update
        if self.scaler.is_enabled() or not all(group.get("fused") for group in self.optimizer.param_groups):
            log.warning("the optimizer's step is not replayed: only a fused one can be, and not in fp16")
        else:
            self.replayed_update = ReplayedUpdate(super().update, self.optimizer, graphs)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, from any device."""
        super().load_state_dict(state)
        self.record_anew()  # the optimizer's moments have moved

    def exchanging(self) -> AbstractContextManager[None]:
        """Return a block without effect: gradients are exchanged after the graph that makes them."""
        return nullcontext()

    def backward(self, batch: Batch, key: Tensor, num_batches: int = 1) -> SeenBatch:
        """Draw timesteps and backpropagate one micro-batch, scaled by 1/num_batches. Its noise depends on the key."""
        if self.pairs and self.accelerator.num_processes > 1:  # they gather x0, which is not recorded
            return super().backward(batch, key, num_batches)
        x0, labels, t, weight, losses = self.replayed_backward(batch.x0, batch.labels, key, num_batches)
        return SeenBatch(Batch(x0, labels), Timesteps(t, weight), losses)

    def update(self) -> None:
        """Clip, step, zero gradients."""
        self.replayed_update()

    def zero_gradients(self) -> None:
        """Zero the gradients in place: recordings add to the same tensors."""
        self.optimizer.zero_grad(set_to_none=False)

    def losses_at(self, batch: Batch, rows: Tensor, t: Tensor) -> Tensor:
        """Return the losses (N,) of these rows (N,) of a batch at the times t (N,)."""
        if torch.is_grad_enabled():  # autograd cannot differentiate a replay
            return super().losses_at(batch, rows, t)
        inputs = (self.noise.probe_key(self.step_number), batch.x0, batch.labels, rows, t, self.network.training)
        losses: Tensor = self.replayed_losses(*inputs)[0]
        return losses

    def gradient_size_at(self, batch: Batch, rows: Tensor, t: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses (N,) of these rows at t, and the size of their gradient with these signs, ()."""
        key = self.noise.probe_key(self.step_number)
        losses, size = self.replayed_size(key, batch.x0, batch.labels, rows, t, signs, self.network.training)
        return losses, size

    def _compute_size(
        self, key: Tensor, x0: Tensor, labels: Tensor | None, rows: Tensor, t: Tensor, signs: Tensor, training: bool
    ) -> Values:
        return self.gradient_size_with(key, Batch(x0, labels), rows, t, signs)

    def _compute_backward(self, x0: Tensor, labels: Tensor | None, key: Tensor, num_batches: int) -> Values:
        seen = super().backward(Batch(x0, labels), key, num_batches)
        return seen.batch.x0, seen.batch.labels, seen.drawn.t, seen.drawn.weight, seen.losses

    def _compute_losses(
        self, key: Tensor, x0: Tensor, labels: Tensor | None, rows: Tensor, t: Tensor, training: bool
    ) -> Values:
        """Return the losses of a probe. `training` is an argument so that train and eval mode have a recording each."""
        return (self.losses_with(key, Batch(x0, labels), rows, t),)
