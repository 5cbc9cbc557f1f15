"""What can go wrong in a run ends with a message, the last good checkpoint, and the same run afterwards."""

import os
import resource
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import (
    ADAPTIVE,
    SMALL,
    Child,
    arguments,
    assert_same_run,
    assert_same_state,
    checkpoint_paths,
    configure,
    flat,
    hidden_files,
    last_step,
    lines_of,
    state_of,
    train_here,
)

import kairostep.cli
from kairostep.data import Batch
from kairostep.runs.checkpoint import read
from kairostep.training import run as run_module
from kairostep.training.trainer import Step


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an adaptive run that was stopped at step 21."""
    directory = tmp_path_factory.mktemp("stopped") / "run"
    run = run_module.Run(configure(directory, ADAPTIVE))
    step = run.trainer.step

    def step_and_signal(batches: Sequence[Batch]) -> Step:
        taken = step(batches)
        if run.trainer.step_number == 21:
            os.kill(os.getpid(), signal.SIGTERM)
        return taken

    run.trainer.step = step_and_signal  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        run.train()
    assert last_step(directory) == 21
    return directory


@pytest.fixture
def half_run(stopped_run: Path, tmp_path: Path) -> Path:
    """A directory of one's own with that run."""
    return Path(shutil.copytree(stopped_run, tmp_path / "run"))


def limit_files(num_bytes: int) -> None:
    """From here on no file can grow beyond this size: what is beyond is lost, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


# A full disk


def test_a_full_disk_stops_the_run_before_its_checkpoint_is_lost(
    half_run: Path, tmp_path: Path, whole_runs: Callable[..., Path]
) -> None:
    whole_size = checkpoint_paths(half_run)[-1].stat().st_size
    good = state_of(half_run)
    child = Child(arguments(half_run, ADAPTIVE), tmp_path / "log", partial(limit_files, whole_size // 2))
    assert child.join() == 1
    assert "Traceback" not in child.output
    assert f"cannot write to {half_run} at step 28" in child.output
    assert f"the last good checkpoint is {checkpoint_paths(half_run)[-1]}" in child.output
    assert "go on with: kairostep train" in child.output
    assert last_step(half_run) == 21
    assert_same_state(state_of(half_run), good)
    assert hidden_files(half_run) == []
    kairostep.cli.main(arguments(half_run, ADAPTIVE))
    assert_same_run(half_run, whole_runs("adaptive", ADAPTIVE))


def test_a_full_disk_tears_a_line_of_metrics(half_run: Path, tmp_path: Path, whole_runs: Callable[..., Path]) -> None:
    metrics = half_run / "metrics.jsonl"
    limit = metrics.stat().st_size + 100
    child = Child(arguments(half_run, ADAPTIVE), tmp_path / "log", partial(limit_files, limit))
    assert child.join() == 1
    assert "Traceback" not in child.output
    assert f"cannot write to {half_run} at step 25" in child.output
    assert metrics.stat().st_size == limit
    assert not metrics.read_text().endswith("\n")
    kairostep.cli.main(arguments(half_run, ADAPTIVE))
    assert_same_run(half_run, whole_runs("adaptive", ADAPTIVE))


def fill_disk_before_export() -> None:
    real = run_module.export

    def export(*arguments: object) -> str:
        limit_files(20_000)
        return real(*arguments)  # type: ignore[arg-type]

    run_module.export = export


def test_a_full_disk_at_the_export_leaves_a_run_that_can_be_exported(
    half_run: Path, tmp_path: Path, whole_runs: Callable[..., Path]
) -> None:
    child = Child(arguments(half_run, ADAPTIVE), tmp_path / "log", fill_disk_before_export)
    assert child.join() == 1
    assert "Traceback" not in child.output
    assert f"cannot write to {half_run} at step 50" in child.output
    assert not (half_run / "model").exists()
    kairostep.cli.main(arguments(half_run, ADAPTIVE))
    assert_same_run(half_run, whole_runs("adaptive", ADAPTIVE))


def test_a_directory_that_cannot_be_written_is_named_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        kairostep.cli.main(arguments(tmp_path / "file" / "run", SMALL))
    assert ended.value.code in (1, 2)
    assert str(tmp_path / "file" / "run") in capsys.readouterr().err


# A killed export


def die_before_export() -> None:
    run_module.export = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_was_extended_and_killed_before_its_export_is_exported_later(
    tmp_path: Path, whole_runs: Callable[..., Path]
) -> None:
    directory = tmp_path / "run"
    train_here(directory, {**ADAPTIVE, "steps": 21})  # has a model of step 21
    child = Child(arguments(directory, ADAPTIVE), tmp_path / "log", die_before_export)
    assert child.join() == -signal.SIGKILL
    assert last_step(directory) == 50
    kairostep.cli.main(arguments(directory, ADAPTIVE))
    for path in ("model/unet/diffusion_pytorch_model.safetensors", "samples/step-00000050.png"):
        assert (directory / path).read_bytes() == (whole_runs("adaptive", ADAPTIVE) / path).read_bytes()


# A loss that is no number


def test_a_loss_that_turns_nan_stops_the_run(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = {**SMALL, "learning_rate": 1e30, "warmup_steps": 0, "max_grad_norm": "null"}
    child = Child(arguments(directory, settings), tmp_path / "log")
    assert child.join() == 1
    assert "Traceback" not in child.output
    assert "no longer finite at step" in child.output
    assert "lower --learning_rate" in child.output
    assert "the last good checkpoint is none yet" in child.output
    assert not (directory / "model").exists()


def train_with_nan_from(step: int, directory: Path, settings: Mapping[str, Any]) -> str:
    """Train until the optimizer spoils the weights in this step; return the message that the run ends with."""
    run = run_module.Run(configure(directory, settings))
    plain = run.trainer.step

    def spoiled(batches: Sequence[Batch]) -> Step:
        taken = plain(batches)
        if run.trainer.step_number == step:
            with torch.no_grad():
                next(run.trainer.network.parameters())[0] = torch.nan
        return taken

    run.trainer.step = spoiled  # type: ignore[method-assign]
    with pytest.raises(run_module.RunError) as ended:
        run.train()
    return str(ended.value)


@pytest.mark.parametrize("step", [8, 13, 14])  # lines are written every 5 steps, checkpoints every 7
def test_weights_that_are_not_finite_are_never_a_good_checkpoint(step: int, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    message = train_with_nan_from(step, directory, SMALL)
    assert "no longer finite" in message
    named = checkpoint_paths(directory)[-1]
    assert f"the last good checkpoint is {named}" in message
    for path in checkpoint_paths(directory):
        tensors = [value for value in flat(read(path)["trainer"]).values() if isinstance(value, torch.Tensor)]
        assert all(bool(tensor.isfinite().all()) for tensor in tensors)


# Damaged checkpoints


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    if kind == "flipped":
        content[-100] ^= 1
    elif kind == "facts":
        position = content.index(b"held_out")
        content[position - 1] ^= 1
    path.write_bytes(bytes(content[: len(content) // 2]) if kind == "truncated" else bytes(content))


@pytest.mark.parametrize("kind", ["flipped", "truncated", "facts"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    kind: str, half_run: Path, tmp_path: Path, whole_runs: Callable[..., Path]
) -> None:
    newest = checkpoint_paths(half_run)[-1]
    damage(newest, kind)
    child = Child(arguments(half_run, ADAPTIVE), tmp_path / "log")
    assert child.join() == 0, child.output
    assert f"{newest} is damaged" in child.output
    assert "using the one before" in child.output
    assert "going on from step 14 to 50" in child.output
    assert_same_run(half_run, whole_runs("adaptive", ADAPTIVE))


def test_a_run_without_a_readable_checkpoint_is_refused(half_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(half_run)
    for path in checkpoint_paths(half_run):
        damage(path, "flipped")
    with pytest.raises(SystemExit) as ended:
        kairostep.cli.main(arguments(half_run, ADAPTIVE))
    assert ended.value.code == 2
    assert "none of the 2 checkpoints in" in capsys.readouterr().err
    assert lines_of(half_run) == lines  # nothing was thrown away
