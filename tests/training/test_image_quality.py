"""FID along the way and kept checkpoints: measured with averaged weights, and training never notices."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SMALL, assert_same_state, checkpoint_paths, configure, lines_of, state_of, train_here

import kairostep.cli
from kairostep.evaluation import features
from kairostep.runs import RunHistory
from kairostep.training import Run

PIXELS = """
import torch
def make():
    return lambda images: torch.nn.functional.avg_pool2d(images.float(), 2).flatten(1)
"""
SHORT = {**SMALL, "steps": 20, "checkpoint_every": 10, "evaluate_every": 20}
MEASURED: dict[str, Any] = {**SHORT, "fid_every": 8, "fid_images": 24, "keep_every": 6, "keep_checkpoints": 1}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    place = tmp_path_factory.mktemp("features")
    (place / "some_pixels.py").write_text(PIXELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        yield {**MEASURED, "features": "some_pixels:make", "cache": place / "cache"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]) -> Path:
    run = tmp_path_factory.mktemp("runs") / "measured"
    train_here(run, settings)
    return run


def test_measuring_changes_no_number_of_training(tmp_path: Path, measured: Path) -> None:
    plain = tmp_path / "plain"
    train_here(plain, SHORT)
    assert_same_state(state_of(measured)["trainer"], state_of(plain)["trainer"])
    found = {line["step"]: line for line in lines_of(measured)}
    for line in lines_of(plain):
        own = {key: value for key, value in line.items() if key != "seconds"}
        assert {key: found[line["step"]][key] for key in own} == own


def test_images_are_measured_at_their_steps_and_at_the_end(measured: Path) -> None:
    lines = {line["step"]: line["generated"] for line in lines_of(measured) if "generated" in line}
    assert list(lines) == [8, 16, 20]
    for line in lines.values():
        assert line["num"] == 24
        assert {"fid", "kid", "precision", "recall", "kid_error"} <= set(line)
    history = RunHistory.read(measured)
    shown = [(line["checkpoint"], line["value"]) for line in history.evaluations if line["what"] == "fid"]
    assert shown == [(step, line["fid"]) for step, line in lines.items()]


def test_a_resumed_run_measures_the_same(tmp_path: Path, settings: dict[str, Any], measured: Path) -> None:
    train_here(tmp_path / "parts", {**settings, "steps": 9})
    train_here(tmp_path / "parts", settings)
    found, expected = (
        {line["step"]: line["generated"] for line in lines_of(run) if "generated" in line}
        for run in (tmp_path / "parts", measured)
    )
    assert {step: found[step] for step in expected} == expected


def test_time_of_measuring_is_not_time_of_training(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(configure(tmp_path / "run", settings))
    now, spent = [0.0], list[float]()

    def measure() -> dict[str, float]:
        spent.append(run.clock.seconds())
        now[0] += 1000.0
        return {"fid": 1.0}

    monkeypatch.setattr("kairostep.training.stopwatch.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(run.monitor, "measure_images", measure)
    run.train()
    assert len(spent) == 3
    assert run.clock.seconds() < 1000


def test_kept_checkpoints_are_never_removed(measured: Path) -> None:
    steps = [int(path.stem.removeprefix("step-")) for path in checkpoint_paths(measured)]
    assert {6, 12, 18, 20} <= set(steps)
    assert len(steps) <= 5  # the best may be another


def test_all_checkpoints_are_generated_from_and_evaluated(
    tmp_path: Path, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(measured, run)
    steps = [int(path.stem.removeprefix("step-")) for path in checkpoint_paths(run)]
    for place in ([], ["--output", str(tmp_path / "made")]):
        kairostep.cli.main(["generate", str(run), "--num", "8", "--steps", "2", "--checkpoint", "all", *place])
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == sorted(f"step-{step}" for step in steps)
    command = ["evaluate", str(run), "--num", "8", "--checkpoint", "all", "--features", "some_pixels:make"]
    kairostep.cli.main([*command, "--cache", str(tmp_path / "cache")])
    found = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [line["checkpoint"] for line in found if line["what"] == "fid"] == steps
    assert capsys.readouterr().out.count("8 images in") == 2 * len(steps)
    with pytest.raises(SystemExit) as left:
        kairostep.cli.main([*command, "--images", str(tmp_path / "made" / "step-6")])
    assert left.value.code == 2


def test_fid_without_a_network_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match=r"--fid_every needs the network.*--inception=FILE"):
        Run(configure(tmp_path / "run", MEASURED))
    assert not (tmp_path / "run" / "config.yaml").exists()
    with pytest.raises(ValueError, match="features must come from one network"):
        configure(tmp_path / "run", {**MEASURED, "features": "a:b", "inception": "c"})


def test_held_out_losses_of_ranges_average_to_the_loss(measured: Path) -> None:
    held_out = lines_of(measured)[-1]["held_out"]
    assert torch.tensor(held_out["loss_ranges"]).mean().item() == pytest.approx(held_out["loss"], rel=1e-6)
    assert RunHistory.read(measured).held_out[-1].loss_ranges == tuple(held_out["loss_ranges"])
