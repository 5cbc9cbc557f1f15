"""A run is a function of its configuration and seed, whatever the number of processes, and may change that number."""

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import (
    ADAPTIVE,
    CONTEXT,
    LEARNING,
    PATIENCE,
    SMALL,
    arguments,
    assert_same_run,
    configure,
    last_step,
    lines_of,
    num_lines,
    rank_environments,
    start_ranks,
    state_of,
    train_here,
)
from torch import Tensor, nn
from torch.testing import assert_close

from kairostep.data import Batch
from kairostep.experiments import build
from kairostep.experiments.parts import make_sampler, sampler_context
from kairostep.registry import samplers
from kairostep.runs.checkpoint import Checkpoints
from kairostep.training.assembly import check_divides, make_accelerator, make_batches, make_trainer

NUM_STEPS = 50
OPTIONS: Mapping[str, Mapping[str, Any]] = {  # so that every sampler has learned within the steps
    "adaptive": {name: value for name, value in ADAPTIVE.items() if name.startswith("sampler.")},
    "beta": {"sampler.a": 2.0, "sampler.b": 1.0},
    "curriculum": {"sampler.start": 10, "sampler.end": 40},
    "gradient_variance": {"sampler.every": 2, "sampler.rows_per_gradient": 2, "sampler.num_bins": 10},
    "infonoise": {"sampler.warmup": 2, "sampler.num_bins": 10},
    "least_noise": {"sampler.warmup": 4, "sampler.refresh": 2, "sampler.rows_per_probe": 2},
    "loss_second_moment": {"sampler.num_bins": 10, "sampler.history": 3},
    "root_loss": {"sampler.warmup": 4, "sampler.refresh": 2},
    "tabulated": {"sampler.mass": [1, 2, 3]},
}
CASES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"sampler": name, **OPTIONS.get(name, {})} for name in samplers},
    "accumulated": {"sampler": "root_loss", **OPTIONS["root_loss"], "accumulate": 2},
    "pairs and labels": {"sampler": "uniform", "pairs": True, "label_dropout": 0.3},
    "stable target": {"sampler": "uniform", "stable_target": 32},
}

LEARN = {
    name: CASES[name] for name in ("adaptive", "root_loss", "least_noise", "speed", "accumulated", "pairs and labels")
}
MANY = {name: CASES[name] for name in ("adaptive", "root_loss", "speed", "accumulated")}


class Small(nn.Module):
    """A network of three layers, in float64: the cost is in the processes."""

    def __init__(self, size: int, num_labels: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.labels = nn.Embedding(num_labels + 1, size)
        self.layers = nn.Sequential(nn.Linear(size + 1, 32), nn.SiLU(), nn.Linear(32, size))
        self.double()

    def forward(self, x: Tensor, t: Tensor, class_labels: Tensor | None = None) -> Tensor:
        """Return an estimate of the noise."""
        inputs = torch.cat([x.flatten(1), t.double()[:, None] / 1000], dim=1)
        offset = 0 if class_labels is None else self.labels(class_labels)
        return (self.layers(inputs) + offset).view_as(x)


def train_all(folder: str, environment: dict[str, str], cases: Mapping[str, Mapping[str, Any]]) -> None:
    """Train each case in turn and keep its losses by step, over all processes."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    losses = {case: train_small(settings) for case, settings in cases.items()}
    torch.save(losses, f"{folder}/{environment['RANK']}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def train_small(settings: Mapping[str, Any]) -> Tensor:
    config = configure(Path("unused"), {**SMALL, "learning_rate": 1e-2, **settings})
    accelerator = make_accelerator(config)
    experiment = build(config, accelerator.device)
    model = Small(64, 10)
    context = sampler_context(experiment.config, experiment.objective, model, experiment.dataset.shape)
    sampler = make_sampler(experiment.config.sampler, context)
    trainer = make_trainer(replace(experiment, model=model, sampler=sampler), accelerator)
    batches, found = make_batches(experiment, accelerator).from_step(), []
    for _ in range(NUM_STEPS):
        step = [next(batches) for _ in range(config.accumulate)]
        taken = trainer.step([Batch(batch.x0.double(), batch.labels) for batch in step])
        found.append((taken.losses * taken.drawn.weight).mean())
    return torch.stack(found)


def losses_with(num_processes: int, folder: Path, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the mean losses over processes of each case, (NUM_STEPS,)."""
    children = [
        CONTEXT.Process(target=train_all, args=(str(folder), environment, cases))
        for environment in rank_environments(num_processes)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(PATIENCE)
        assert child.exitcode == 0
    found = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(num_processes)]
    return {case: torch.stack([own[case] for own in found]).mean(0) for case in cases}


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return losses_with(1, tmp_path_factory.mktemp("one"), CASES)


@pytest.mark.parametrize(("num_processes", "cases"), [(2, CASES), (4, LEARN), (8, MANY)])
def test_every_sampler_trains_the_same_on_any_number_of_processes(
    num_processes: int, cases: Mapping[str, Mapping[str, Any]], of_one: dict[str, Tensor], tmp_path: Path
) -> None:
    found = losses_with(num_processes, tmp_path, cases)
    apart = {case: float((found[case] - of_one[case]).abs().max()) for case in cases}
    assert {case: value for case, value in apart.items() if not value < 1e-6} == {}


# Whole runs

SETTINGS: Mapping[str, Any] = {**LEARNING["root_loss"], "batch_size": 24, "steps": 24, "checkpoint_every": 8}


def train_on(num_processes: int, directory: Path, log: Path, steps: int = 24) -> str:
    """Train or go on to this step with as many processes, and return what the first one printed."""
    children = start_ranks(arguments(directory, {**SETTINGS, "steps": steps}), log, num_processes)
    assert [child.join() for child in children] == [0] * num_processes, [child.output for child in children]
    return children[0].output


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that one process trains without a stop."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    train_here(directory, SETTINGS)
    return directory


def assert_close_runs(found: Path, expected: Path) -> None:
    """Losses and held-out losses are those of the other run up to rounding, and so is what the sampler learned.

    Weights are not compared: those that the loss hardly depends on have gradients of rounding, which Adam makes large.
    """
    tables = [state_of(directory)["trainer"]["sampler"]["table.rows"] for directory in (found, expected)]
    assert_close(tables[0], tables[1], rtol=1e-5, atol=1e-6)
    losses = [losses_between(directory) for directory in (found, expected)]
    held_out = [
        {line["step"]: line["held_out"]["loss"] for line in lines_of(d) if "held_out" in line}
        for d in (found, expected)
    ]
    for own, other in (losses, held_out):
        common = own.keys() & other.keys()
        assert len(common) >= 3
        assert {step: own[step] for step in common} == pytest.approx({step: other[step] for step in common}, abs=1e-6)


def losses_between(directory: Path) -> dict[tuple[int, int], float]:
    """Return mean losses by the steps between which they were taken: a run that stops writes one more line."""
    lines = [line for line in lines_of(directory) if "loss" in line]
    steps = [0, *(line["step"] for line in lines)]
    return {interval: line["loss"] for interval, line in zip(pairwise(steps), lines, strict=True)}


def test_a_run_goes_on_with_another_number_of_processes(whole: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    train_on(2, directory, tmp_path / "log", steps=8)
    output = train_on(3, directory, tmp_path / "log", steps=16)
    assert "going on from step 8 to 16, 2 processes before" in output
    run = train_here(directory, SETTINGS)  # one process again, as in a notebook
    assert run.accelerator.num_processes == 1
    assert_close_runs(directory, whole)


@pytest.mark.parametrize("num_processes", [3, 4])
def test_as_many_processes_go_on_bitwise(num_processes: int, whole: Path, tmp_path: Path) -> None:
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    train_on(num_processes, through, tmp_path / "log")
    children = start_ranks(arguments(stopped, SETTINGS), tmp_path / "log", num_processes)
    assert children[0].wait_until(lambda: num_lines(stopped) >= 2)
    for child in children:
        child.send(signal.SIGKILL)
    assert last_step(stopped) < 24
    train_on(num_processes, stopped, tmp_path / "log")
    assert_same_run(stopped, through)
    assert_close_runs(through, whole)


def test_pairs_over_processes_are_told(tmp_path: Path) -> None:
    settings = {**SMALL, "steps": 1, "pairs": True, "held_out_images": 0}
    children = start_ranks(arguments(tmp_path / "run", settings), tmp_path / "log")
    assert [child.join() for child in children] == [0, 0], [child.output for child in children]
    told = [child.output.count("kairostep: note: antithetic pairs are made over all 2 processes") for child in children]
    assert told == [1, 0]


def test_processes_that_cannot_share_a_batch(tmp_path: Path) -> None:
    config = configure(tmp_path, {**SMALL, "batch_size": 128, "accumulate": 2})
    rule = "batch_size must be a multiple of accumulate times the processes, 2 x 3, got 128: launch 2 processes"
    with pytest.raises(ValueError, match=rf"{rule}, or pass --batch_size=126 or --batch_size=132$"):
        check_divides(config, 3)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ValueError, match=rf"{rule}, since a run that goes on keeps its batch$"):
        check_divides(config, 3)


def hide_newest() -> None:
    """Make this process see the folder as a machine does that a file has not reached yet."""
    paths = Checkpoints.paths
    Checkpoints.paths = lambda self: paths(self)[:-1]  # type: ignore[method-assign]


def test_processes_that_find_different_checkpoints_say_so(tmp_path: Path) -> None:
    settings = {**SETTINGS, "steps": 16}
    for child in start_ranks(arguments(tmp_path / "run", settings), tmp_path / "first.log"):
        assert child.join() == 0
    again = start_ranks(
        arguments(tmp_path / "run", {**settings, "steps": 24}), tmp_path / "again.log", prepare={1: hide_newest}
    )
    for child in again:
        assert child.join() == 2
    said = "".join(child.output for child in again)
    assert "all processes must go on from the same checkpoint, got step-00000016.safetensors (SHA-256 " in said
    assert ") in process 0, step-00000008.safetensors (SHA-256 " in said
