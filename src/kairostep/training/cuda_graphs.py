"""A trainer whose steps are recorded as CUDA graphs and replayed: one launch where an eager step has thousands."""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

from kairostep.data import Batch
from kairostep.timesteps import Timesteps
from kairostep.training.trainer import SeenBatch, Trainer

NUM_EAGER = 3  # calls before recording: libraries choose their kernels and gradients get their place
MAX_RECORDINGS = 4  # shapes of which each has a recording; others are computed eagerly

log = logging.getLogger("kairostep")

Values = tuple[Any, ...]
"""Tensors, None, and plain values, which are part of the computation."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A graph, what it reads and what it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Values
    outputs: Values

    def replay(self, inputs: Values) -> Values:
        """Return what is computed from these inputs."""
        for own, given in zip(self.inputs, inputs, strict=True):
            if isinstance(own, Tensor):
                own.copy_(given)
        self.graph.replay()
        return clone_tensors(self.outputs)  # the next replay writes over them


class Graphs:
    """What the graphs of one training share: memory, a stream, and the fate of a failed recording.

    The stream is one for all eager calls: what is freed on a stream is kept for that stream alone.
    """

    everywhere: ClassVar["WeakSet[Graphs]"] = WeakSet()

    def __init__(self, device: torch.device) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]
        self.all: list[Replayed] = []
        self.everywhere.add(self)

    def wrap(self, name: str, compute: Callable[..., Values]) -> "Replayed":
        """Return a computation that is recorded and replayed when it is called."""
        self.all.append(Replayed(name, compute, self))
        return self.all[-1]

    @contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record a block; if that fails, leave the device as if it had not been tried, but for memory that torch keeps.

        Other threads may go on meanwhile: that of a data loader pins memory.
        """
        random, random_here = torch.get_rng_state(), torch.cuda.get_rng_state(self.index)
        current = torch.cuda.current_stream(self.index)
        options: Any = {"stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.device(self.index), torch.cuda.graph(graph, self.pool, **options):
                yield
        except RuntimeError:
            torch.cuda.set_stream(current)  # a failure to end leaves the other
            self._recover()
            torch.set_rng_state(random)
            torch.cuda.set_rng_state(random_here, self.index)
            raise

    def _recover(self) -> None:
        """Make the device fit for computing after a failure; what was recorded on it before has to be once more."""
        with suppress(RuntimeError):  # torch has done so itself; left undone, no cached memory is given back
            end_allocation(self.index, self.pool)
        for graphs in [graphs for graphs in self.everywhere if graphs.index == self.index]:
            graphs.pool = torch.cuda.graph_pool_handle()  # one whose graphs are gone cannot be taken again
            for replayed in graphs.all:
                replayed.recordings.clear()
        # After a failed capture the generator still believes it is capturing: give it a fresh state
        torch.cuda.default_generators[self.index].graphsafe_set_state(fresh_generator_state(self.index))


class Replayed:
    """Calls `compute`, after a few calls by replaying a CUDA graph of it; each shape of inputs has a graph of its own.

    Random numbers come from the generators as they are seeded before each call. What `compute` writes to has to stay
    where it is: gradients are zeroed, not dropped. A computation that cannot be recorded goes on without, and says so.
    """

    def __init__(self, name: str, compute: Callable[..., Values], graphs: Graphs) -> None:
        self.name, self.compute, self.graphs = name, compute, graphs
        self.num_calls: dict[Hashable, int] = {}
        self.recordings: dict[Hashable, Recording] = {}
        self.can_record = True

    def __call__(self, *inputs: Any) -> Values:
        """Return what `compute` returns, its tensors copied."""
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
    """Take memory from this pool no longer; torch before 2.12 does not do so where a recording fails."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    end = end or torch._C._cuda_endAllocateCurrentStreamToPool  # type: ignore[attr-defined]  # before torch 2.8
    end(device, pool)


def fresh_generator_state(device: int) -> torch.Generator:
    """Return the state of a random generator that has taken part in no recording."""
    return torch.Generator(torch.device("cuda", device)).graphsafe_get_state()


def recording_key(value: Any) -> Hashable:
    """Return what a recording depends on: of a tensor its shape and type, of anything else its value."""
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def clone_tensors(values: Values) -> Values:
    """Return copies of the tensors among these."""
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in values)


class ReplayedUpdate:
    """Calls `update`, which steps a fused optimizer, as `Replayed` does; learning rates may change between calls."""

    def __init__(self, update: Callable[[], None], optimizer: torch.optim.Optimizer, graphs: Graphs) -> None:
        self.update, self.optimizer = update, optimizer
        device = optimizer.param_groups[0]["params"][0].device
        self.rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self.replayed = graphs.wrap("the optimizer's step", self._compute)

    def __call__(self) -> None:
        """Take a step at the learning rates that the optimizer has now."""
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self.replayed()

    def _compute(self) -> Values:
        """Step with the rates on the device, as they are when a graph is replayed, then put back the host's."""
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
    """A trainer on one process with a GPU that replays its backward pass, update and probes as CUDA graphs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.record_anew()

    def record_anew(self) -> None:
        """Forget all recordings, for instance because tensors that they write to have moved."""
        graphs = Graphs(self.accelerator.device)
        self.replayed_backward = graphs.wrap("the gradient", self._compute_backward)
        self.replayed_losses = graphs.wrap("a probe", self._compute_losses)
        self.replayed_update: Callable[[], None] = super().update
        if self.scaler.is_enabled() or not all(group.get("fused") for group in self.optimizer.param_groups):
            log.warning("the optimizer's step is not replayed: only a fused one can be, and not in fp16")
        else:
            self.replayed_update = ReplayedUpdate(super().update, self.optimizer, graphs)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state that `state_dict` returned, on any device."""
        super().load_state_dict(state)
        self.record_anew()  # the optimizer has its moments in another place

    def backward(self, batch: Batch, num_batches: int = 1) -> SeenBatch:
        """Draw timesteps and backpropagate one micro-batch, scaled by 1/num_batches."""
        x0, labels, t, weight, losses = self.replayed_backward(batch.x0, batch.labels, num_batches)
        return SeenBatch(Batch(x0, labels), Timesteps(t, weight), losses)

    def update(self) -> None:
        """Clip, step, zero gradients."""
        self.replayed_update()

    def zero_gradients(self) -> None:
        """Zero the gradients where they are: recordings add to them there."""
        self.optimizer.zero_grad(set_to_none=False)

    def losses_at(self, batch: Batch, rows: Tensor, t: Tensor) -> Tensor:
        """Return the losses (N,) of these rows (N,) of a batch at the times t (N,)."""
        if torch.is_grad_enabled():  # a replay has no graph to differentiate
            return super().losses_at(batch, rows, t)
        losses: Tensor = self.replayed_losses(batch.x0, batch.labels, rows, t, self.network.training)[0]
        return losses

    def _compute_backward(self, x0: Tensor, labels: Tensor | None, num_batches: int) -> Values:
        seen = super().backward(Batch(x0, labels), num_batches)
        return seen.batch.x0, seen.batch.labels, seen.drawn.t, seen.drawn.weight, seen.losses

    def _compute_losses(self, x0: Tensor, labels: Tensor | None, rows: Tensor, t: Tensor, training: bool) -> Values:
        """Return the losses of a probe; each mode of the network, `training` or not, has a recording of its own."""
        return (super().losses_at(Batch(x0, labels), rows, t),)
