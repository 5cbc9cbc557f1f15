"""A run is a function of its configuration and seed, whatever the number of processes, and may change that number."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import (
    ADAPTIVE,
    CONTEXT,
    PATIENCE,
    SMALL,
    configure,
    rank_environments,
)
from torch import Tensor, nn

from kairostep.data import Batch
from kairostep.experiments import build
from kairostep.experiments.parts import make_sampler, sampler_context
from kairostep.registry import samplers
from kairostep.training.assembly import make_accelerator, make_batches, make_trainer

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


@pytest.mark.parametrize("num_processes", [2, 4])
def test_every_sampler_trains_the_same_on_any_number_of_processes(
    num_processes: int, of_one: dict[str, Tensor], tmp_path: Path
) -> None:
    found = losses_with(num_processes, tmp_path, CASES)
    apart = {case: float((found[case] - of_one[case]).abs().max()) for case in CASES}
    assert {case: value for case, value in apart.items() if not value < 1e-6} == {}
