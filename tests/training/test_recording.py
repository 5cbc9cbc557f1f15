"""What happens around the recording of a graph, with a device that is made up: none of it needs a GPU."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kairostep.training import cuda_graphs
from kairostep.training.cuda_graphs import NUM_EAGER, Graphs


class Device:
    """Stands in for what torch says about a GPU; a recording fails while `broken`."""

    def __init__(self) -> None:
        self.broken, self.ended = False, list[Any]()
        self.current = self.usual = SimpleNamespace(wait_stream=lambda other: None)
        self.generator = SimpleNamespace(graphsafe_set_state=lambda state: None)

    @contextmanager
    def graph(self, graph: Any, pool: Any, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
        """Record a block on this stream."""
        assert capture_error_mode == "thread_local"
        self.current = stream
        yield
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = self.usual

    def set_stream(self, stream: Any) -> None:
        """Compute on this stream."""
        self.current = stream


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    fakes = {
        "current_device": lambda: 1,
        "graph_pool_handle": object,
        "Stream": lambda index: SimpleNamespace(wait_stream=lambda other: None),
        "current_stream": lambda index: made.current,
        "set_stream": made.set_stream,
        "stream": lambda stream: nullcontext(),
        "device": lambda index: nullcontext(),
        "graph": made.graph,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "get_rng_state": lambda index: None,
        "set_rng_state": lambda state, index: None,
        "default_generators": {1: made.generator},
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(graphsafe_get_state=lambda: device))
    monkeypatch.setattr(cuda_graphs, "end_allocation", lambda *place: made.ended.append(place))
    gc.collect()  # no graphs of other tests
    return made


def test_a_failed_recording_is_undone_and_the_call_is_computed_once(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, other = Graphs(torch.device("cuda")), Graphs(torch.device("cuda"))
    beside = other.replayed("another training's", lambda: ())
    for _ in range(NUM_EAGER + 1):
        beside()
    assert beside.recordings
    drawn = []
    replayed = graphs.replayed("the gradient", lambda: (drawn.append(torch.rand(())),)[:0])
    device.broken, pool, pool_beside = True, graphs.pool, other.pool
    with caplog.at_level(logging.WARNING):
        for _ in range(NUM_EAGER + 3):
            torch.manual_seed(0)
            replayed()
    assert len(drawn) == NUM_EAGER + 3 + 1  # once in vain
    assert len({float(value) for value in drawn}) == 1  # and what it drew is drawn again
    assert device.current is device.usual
    assert device.ended == [(1, pool)]  # of the current device, where none is named
    assert not beside.recordings  # they would draw from a state that is no more
    assert other.pool is not pool_beside
    assert caplog.text.count("the gradient cannot be recorded as a CUDA graph and goes on without, slower: ") == 1


def test_what_was_recorded_is_replayed_for_as_long_as_shapes_stay(device: Device) -> None:
    graphs, calls = Graphs(torch.device("cuda", 1)), []

    def compute(x: torch.Tensor) -> tuple[torch.Tensor]:
        calls.append(x.shape)
        return (x + 1,)

    replayed = graphs.replayed("the gradient", compute)
    for num in (3, 3, 3, 3, 3, 3, 2):
        replayed(torch.zeros(num))
    assert len(calls) == NUM_EAGER + 1 + 1  # the eager ones, the recording, another shape
    assert len(replayed.recordings) == 1
    assert device.current is device.usual


def test_a_call_that_fails_joins_the_streams(device: Device) -> None:
    joined = []
    device.usual.wait_stream = joined.append
    graphs = Graphs(torch.device("cuda"))
    with pytest.raises(MemoryError):
        graphs.replayed("the gradient", raise_memory_error)()
    assert joined == [graphs.stream]


def raise_memory_error() -> Any:
    raise MemoryError
