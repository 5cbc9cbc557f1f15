"""A model out of a run directory: the weights that were saved, without the data."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import AutoencoderKL
from small_runs import SMALL, checkpoint_paths, train_here
from torch.testing import assert_close

from kairostep.diffusion import EPSILON, VELOCITY, DiscreteProcess, FlowProcess
from kairostep.experiments import experiment
from kairostep.runs import load_trained
from kairostep.runs.checkpoint import read, read_facts, write
from kairostep.runs.trained import decoder

SETTINGS = {**SMALL, "steps": 20, "checkpoint_every": 5, "keep_checkpoints": 4, "label_dropout": 0.1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained") / "run"
    train_here(directory, SETTINGS)
    return directory


@pytest.fixture(autouse=True)
def _no_data(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if "run" in request.fixturenames:
        request.getfixturevalue("run")  # trained before the data is taken away

    def refuse(*_: Any) -> None:
        raise AssertionError("data was asked for")

    monkeypatch.setattr(experiment, "load_data", refuse)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.mark.parametrize("weights", ["ema", "model"])
@pytest.mark.parametrize(("which", "step"), [("last", 20), ("15", 15), (10, 10)])
def test_the_weights_of_a_checkpoint(run: Path, weights: str, which: str | int, step: int) -> None:
    trained = load_trained(run, which, weights)
    saved = read(run / "checkpoints" / f"step-{step:08d}.safetensors")["trainer"]
    expected = saved["ema"]["model"] if weights == "ema" else saved["model"]
    assert_close(trained.model.state_dict(), expected, rtol=0, atol=0)
    assert (trained.step, trained.weights, trained.shape, trained.num_classes) == (step, weights, (1, 8, 8), 10)
    assert isinstance(trained.process, DiscreteProcess)
    assert trained.prediction == trained.objective.prediction == EPSILON
    assert trained.clip
    assert len(trained.digest) == 64
    assert not trained.model.training
    assert not any(parameter.requires_grad for parameter in trained.model.parameters())
    x0 = torch.zeros(1, 1, 8, 8)
    assert trained.to_pixels(x0) is x0


def test_the_best_checkpoint_has_the_lowest_held_out_loss(run: Path) -> None:
    losses = {path: read_facts(path)["held_out"] for path in checkpoint_paths(run)}
    assert load_trained(run, "best").checkpoint == min(losses, key=lambda path: losses[path])


def test_a_flow_without_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    settings = {**SMALL, "steps": 2, "checkpoint_every": 2}
    train_here(tmp_path / "flow", settings, preset="digits-flow")
    trained = load_trained(tmp_path / "flow")
    assert isinstance(trained.process, FlowProcess)
    assert trained.prediction == VELOCITY
    assert trained.num_classes == 0


def test_latents_are_decoded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    autoencoder = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    autoencoder.save_pretrained(tmp_path)
    latents = torch.randn(2, 4, 4, 4)
    with torch.no_grad():
        expected = autoencoder.decode(latents / autoencoder.config["scaling_factor"]).sample.clamp(-1, 1)
    assert_close(decoder(str(tmp_path), torch.device("cpu"))(latents), expected)


# What a directory may lack


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_a_folder_that_is_no_run(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "other")
    with pytest.raises(ValueError, match=r"a run directory must hold config\.yaml, got .*other: pass a directory that"):
        load_trained(tmp_path / "other")


def test_a_run_without_checkpoints(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(
        ValueError, match=r"a run must have a checkpoint, got .*copy without any: train it to its first"
    ):
        load_trained(copy)


@pytest.mark.parametrize("which", ["7", 7, "first", "-5"])
def test_a_step_that_is_not_there(run: Path, which: str | int) -> None:
    with pytest.raises(ValueError, match=r"checkpoint must be last, best or a step .*: there are 5, 10, 15, 20$"):
        load_trained(run, which)


def test_a_best_one_needs_held_out_losses(copy: Path) -> None:
    for path in checkpoint_paths(copy):
        write(path, read(path), {**read_facts(path), "held_out": None})
    with pytest.raises(ValueError, match=r"the best checkpoint must have a held-out loss, got none in .*5, 10, 15, 20"):
        load_trained(copy, "best")


def test_a_damaged_checkpoint(copy: Path) -> None:
    path = checkpoint_paths(copy)[-1]
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"step-00000020\.safetensors is damaged: .*: pass another one by --checkpoint"
    ):
        load_trained(copy)
    assert load_trained(copy, 15).step == 15


def test_a_checkpoint_of_an_earlier_version(copy: Path) -> None:
    path = checkpoint_paths(copy)[-1]
    state = read(path)
    del state["sample"]
    write(path, state, read_facts(path))
    with pytest.raises(
        ValueError, match=r"a checkpoint must hold the shape of its samples, got .*: go on with the run"
    ):
        load_trained(copy)


def test_other_weights_have_no_name(run: Path) -> None:
    with pytest.raises(ValueError, match="weights must be one of 'ema', 'model', got 'best'"):
        load_trained(run, weights="best")
