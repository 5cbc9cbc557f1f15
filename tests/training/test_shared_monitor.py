"""Two processes that train: what they measure together is what one process measures with the same weights."""

import hashlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import SMALL, arguments, configure, lines_of, start_ranks, state_of
from torch import Tensor

from kairostep.training import Run

STEPS = 4
DUE = ("log_every", "evaluate_every", "checkpoint_every", "fid_every")


class Corner(torch.nn.Module):
    """Some pixels."""

    def forward(self, images: Tensor) -> Tensor:
        """Return them."""
        return images[:, 0, :40:8, :40:8].flatten(1)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("features")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Corner()).save(place / "corner.pt")
    digest = hashlib.sha256((place / "corner.pt").read_bytes()).hexdigest()
    network = {"inception": place / "corner.pt", "inception_sha256": digest, "cache": place / "cache"}
    return {**SMALL, "steps": STEPS, **dict.fromkeys(DUE, STEPS), "fid_images": 30, "held_out_images": 20, **network}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    ranks = start_ranks(arguments(folder / "two", settings), folder / "log")
    assert [rank.join() for rank in ranks] == [0, 0], "".join(rank.output for rank in ranks)
    assert "trained 4 steps" in ranks[0].output
    assert ranks[1].output == ""
    return folder / "two"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any], trained: Path) -> Run:
    """Return a run of one process with the weights that two have trained."""
    run = Run(configure(tmp_path_factory.mktemp("one") / "one", settings))
    run.trainer.ema.load_state_dict(state_of(trained)["trainer"]["ema"])
    run.release()
    return run


def test_the_held_out_loss(trained: Path, alone: Run) -> None:
    (found,) = [line["held_out"] for line in lines_of(trained) if "held_out" in line]
    expected = alone.monitor.evaluate()
    assert found.pop("loss_ranges") == pytest.approx(expected.pop("loss_ranges"), rel=1e-6)  # type: ignore[attr-defined]
    assert found == pytest.approx(expected, rel=1e-6)


def test_distances_of_images(trained: Path, alone: Run) -> None:
    (found,) = [line["generated"] for line in lines_of(trained) if "generated" in line]
    expected = alone.monitor.measure_images()
    assert found["num"] == expected["num"] == 30
    for name in ("fid", "kid", "precision", "recall"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3)  # of bytes, which may be rounded otherwise


def test_the_grid(trained: Path, alone: Run, tmp_path: Path) -> None:
    alone.monitor.save_samples(tmp_path / "grid.png")
    found, expected = (
        np.array(Image.open(path)).astype(int)
        for path in (trained / "samples" / f"step-{STEPS:08d}.png", tmp_path / "grid.png")
    )
    assert np.abs(found - expected).max() <= 1  # batches are of another size
