"""One run at a time in a directory, streamed data under signals, data that change, and runs in latents."""

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.vq_model import VQModel
from diffusers.models.unets.unet_2d import UNet2DModel
from PIL import Image
from small_runs import ADAPTIVE, CONTEXT, PATIENCE, SMALL, Child, arguments, assert_same_run, num_lines, train_here

import kairostep.cli
from kairostep.data import batches
from kairostep.runs import checkpoint
from kairostep.runs.directory import DirectoryLock

QUICK = ["--steps=4", "--batch_size=8", "--network.channels=8", "--network.multipliers=[1,2]", "--network.blocks=1"]
QUICK += ["--held_out_images=8", "--sample_steps=2", "--network.attention=[]"]


def test_a_second_run_in_the_same_directory_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    endless = {**ADAPTIVE, "steps": 100_000, "checkpoint_every": 50_000}
    first = Child(arguments(directory, endless), tmp_path / "first")
    assert first.wait_until(lambda: num_lines(directory) >= 3)
    config = (directory / "config.yaml").read_text()
    second = Child(arguments(directory, {**endless, "log_every": 3}), tmp_path / "second")
    assert second.join() == 2
    assert "in which another is at work" in second.output
    assert num_lines(directory) >= 3
    assert (directory / "config.yaml").read_text() == config
    first.send(signal.SIGKILL)
    third = Child(arguments(directory, {**endless, "steps": 10}), tmp_path / "third")
    assert third.join() == 0, third.output  # the lock ended with its process


def lock_slowly(directory: Path, opened: Any, go_on: Any, answers: Any) -> None:
    """Open the lock file, wait, then lock it, as a process does that is not scheduled in between."""
    real = fcntl.lockf

    def lockf(*arguments: Any) -> None:
        if not opened.is_set():
            opened.set()
            assert go_on.wait(PATIENCE)
        real(*arguments)

    fcntl.lockf = lockf
    try:
        lock = DirectoryLock(directory)
    except ValueError as error:
        answers.put(str(error))
    else:
        held = os.path.samestat(os.fstat(lock.file.fileno()), lock.path.stat())
        answers.put("holds the file that others would lock" if held else "holds another file")


@pytest.mark.parametrize("others", [0, 1])
def test_a_lock_released_between_opening_and_locking_is_not_held_twice(others: int, tmp_path: Path) -> None:
    opened, go_on, answers = CONTEXT.Event(), CONTEXT.Event(), CONTEXT.Queue()
    first = DirectoryLock(tmp_path)
    second = CONTEXT.Process(target=lock_slowly, args=(tmp_path, opened, go_on, answers))
    second.start()
    assert opened.wait(PATIENCE)
    first.release()
    third = DirectoryLock(tmp_path) if others else None
    go_on.set()
    answer = answers.get(timeout=PATIENCE)
    second.join(PATIENCE)
    if third is None:
        assert answer == "holds the file that others would lock"
    else:
        assert "in which another is at work" in answer
        third.release()
        assert list(tmp_path.iterdir()) == []


def test_a_directory_that_was_replaced_keeps_the_lock_of_its_new_owner(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    lock.release()
    assert (tmp_path / "run" / ".lock").exists()


def stream_in_a_group_of_its_own() -> None:
    os.setsid()
    batches.RESIDENT_BYTES = 0


def test_a_signal_to_the_whole_group_saves_although_workers_get_it_too(
    tmp_path: Path, whole_runs: Callable[..., Path]
) -> None:
    directory = tmp_path / "run"
    command = arguments(directory, {**ADAPTIVE, "workers": 2})
    child = Child(command, tmp_path / "log", stream_in_a_group_of_its_own)
    assert child.wait_until(lambda: num_lines(directory) >= 2)
    os.killpg(child.process.pid, signal.SIGTERM)
    assert child.join() == 128 + signal.SIGTERM, child.output
    assert "stopped at step" in child.output
    again = Child(command, tmp_path / "log", stream_in_a_group_of_its_own)
    assert again.join() == 0, again.output
    assert_same_run(directory, whole_runs("adaptive", ADAPTIVE))


def test_a_killed_run_with_workers_can_be_resumed_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command = arguments(directory, {**ADAPTIVE, "workers": 2})
    child = Child(command, tmp_path / "log", stream_in_a_group_of_its_own)
    assert child.wait_until(lambda: num_lines(directory) >= 2)
    child.send(signal.SIGKILL)
    again = Child(command, tmp_path / "log", stream_in_a_group_of_its_own)
    assert again.join() == 0, again.output


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    pixels = torch.randint(256, (60, 16, 16, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image.numpy()).save(folder / f"{number:02d}.png")
    return folder


def train_on(folder: Path, output: Path, *settings: str) -> None:
    data = [f"--data.folder={folder}", "--data.size=16", "--data.held_out=0.2"]
    kairostep.cli.main(["train", "images", *data, f"--output={output}", *QUICK, *settings])


def test_data_that_changed_are_not_trained_on(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_on(photos, tmp_path / "run")
    Image.new("RGB", (16, 16)).save(photos / "zz.png")
    with pytest.raises(SystemExit) as ended:
        train_on(photos, tmp_path / "run", "--steps=6")
    assert ended.value.code == 2
    assert "must stay as they were, but have changed" in capsys.readouterr().err


BLOCKS = {"block_out_channels": (8, 8), "norm_num_groups": 4, "sample_size": 16, "latent_channels": 2}
BLOCKS |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
AUTOENCODERS = {"kl": (AutoencoderKL, BLOCKS), "vq": (VQModel, {**BLOCKS, "num_vq_embeddings": 8})}


@pytest.mark.parametrize("kind", AUTOENCODERS)
def test_a_run_in_latents_ends_with_a_model_that_loads(kind: str, photos: Path, tmp_path: Path) -> None:
    autoencoder, blocks = AUTOENCODERS[kind]
    autoencoder(**blocks).save_pretrained(tmp_path / "autoencoder")
    places = [f"--autoencoder={tmp_path / 'autoencoder'}", f"--cache={tmp_path / 'cache'}"]
    train_on(photos, tmp_path / "run", *places)
    network = UNet2DModel.from_pretrained(tmp_path / "run" / "model" / "unet")
    assert network.config.in_channels == 2
    assert network.config.sample_size == 8
    assert isinstance(autoencoder.from_pretrained(tmp_path / "run" / "model" / "autoencoder"), autoencoder)
    with Image.open(next((tmp_path / "run" / "samples").glob("*.png"))) as grid:
        assert min(grid.size) >= 8 * 16  # pixels, not latents


@pytest.mark.parametrize(
    ("sampler", "new_options"),
    [("speed", ["k", "tau", "lam", "mirrored"]), ("adaptive", ["standardised", "bounded"]), ("curriculum", [])],
)
def test_a_run_that_an_earlier_version_left_goes_on(tmp_path: Path, sampler: str, new_options: list[str]) -> None:
    """Options came later, and states did not name their sampler nor a policy its map to a and b."""
    settings = {**SMALL, "sampler": sampler, "steps": 14}
    settings |= {"sampler.start": 2, "sampler.end": 9} if sampler == "curriculum" else {}
    whole = train_here(tmp_path / "whole", settings).directory
    run = train_here(tmp_path / "run", {**settings, "steps": 7}).directory
    config = yaml.safe_load((run / "config.yaml").read_text())
    for option in new_options:
        del config["sampler"][option]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (path,) = (run / "checkpoints").glob("*.safetensors")
    state, facts = checkpoint.read(path), checkpoint.read_facts(path)
    names = ("kind", "to_beta._extra_state")
    kept = {key: value for key, value in state["trainer"]["sampler"].items() if not key.endswith(names)}
    assert len(kept) < len(state["trainer"]["sampler"])
    checkpoint.write(path, {**state, "trainer": {**state["trainer"], "sampler": kept}}, facts)
    train_here(run, settings)
    expected, found = (
        checkpoint.read(d / "checkpoints" / "step-00000014.safetensors")["trainer"] for d in (whole, run)
    )
    for part in ("model", "sampler"):
        assert expected[part].keys() == found[part].keys()
        assert all(torch.equal(value, found[part][key]) for key, value in expected[part].items())
