"""What happens around the recording of a graph, with a device that is made up: none of it needs a GPU."""

import copy
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import kairostep as ks
from kairostep.data import Batch
from kairostep.training import Trainer, cuda_graphs
from kairostep.training.cuda_graphs import NUM_EAGER, Graphs, ReplayedTrainer, ReplayedUpdate


class Device:
    """Stands in for what torch says about a GPU.

    A recording fails at its end while `broken`, and before it starts while the device `refuses`.
    """

    def __init__(self) -> None:
        self.broken, self.refuses, self.ended = False, False, list[Any]()
        self.current = self.usual = SimpleNamespace(wait_stream=lambda other: None)
        self.generator = SimpleNamespace(graphsafe_set_state=lambda state: None)

    @contextmanager
    def graph(self, graph: Any, pool: Any, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
        """Record a block on this stream."""
        assert capture_error_mode == "thread_local"
        self.current = stream
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
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
        "is_current_stream_capturing": lambda: False,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(cuda_graphs, "fresh_generator_state", lambda index: None)
    monkeypatch.setattr(cuda_graphs, "end_allocation", lambda *place: made.ended.append(place))
    gc.collect()  # no graphs of other tests
    return made


def test_a_failed_recording_is_undone_and_the_call_is_computed_once(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, other = Graphs(torch.device("cuda")), Graphs(torch.device("cuda"))
    beside = other.wrap("another training's", lambda: ())
    for _ in range(NUM_EAGER + 1):
        beside()
    assert beside.recordings
    drawn = []
    replayed = graphs.wrap("the gradient", lambda: (drawn.append(torch.rand(())),)[:0])
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

    replayed = graphs.wrap("the gradient", compute)
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
        graphs.wrap("the gradient", raise_memory_error)()
    assert joined == [graphs.stream]


def raise_memory_error() -> Any:
    raise MemoryError


# A trainer around it


class Denoiser(torch.nn.Module):
    """A network for points, with random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return a velocity."""
        return self.layers(x) * t[:, None]


def make_trainer(kind: type[Trainer], *, fused: bool) -> Trainer:
    torch.manual_seed(0)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    objective = ks.Objective(ks.FlowProcess(), ks.VELOCITY)
    sampler = ks.Adaptive(ks.ConstantBeta(), num_steps=10, probing=ks.Probing(every=2))
    return kind(model, objective, sampler, optimizer, learning_rate=lambda step: 1e-2 / (1 + step), max_grad_norm=0.5)


def take_steps(trainer: Trainer, start: int, stop: int) -> None:
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        trainer.step([Batch(torch.randn(16, 2, generator=generator), None) for _ in range(2)])


@pytest.mark.parametrize("fused", [True, False])
def test_a_trainer_whose_recordings_fail_takes_the_same_steps(
    device: Device, caplog: pytest.LogCaptureFixture, fused: bool
) -> None:
    device.refuses = True  # at the end, what is computed here while it is recorded would have been computed twice
    plain, replayed = make_trainer(Trainer, fused=fused), make_trainer(ReplayedTrainer, fused=fused)
    assert isinstance(replayed, ReplayedTrainer)
    for trainer in (plain, replayed):
        take_steps(trainer, 0, 2 * NUM_EAGER + 2)
    assert_close(replayed.state_dict(), plain.state_dict(), rtol=1e-6 if fused else 0, atol=0)  # rates in float32
    assert all(p.grad is None for p in plain.parameters)
    assert all(p.grad is not None and not p.grad.any() for p in replayed.parameters)  # in place, for a recording
    assert isinstance(replayed.replayed_update, ReplayedUpdate) == fused
    assert ("the optimizer's step is not replayed: only a fused one can be" in caplog.text) == (not fused)
    assert "a probe cannot be recorded as a CUDA graph" in caplog.text


@pytest.mark.usefixtures("device")
def test_a_trainer_records_anew_once_its_state_is_loaded() -> None:
    trainer = make_trainer(ReplayedTrainer, fused=True)
    assert isinstance(trainer, ReplayedTrainer)
    state = copy.deepcopy(trainer.state_dict())
    take_steps(trainer, 0, 2 * NUM_EAGER + 2)
    before = trainer.replayed_backward, trainer.replayed_losses, trainer.replayed_update.replayed
    assert all(replayed.recordings for replayed in before)
    trainer.load_state_dict(state)
    after = trainer.replayed_backward, trainer.replayed_losses, trainer.replayed_update.replayed
    assert not any(replayed.recordings for replayed in after)


@pytest.mark.usefixtures("device")
def test_losses_that_are_differentiated_are_not_replayed() -> None:
    trainer = make_trainer(ReplayedTrainer, fused=True)
    assert isinstance(trainer, ReplayedTrainer)
    batch, rows, t = Batch(torch.randn(4, 2), None), torch.arange(4), torch.full((4,), 0.5)
    for _ in range(NUM_EAGER + 1):
        assert trainer.losses_at(batch, rows, t).requires_grad
    assert not trainer.replayed_losses.num_calls
    with torch.no_grad():
        trainer.losses_at(batch, rows, t)
        trainer.network.eval()
        trainer.losses_at(batch, rows, t)
    assert len(trainer.replayed_losses.num_calls) == 2  # one for each mode of the network


@pytest.mark.usefixtures("device")
def test_the_size_of_a_gradient_is_replayed_as_a_whole() -> None:
    trainer, plain = make_trainer(ReplayedTrainer, fused=True), make_trainer(Trainer, fused=True)
    assert isinstance(trainer, ReplayedTrainer)
    batch, rows, t = Batch(torch.randn(4, 2), None), torch.arange(4), torch.full((4,), 0.5)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0])
    for own in (trainer, plain):
        own.network.eval()  # without dropout
    expected = plain.gradient_size_at(batch, rows, t, signs)
    with torch.no_grad():
        for _ in range(NUM_EAGER + 2):
            losses, size = trainer.gradient_size_at(batch, rows, t, signs)
            assert torch.equal(losses, expected[0])
            assert torch.equal(size, expected[1])
    assert float(size) > 0
    assert not losses.requires_grad
    assert len(trainer.replayed_size.recordings) == 1
