"""A run as a person meets it: seeds, config.yaml, more steps, the model in the form that diffusers loads."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import DDPMPipeline, EDMEulerScheduler, FlowMatchEulerDiscreteScheduler, UNet2DModel
from PIL import Image
from small_runs import (
    ADAPTIVE,
    SMALL,
    arguments,
    assert_same_run,
    assert_same_state,
    checkpoint_paths,
    configure,
    last_step,
    lines_of,
    same_bits,
    state_of,
    train_here,
)

import kairostep
import kairostep.cli
from kairostep.generation import generate
from kairostep.runs import directory
from kairostep.training import Run
from kairostep.training.monitor import NUM_GRID_IMAGES

SHORT = {**SMALL, "steps": 12}


def refusal(capsys: pytest.CaptureFixture[str], command: list[str]) -> str:
    """Return the message with which the command is refused."""
    with pytest.raises(SystemExit) as ended:
        kairostep.cli.main(command)
    assert ended.value.code == 2
    return capsys.readouterr().err


# Seeds


@pytest.mark.parametrize("name", ["adaptive", "labels"])
def test_the_same_seed_gives_the_same_run(name: str, tmp_path: Path) -> None:
    settings = {**ADAPTIVE, "steps": 15, **({"label_dropout": 0.2} if name == "labels" else {})}
    first, second, other = (tmp_path / part for part in ("first", "second", "other"))
    train_here(first, settings)
    torch.rand(17)
    train_here(second, settings)
    train_here(other, {**settings, "seed": 1})
    assert_same_run(second, first)
    losses = [[line["loss"] for line in lines_of(path) if "loss" in line] for path in (first, other)]
    assert all(a != b for a, b in zip(*losses, strict=True))
    weights = [state_of(path)["trainer"]["model"] for path in (first, other)]
    differing = [name for name in weights[0] if not same_bits(weights[0][name], weights[1][name])]
    assert differing == list(weights[0])


# config.yaml


def test_config_has_provenance_and_trains_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_runs: Callable[..., Path]
) -> None:
    whole = whole_runs("adaptive", ADAPTIVE)
    written = yaml.safe_load((whole / "config.yaml").read_text())
    provenance = written.pop("provenance")
    assert provenance["kairostep"] == kairostep.__version__
    assert provenance["torch"] == torch.__version__
    assert provenance["device"].startswith("cpu: ")
    assert provenance["processes"] == 1
    assert {"python", "diffusers", "accelerate", "safetensors", "numpy", "commit"} <= set(provenance)
    chosen = {"name": "adaptive", "every": 5, "hidden": 16, "sweep": 20, "reward_rows": 8}
    assert written["sampler"].items() >= chosen.items()
    assert written["sampler"]["learning_rate"] == 0.01  # a default of today, also if it changes
    assert written["prediction"] == "epsilon"  # defaults that depend on others are filled in
    again = tmp_path / "again"
    kairostep.cli.main(["train", "--config", str(whole / "config.yaml"), f"--output={again}"])
    assert_same_run(again, whole)


def test_commit_is_that_of_the_code_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(kairostep.__file__).parent
    found = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    expected = found.stdout.strip() if found.returncode == 0 else None
    assert (directory.git_commit() or "").removesuffix("+") == (expected or "")

    def hangs(*arguments: Any, **options: Any) -> None:
        raise subprocess.TimeoutExpired("git", 10)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert directory.git_commit() is None


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("seed", {"seed": 1}),
        ("batch_size", {"batch_size": 8}),
        ("learning_rate", {"learning_rate": 1e-3}),
        ("sampler", {"sampler": "logit_normal"}),
        ("sampler.stratified", {"sampler": "uniform", "sampler.stratified": False}),
        ("network.dropout", {"network.dropout": 0.1}),
        ("label_dropout", {"label_dropout": 0.1}),
        ("process", {"process": "cosine"}),
        ("ema_decay", {"ema_decay": 0.5}),
        ("accumulate", {"accumulate": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_decides_the_weights_cannot_change(
    key: str, change: dict[str, Any], whole_runs: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = whole_runs("short", SHORT)
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    message = refusal(capsys, arguments(whole, {**SHORT, **change}))
    assert f"({key}: " in message
    assert "another --output" in message
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def test_a_run_is_not_overwritten_without_resume(
    whole_runs: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = whole_runs("short", SHORT)
    before = checkpoint_paths(whole)[-1].read_bytes()
    assert "already holds a run" in refusal(capsys, arguments(whole, {**SHORT, "resume": "false"}))
    assert checkpoint_paths(whole)[-1].read_bytes() == before


def test_settings_that_leave_the_weights_alone_may_change(tmp_path: Path, whole_runs: Callable[..., Path]) -> None:
    found = tmp_path / "run"
    train_here(found, {**SHORT, "steps": 5})
    train_here(found, {**SHORT, "log_every": 3, "checkpoint_every": 2, "held_out_images": 0, "keep_checkpoints": 4})
    assert_same_state(state_of(found)["trainer"], state_of(whole_runs("short", SHORT))["trainer"])
    assert [int(path.stem[5:]) for path in checkpoint_paths(found)] == [5, 6, 8, 10, 12]  # 5 is the best, by default


def test_more_steps_go_on_and_export_again(tmp_path: Path, whole_runs: Callable[..., Path]) -> None:
    found, whole = tmp_path / "run", whole_runs("adaptive", ADAPTIVE)
    train_here(found, {**ADAPTIVE, "steps": 20})
    weights = "model/unet/diffusion_pytorch_model.safetensors"
    early = (found / weights).read_bytes()
    train_here(found, ADAPTIVE)
    assert last_step(found) == 50
    assert_same_state(state_of(found)["trainer"], state_of(whole)["trainer"])
    assert (found / weights).read_bytes() == (whole / weights).read_bytes() != early
    assert sorted(path.name for path in (found / "samples").iterdir()) == ["step-00000020.png", "step-00000050.png"]
    assert yaml.safe_load((found / "config.yaml").read_text())["steps"] == 50


def test_a_cosine_cannot_be_stretched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**SHORT, "schedule": "cosine", "steps": 4}
    train_here(tmp_path / "run", settings)
    assert "(steps: 4 -> 8)" in refusal(capsys, arguments(tmp_path / "run", {**settings, "steps": 8}))


def test_a_finished_run_is_left_as_it_is(whole_runs: Callable[..., Path]) -> None:
    whole = whole_runs("short", SHORT)
    changing = {
        path: path.stat().st_mtime_ns
        for part in ("model", "samples", "checkpoints")
        for path in (whole / part).rglob("*")
    }
    lines = lines_of(whole)
    train_here(whole, SHORT)
    assert {path: path.stat().st_mtime_ns for path in changing} == changing
    assert lines_of(whole) == lines


def test_a_run_needs_a_directory() -> None:
    with pytest.raises(ValueError, match="pass --output=runs/NAME"):
        Run(replace(configure(Path("unused"), SHORT), output=None))


# The model


def assert_averaged_weights(run: Run, model: UNet2DModel) -> None:
    assert_same_state(dict(model.state_dict()), dict(run.trainer.ema.model.state_dict()))
    current = run.trainer.network.state_dict()
    assert any(not torch.equal(value, current[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("preset", "scheduler"), [("digits", "DDPMScheduler"), ("digits-flow", "FlowMatchEulerDiscreteScheduler")]
)
def test_the_model_is_a_pipeline(preset: str, scheduler: str, tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", SHORT, preset)
    pipeline = DDPMPipeline.from_pretrained(tmp_path / "run" / "model")
    assert type(pipeline.scheduler).__name__ == scheduler
    assert_averaged_weights(run, pipeline.unet)
    pipeline.set_progress_bar_config(disable=True)
    images = [
        pipeline(batch_size=2, num_inference_steps=4, generator=torch.Generator().manual_seed(0), output_type="np")
        for _ in range(2)
    ]
    assert images[0].images.shape == (2, 8, 8, 1)
    assert (images[0].images == images[1].images).all()
    assert images[0].images.std() > 0


def test_the_flow_pipeline_generates_what_we_generate(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", SHORT, "digits-flow")
    pipeline = DDPMPipeline.from_pretrained(tmp_path / "run" / "model")
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = pipeline(batch_size=2, num_inference_steps=6, generator=torch.Generator().manual_seed(0), output_type="np")
    ours = generate(run.trainer.ema.model, run.experiment.process, run.experiment.prediction, noise, steps=6)
    expected = (ours / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
    torch.testing.assert_close(torch.from_numpy(found.images), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("preset", "scheduler", "change"),
    [
        ("digits-edm", EDMEulerScheduler, {}),
        ("digits-flow", FlowMatchEulerDiscreteScheduler, {"label_dropout": 0.2}),
        ("digits-flow", FlowMatchEulerDiscreteScheduler, {"process.time_scale": 1.0}),
    ],
    ids=["edm", "by class", "time scale"],
)
def test_what_is_no_pipeline_loads_in_parts(
    preset: str, scheduler: type, change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_here(tmp_path / "run", {**SHORT, **change}, preset)
    folder = tmp_path / "run" / "model"
    unet = UNet2DModel.from_pretrained(folder / "unet")
    assert_averaged_weights(run, unet)
    assert isinstance(scheduler.from_pretrained(folder / "scheduler"), scheduler)
    assert not (folder / "model_index.json").exists()
    code = capsys.readouterr().out.split("or load the model: ")[1].strip()
    loaded: dict[str, Any] = {}
    exec(code, loaded)  # what the run printed works
    assert_averaged_weights(run, loaded["unet"])
    assert isinstance(loaded["scheduler"], scheduler)
    assert {"UNet2DModel", scheduler.__name__} <= set(re.findall(r"import (\w+)", code))
    if "label_dropout" in change:
        assert unet.config.num_class_embeds == 11  # ten digits, and none
        x, t = torch.randn(1, 1, 8, 8).expand(2, -1, -1, -1), torch.tensor([500.0, 500.0])
        outputs = unet(x, t, class_labels=torch.tensor([0, 10])).sample
        assert not torch.equal(outputs[0], outputs[1])


def test_samples_are_a_picture_of_a_grid(whole_runs: Callable[..., Path]) -> None:
    (path,) = (whole_runs("short", SHORT) / "samples").iterdir()
    assert NUM_GRID_IMAGES == 64
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.width == picture.height >= 8 * 8
        assert len(set(picture.convert("L").tobytes())) > 10
