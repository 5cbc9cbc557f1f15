"""A folder of images: each one's seed its own, going on where it was stopped, never mixed with others."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from commands import contents
from PIL import Image
from torch import Tensor

from kairostep.diffusion import EPSILON, DiscreteProcess, FlowProcess, Objective
from kairostep.experiments import Component, Config
from kairostep.generation import image_folder
from kairostep.generation.image_folder import Request, default_folder, generate_images
from kairostep.networks import ddpm_unet
from kairostep.progress_meter import ProgressMeter
from kairostep.runs import Trained

SHAPE = (1, 8, 8)
QUICK = Request(num=13, solver="ddpm", steps=4, batch_size=5)


def trained_model(num_classes: int = 0, model: Callable[..., Any] | None = None) -> Trained:
    torch.manual_seed(0)
    network = ddpm_unet(
        8, 1, channels=8, multipliers=(1,), blocks=1, attention=(), dropout=0.0, num_classes=num_classes or None
    )
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    process = DiscreteProcess.linear()
    return Trained(
        config=Config(),
        process=process,
        prediction=EPSILON,
        objective=Objective(process),
        model=model or network.eval().requires_grad_(False),  # type: ignore[arg-type]
        shape=SHAPE,
        num_classes=num_classes,
        to_pixels=lambda x0: x0,
        clip=True,
        checkpoint=Path("run/checkpoints/step-00000010.safetensors"),
        step=10,
        weights="ema",
        digest="abc",
    )


@pytest.fixture
def state() -> PartialState:
    return PartialState(cpu=True)


def images_in(folder: Path) -> np.ndarray[Any, Any]:
    return np.stack([np.array(Image.open(path)) for path in sorted(folder.glob("*.png"))])


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "generation.json").read_text())
    return record


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of images that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "images"
    assert generate_images(trained_model(), QUICK, folder, PartialState(cpu=True)) == 13
    return folder


def test_a_folder_has_its_images_and_says_how_they_were_made(whole: Path) -> None:
    assert set(contents(whole)) == {"generation.json", *(f"{i:06d}.png" for i in range(13))}
    images = images_in(whole)
    assert images.shape == (13, 8, 8)
    assert len({image.tobytes() for image in images}) == 13
    expected = {"checkpoint": "step-00000010.safetensors", "step": 10, "weights": "ema", "digest": "abc", "run": "run"}
    expected |= {"solver": "ddpm", "steps": 4, "network_evaluations": 4, "seed": 0, "guidance": 1.0, "classes": []}
    assert record_of(whole) == expected | {
        "precision": "fp32",
        "format": "png",
        "num": 13,
        "complete": True,
        "num_complete": 13,
    }


@pytest.mark.parametrize("batch_size", [1, 4, 13, 100])
def test_an_image_does_not_depend_on_the_batch_size(
    batch_size: int, whole: Path, tmp_path: Path, state: PartialState
) -> None:
    generate_images(trained_model(), replace(QUICK, batch_size=batch_size), tmp_path, state)
    difference = images_in(tmp_path).astype(int) - images_in(whole)
    assert np.abs(difference).max() <= 1  # the network rounds differently


def test_more_images_begin_with_the_same_ones(whole: Path, tmp_path: Path, state: PartialState) -> None:
    shutil.copytree(whole, tmp_path / "more")
    before = contents(whole)
    assert generate_images(trained_model(), replace(QUICK, num=16), tmp_path / "more", state) == 3
    after = contents(tmp_path / "more")
    assert all(after[name] == before[name] for name in before if name.endswith("png"))
    assert record_of(tmp_path / "more")["num"] == 16


def test_the_npz_has_the_same_images(whole: Path, tmp_path: Path, state: PartialState) -> None:
    generate_images(trained_model(), replace(QUICK, format="npz"), tmp_path, state)
    assert set(contents(tmp_path)) == {"generation.json", "images.npz"}
    with np.load(tmp_path / "images.npz") as arrays:
        assert list(arrays) == ["images"]
        assert np.array_equal(arrays["images"][..., 0], images_in(whole))


class Stop(BaseException):
    """What a signal raises."""


@pytest.mark.parametrize("format", ["png", "npz"])
@pytest.mark.parametrize("at", [0, 5, 9])
def test_what_was_interrupted_goes_on(
    format: str, at: int, whole: Path, tmp_path: Path, state: PartialState, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, num_calls = trained_model(), 0

    def model(x: Tensor, time: Tensor) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at + 1:
            raise Stop
        return plain.model(x, time)

    request = replace(QUICK, format=format)
    with pytest.raises(Stop):
        generate_images(trained_model(model=model), request, tmp_path, state)
    assert not record_of(tmp_path)["complete"]
    assert not [name for name in contents(tmp_path) if name.startswith(".")]
    made = at // 4 * 5  # whole batches
    num_calls = 100
    assert generate_images(trained_model(model=model), request, tmp_path, state) == 13 - made
    assert num_calls - 100 == 4 * -(-(13 - made) // 5)
    assert record_of(tmp_path)["complete"]
    if format == "png":
        assert contents(tmp_path) == contents(whole)
    else:
        with np.load(tmp_path / "images.npz") as arrays:
            assert np.array_equal(arrays["images"][..., 0], images_in(whole))
    before = contents(tmp_path)
    assert generate_images(trained_model(model=model), request, tmp_path, state) == 0
    assert contents(tmp_path) == before


def test_holes_are_filled(whole: Path, tmp_path: Path, state: PartialState) -> None:
    folder = tmp_path / "holes"
    shutil.copytree(whole, folder)
    for image in (0, 7, 8):
        (folder / f"{image:06d}.png").unlink()
    assert generate_images(trained_model(), QUICK, folder, state) == 3
    assert np.abs(images_in(folder).astype(int) - images_in(whole)).max() <= 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, r"\(seed: 0 -> 1\)"),
        ({"steps": 5}, r"\(steps: 4 -> 5; network_evaluations: 4 -> 5\)"),
        ({"solver": "ddim"}, r"\(solver: ddpm -> ddim\)"),
        ({"precision": "bf16"}, r"\(precision: fp32 -> bf16\)"),
        ({"format": "npz"}, r"\(format: png -> npz\)"),
        ({"num": 12}, r"\(num: 13 -> 12\)"),
    ],
)
def test_other_settings_are_refused_and_nothing_is_touched(
    changed: dict[str, Any], message: str, whole: Path, state: PartialState
) -> None:
    before = contents(whole)
    with pytest.raises(ValueError, match=f"were generated otherwise {message}: pass the same settings to go on"):
        generate_images(trained_model(), replace(QUICK, **changed), whole, state)
    assert contents(whole) == before


def test_other_weights_are_refused(whole: Path, state: PartialState) -> None:
    with pytest.raises(ValueError, match=r"\(step: 10 -> 20; digest: abc -> def\)"):
        generate_images(replace(trained_model(), step=20, digest="def"), QUICK, whole, state)


def test_a_folder_of_something_else_is_refused(tmp_path: Path, state: PartialState) -> None:
    (tmp_path / "photo.png").write_bytes(b"dear")
    with pytest.raises(ValueError, match=r"images must go to an empty folder or one with generation\.json"):
        generate_images(trained_model(), QUICK, tmp_path, state)
    assert contents(tmp_path) == {"photo.png": b"dear"}


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_a_damaged_record_is_named(content: bytes, tmp_path: Path, state: PartialState) -> None:
    (tmp_path / "generation.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"generation\.json must be what `kairostep generate` wrote, got"):
        generate_images(trained_model(), QUICK, tmp_path, state)


def test_a_finished_npz_does_not_grow(tmp_path: Path, state: PartialState) -> None:
    request = replace(QUICK, num=3, format="npz")
    generate_images(trained_model(), request, tmp_path, state)
    with pytest.raises(ValueError, match=r"\(num: 3 -> 4\)"):
        generate_images(trained_model(), replace(request, num=4), tmp_path, state)


def test_samples_that_are_not_finite_are_refused(tmp_path: Path, state: PartialState) -> None:
    broken = trained_model(model=lambda x, time: x * torch.nan)
    with pytest.raises(ValueError, match="samples must be finite, got others in images 0 to 4: choose another"):
        generate_images(broken, QUICK, tmp_path, state)
    assert set(contents(tmp_path)) == {"generation.json"}


@pytest.mark.parametrize(("solver", "guidance"), [("ddpm", 1.0), ("ddim", 2.0), ("heun", 1.0)])
def test_progress_counts_the_images_by_the_evaluations_they_take(
    solver: str, guidance: float, tmp_path: Path, state: PartialState, monkeypatch: pytest.MonkeyPatch
) -> None:
    meters = []

    class Kept(ProgressMeter):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            meters.append(self)

    monkeypatch.setattr(image_folder, "ProgressMeter", Kept)
    request = Request(num=7, steps=3, batch_size=4, solver=solver, guidance=guidance)
    generate_images(trained_model(num_classes=3), request, tmp_path / "made", state)
    (meter,) = meters
    assert meter.done == pytest.approx(7)


def test_classes_come_in_turn(tmp_path: Path, state: PartialState) -> None:
    seen: list[int] = []
    plain = trained_model(num_classes=3)

    def model(x: Tensor, time: Tensor, class_labels: Tensor) -> Any:
        seen.extend(class_labels.tolist())
        return plain.model(x, time, class_labels=class_labels)

    one = Request(num=7, steps=1, batch_size=3, format="npz")
    generate_images(trained_model(3, model), one, tmp_path / "all", state)
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    seen.clear()
    generate_images(trained_model(3, model), replace(one, classes=(2, 1), guidance=2.0), tmp_path / "some", state)
    assert seen == [2, 1, 2, 3, 3, 3, 1, 2, 1, 3, 3, 3, 2, 3]  # beside each batch the null class
    assert record_of(tmp_path / "some")["network_evaluations"] == 2
    with np.load(tmp_path / "some" / "images.npz") as arrays:
        assert arrays["labels"].tolist() == [2, 1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize(
    ("num_classes", "changed", "message"),
    [
        (0, {"guidance": 2.0}, "need a model with classes, got guidance 2.0 for one without"),
        (0, {"classes": (1,)}, r"need a model with classes, got classes \(1,\) for one without"),
        (3, {"classes": (0, 3)}, r"classes must be in 0\.\.2, got 3"),
        (0, {"steps": 1001}, "steps must be at most the 1000 of the process, got 1001"),
    ],
)
def test_what_a_model_cannot_do_is_refused(
    num_classes: int, changed: dict[str, Any], message: str, tmp_path: Path, state: PartialState
) -> None:
    with pytest.raises(ValueError, match=message):
        generate_images(trained_model(num_classes), replace(QUICK, **changed), tmp_path / "new", state)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num", 0, "num must be a whole number of at least 1, got 0"),
        ("batch_size", 0, "batch_size must be a whole number of at least 1, got 0"),
        ("seed", -1, r"seed must be a whole number in \[0, 2\*\*63\), got -1"),
        ("guidance", -1.0, "guidance must be a finite number of at least 0, got -1.0"),
        ("precision", "fp16", "precision must be one of 'fp32', 'bf16', got 'fp16'"),
        ("format", "jpg", "format must be one of 'png', 'npz', got 'jpg'"),
    ],
)
def test_what_cannot_be_asked_for(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(**{name: value})


def test_the_default_folder_names_what_was_chosen() -> None:
    trained = trained_model(3)
    assert default_folder(trained, Request()) == Path("run/generated/ddim-200-seed0-step10")
    chosen = Request(
        solver="heun", seed=4, guidance=1.5, classes=(0, 2), precision="bf16", format="npz", num=5, batch_size=1
    )
    name = "heun-50-seed4-step10-model-guidance1.5-classes0_2-bf16-npz"
    assert default_folder(replace(trained, weights="model"), chosen) == Path("run/generated") / name


def test_flows_have_no_ddpm(tmp_path: Path, state: PartialState) -> None:
    with pytest.raises(ValueError, match="solver ddpm needs a process of discrete steps, got FlowProcess"):
        generate_images(replace(trained_model(), process=FlowProcess()), QUICK, tmp_path / "new", state)


def test_classes_that_were_not_trained_are_not_made(tmp_path: Path, state: PartialState) -> None:
    seen: list[int] = []
    plain = trained_model(num_classes=3)

    def model(x: Tensor, time: Tensor, class_labels: Tensor) -> Any:
        seen.extend(class_labels.tolist())
        return plain.model(x, time, class_labels=class_labels)

    config = Config(data=Component("cifar10", {"only_classes": [2, 0]}))
    trained = replace(trained_model(3, model), config=config)
    generate_images(trained, Request(num=4, steps=1, format="npz"), tmp_path / "all", state)
    assert seen == [0, 2, 0, 2]
    assert record_of(tmp_path / "all")["classes"] == [0, 2]
    with pytest.raises(ValueError, match="classes must be among those trained, 0, 2, got 1: leave out"):
        generate_images(trained, Request(num=4, steps=1, classes=(0, 1)), tmp_path / "some", state)


def test_guidance_needs_a_null_class_that_was_trained(tmp_path: Path, state: PartialState) -> None:
    trained = replace(trained_model(3), config=Config(label_dropout=0.0))
    with pytest.raises(
        ValueError, match=r"trained without labels too, got guidance 2.0 .* --label_dropout=0: leave it"
    ):
        generate_images(trained, replace(QUICK, guidance=2.0), tmp_path / "new", state)
    assert not (tmp_path / "new").exists()
