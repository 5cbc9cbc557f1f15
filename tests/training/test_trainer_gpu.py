"""On a CUDA device: no waiting in a step, exact resume, mixed precision and compilation."""

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.testing import assert_close

from kairostep.data import Batches
from kairostep.experiments import Component, build, preset
from kairostep.training import Run
from kairostep.training.assembly import make_batches, make_trainer
from kairostep.training.cuda_graphs import ReplayedTrainer

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")]  # in inductor
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: deterministic kernels need it

SMALL = replace(
    preset("digits"),
    network=Component("unet", {"channels": 32, "multipliers": [1, 2], "blocks": 1, "attention": [4], "dropout": 0.1}),
    steps=30,
    batch_size=32,
    log_every=5,
    evaluate_every=10,
    checkpoint_every=10,
)
ADAPTIVE = Component("adaptive", {"every": 4})
ROOT_LOSS = Component("root_loss", {"warmup": 4, "refresh": 2})
LEAST_NOISE = Component("least_noise", {"warmup": 2, "refresh": 2})  # probes in steps 8 to 17
LEARNING = [ADAPTIVE, ROOT_LOSS, LEAST_NOISE]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    if torch.cuda.get_sync_debug_mode():
        torch.cuda.set_sync_debug_mode("default")
    torch.use_deterministic_algorithms(False)
    AcceleratorState._reset_state(reset_partial_state=True)  # the next test may want another precision


@pytest.mark.parametrize("sampler", [Component("uniform"), *LEARNING], ids=lambda sampler: sampler.name)
@pytest.mark.parametrize(("precision", "speed"), [("no", "plain"), ("bf16", "plain"), ("bf16", "graph")])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_never_waits_for_the_device(sampler: Component, precision: str, speed: str) -> None:
    accelerator = Accelerator(mixed_precision=precision)
    pairs = sampler is not ADAPTIVE  # whose policy looks at x0
    parts = build(replace(SMALL, sampler=sampler, speed=speed, pairs=pairs, stable_target=64), accelerator.device)
    trainer, batches = make_trainer(parts, accelerator), make_batches(parts, accelerator).from_step()
    for _ in range(12):
        trainer.step([next(batches)])  # fills caches and records
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(8):
        trainer.step([next(batches)])


@pytest.mark.parametrize("sampler", LEARNING, ids=lambda sampler: sampler.name)
@pytest.mark.parametrize(
    ("precision", "speed"), [("fp32", "plain"), ("bf16", "graph"), ("fp16", "graph"), ("bf16", "compile")]
)
def test_a_stopped_run_goes_on_bitwise(tmp_path: Path, sampler: Component, precision: str, speed: str) -> None:
    config = replace(SMALL, sampler=sampler, precision=precision, speed=speed, deterministic=True)
    whole = Run(replace(config, output=str(tmp_path / "whole")))
    whole.train()
    Run(replace(config, output=str(tmp_path / "parts"), steps=10)).train()
    parts = Run(replace(config, output=str(tmp_path / "parts")))
    assert parts.trainer.step_number == 10
    parts.train()
    for part in ("model", "sampler"):
        expected, found = (run.trainer.state_dict()[part] for run in (whole, parts))
        assert_close(found, expected, rtol=0, atol=0)
    assert_close(parts.trainer.ema.averaged, whole.trainer.ema.averaged, rtol=0, atol=0)


@pytest.mark.parametrize("sampler", [Component("uniform"), *LEARNING], ids=lambda sampler: sampler.name)
@pytest.mark.parametrize("options", [{}, {"pairs": True, "stable_target": 64}, {"label_dropout": 0.1, "accumulate": 2}])
def test_a_replayed_graph_does_what_eager_steps_do(sampler: Component, options: dict[str, Any]) -> None:
    accelerator = Accelerator(mixed_precision="no")
    torch.use_deterministic_algorithms(True)
    if sampler is ADAPTIVE:
        options = {**options, "pairs": False}  # its policy looks at x0
    states = []
    for speed in ("plain", "graph"):
        parts = build(replace(SMALL, sampler=sampler, speed=speed, **options), accelerator.device)
        trainer, batches = make_trainer(parts, accelerator), make_batches(parts, accelerator).from_step()
        for _ in range(20):
            step = trainer.step([next(batches) for _ in range(parts.config.accumulate)])
        if speed == "graph":
            assert trainer.replayed_backward.recordings
            assert trainer.replayed_update.replayed.recordings
            probes = [trainer.replayed_losses.recordings, trainer.replayed_size.recordings]
            assert any(probes) == trainer.sampler.uses_loss_at
        states.append((step.losses, step.drawn.t, [p.detach().clone() for p in trainer.network.parameters()]))
    assert_close(states[1], states[0], rtol=1e-3, atol=1e-5)


def test_compiled_training_agrees_with_eager_training(tmp_path: Path) -> None:
    losses = []
    for compiled in (False, True):
        run = Run(replace(SMALL, output=str(tmp_path / str(compiled)), speed="compile" if compiled else "plain"))
        run.train()
        losses.append(run.monitor.evaluate()["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] < 0.9


def test_precisions_train_alike(tmp_path: Path) -> None:
    losses = []
    for precision in ("fp32", "bf16", "fp16"):
        AcceleratorState._reset_state(reset_partial_state=True)
        run = Run(replace(SMALL, output=str(tmp_path / precision), precision=precision))
        run.train()
        losses.append(run.monitor.evaluate()["loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=0.05)


def test_loss_curves_of_plain_and_graph_agree() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    curves = []
    for speed, seed in (("plain", 0), ("graph", 0), ("plain", 1)):
        parts = build(replace(SMALL, sampler=Component("uniform"), speed=speed, seed=seed), accelerator.device)
        trainer, batches = make_trainer(parts, accelerator), make_batches(parts, accelerator).from_step()
        losses = torch.stack([trainer.step([next(batches)]).losses.mean() for _ in range(500)])
        curves.append(losses.view(20, 25).mean(1))
    plain, graph, other = curves
    between_modes, between_seeds = (graph - plain).abs() / plain, (other - plain).abs() / plain
    assert between_modes.max() < 0.02
    assert between_modes.mean() < 0.2 * between_seeds.mean()


class Waits(torch.nn.Module):
    """A network that reads a value in its forward pass, which no graph can record."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> Any:
        """Return what the network returns."""
        return self.network(x, time) if x.abs().max().item() < 1e6 else None


def test_what_cannot_be_recorded_goes_on_without_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(mixed_precision="no")
    torch.use_deterministic_algorithms(True)
    finals = []
    for speed in ("plain", "graph"):
        parts = build(replace(SMALL, sampler=ADAPTIVE, speed=speed), accelerator.device)
        parts = replace(parts, model=Waits(parts.model))
        trainer, batches = make_trainer(parts, accelerator), make_batches(parts, accelerator).from_step()
        for _ in range(10):
            trainer.step([next(batches)])
        finals.append([p.detach().clone() for p in trainer.network.parameters()])
    assert_close(finals[1], finals[0], rtol=1e-3, atol=1e-5)
    assert "the gradient cannot be recorded as a CUDA graph and goes on without, slower: " in caplog.text
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    for num_steps in (10, 100):
        reserved = torch.cuda.memory_reserved()  # at first with what was copied above in a step's place
        for _ in range(num_steps):
            trainer.step([next(batches)])
    assert torch.cuda.memory_reserved() == reserved
    torch.empty(2**28, device="cuda")  # freed at once, and given back if no recording is thought to be underway
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved


def test_steps_are_recorded_while_other_processes_read_the_data(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(mixed_precision="no")
    parts = build(replace(SMALL, sampler=ADAPTIVE, speed="graph"), accelerator.device)
    options: dict[str, Any] = {"device": accelerator.device, "label_dropout": None}
    streamed = Batches(parts.dataset, SMALL.batch_size, num_workers=2, resident=False, **options)
    trainer, batches = make_trainer(parts, accelerator), streamed.from_step()
    for _ in range(10):
        trainer.step([next(batches)])
    assert isinstance(trainer, ReplayedTrainer)
    assert trainer.replayed_backward.recordings
    assert "cannot be recorded" not in caplog.text


def test_a_state_taken_up_later_is_replayed_from_its_own_place() -> None:
    accelerator = Accelerator(mixed_precision="no")
    torch.use_deterministic_algorithms(True)
    parts = build(replace(SMALL, speed="graph"), accelerator.device)
    trainer, batches = make_trainer(parts, accelerator), make_batches(parts, accelerator)
    ends = []
    stream = batches.from_step()
    for _ in range(6):
        trainer.step([next(stream)])
    state = {key: copy.deepcopy(value) for key, value in trainer.state_dict().items()}
    for _ in range(2):  # on from here, then back and on once more
        stream = batches.from_step(6)
        for _ in range(6):
            trainer.step([next(stream)])
        ends.append([p.detach().clone() for p in trainer.network.parameters()])
        trainer.load_state_dict(state)
    assert_close(ends[1], ends[0], rtol=0, atol=0)
