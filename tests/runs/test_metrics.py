"""`metrics.jsonl` holds what a hand-written loop measures, line by line; trackers show the same."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import train_by_hand
from small_runs import (
    ADAPTIVE,
    SMALL,
    Child,
    arguments,
    assert_same_run,
    configure,
    lines_of,
    num_lines,
    train_here,
)
from torch.testing import assert_close

import kairostep as ks
from kairostep.evaluation import held_out_loss
from kairostep.experiments import preset
from kairostep.runs.recorder import Recorder
from kairostep.training.monitor import SAMPLE_SEED

BIASED = {**ADAPTIVE, "sampler.unbiased": True, "label_dropout": 0.2}  # weights other than 1


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("metrics") / "run"
    train_here(directory, BIASED)
    return lines_of(directory)


def test_lines_come_when_they_are_due(lines: list[dict[str, Any]]) -> None:
    logged = [line["step"] for line in lines if "loss" in line]
    dense = [line["step"] for line in lines if "density" in line]
    held_out = [line["step"] for line in lines if "held_out" in line]
    assert logged == list(range(5, 51, 5))
    assert dense == list(range(10, 51, 10))
    assert held_out == sorted({*range(10, 51, 10), *range(7, 51, 7), 50})  # also ranks every checkpoint
    assert [line["step"] for line in lines] == sorted({*logged, *dense, *held_out})  # one line per step


def test_lines_have_these_fields(lines: list[dict[str, Any]]) -> None:
    plain = ["step", "images", "seconds", "training_evaluations", "probe_evaluations", "loss", "loss_quartiles"]
    for line in lines:
        if "loss" not in line:
            assert list(line) == ["step", "held_out"]
            continue
        assert list(line)[:9] == [*plain, "learning_rate", "sampler"]
        assert line["images"] == line["training_evaluations"] == 16 * line["step"]
        num_updates = math.ceil(line["step"] / 5)
        # before and after: 20 swept timesteps, 8 paid rows at each of 3 selected timesteps
        assert line["probe_evaluations"] == line["sampler"]["probe_evaluations"] == 2 * (20 + 8 * 3) * num_updates
        assert line["learning_rate"] == pytest.approx(preset("digits").learning_rate * min(1, line["step"] / 10))
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    assert seconds[0] > 0
    assert seconds == sorted(seconds)


def test_losses_are_those_of_a_hand_written_loop(lines: list[dict[str, Any]]) -> None:
    config = configure(Path("unused"), BIASED)
    logged = [line for line in lines if "loss" in line]
    seen = train_by_hand(config, 50).seen
    for line in logged:
        t, losses, weight = (
            torch.cat(part).double() for part in zip(*seen[line["step"] - 5 : line["step"]], strict=True)
        )
        assert weight.std() > 0
        assert line["loss"] == pytest.approx(float((losses * weight).mean()), rel=1e-12)
        for q in range(4):
            inside = losses[(t >= q / 4) & (t < (q + 1) / 4)]
            assert line["loss_quartiles"][q] == (
                pytest.approx(float(inside.mean()), rel=1e-12) if len(inside) else None
            )


@pytest.mark.parametrize("num_steps", [10, 50])
def test_density_diagnostics_and_held_out_loss_are_those_of_the_step(
    num_steps: int, lines: list[dict[str, Any]]
) -> None:
    by_hand = train_by_hand(configure(Path("unused"), BIASED), num_steps)
    experiment = by_hand.experiment
    line = next(line for line in lines if line["step"] == num_steps)
    assert line["density"] == experiment.sampler.density().tolist()
    assert sum(line["density"]) == pytest.approx(1, abs=1e-5)
    assert line["sampler"] == {name: value.item() for name, value in experiment.sampler.diagnostics().items()}
    num_rows = len(experiment.held_out)
    rows = [experiment.held_out.read(row * num_rows // 16) for row in range(16)]  # spread over the set
    x0 = experiment.held_out.to_x0(torch.stack([pixels for pixels, _ in rows]), None)
    labels = torch.tensor([label for _, label in rows])
    expected = held_out_loss(by_hand.average, experiment.objective, x0, labels=labels, seed=SAMPLE_SEED)
    assert line["held_out"]["loss"] == expected.loss
    assert line["held_out"]["vlb"] == expected.vlb
    assert line["held_out"]["num_evaluations"] == 16


def test_what_is_written_is_json_for_everybody(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.write({"step": 1, "loss": math.nan, "nested": {"x": [math.inf, 1.5]}})
    text = recorder.path.read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "loss": None, "nested": {"x": [None, 1.5]}}


@pytest.mark.parametrize("torn", ['{"step": 3, "loss": 0.', '{"st', "\0\0\0\0", '{"loss": 1}', "7", '"step"', "[]", ""])
def test_lines_after_a_step_and_torn_ones_are_forgotten(torn: str, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for step in (1, 2, 3, 4):
        recorder.write({"step": step})
    with recorder.path.open("a") as file:
        file.write(torn)
    recorder.resume(3)
    assert lines_of(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    recorder.write({"step": 4, "again": True})
    assert lines_of(tmp_path)[-1] == {"step": 4, "again": True}
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "damaged", [b'{"step": 2, "loss": "\xff"}', b'{"step": "two"}', b"[" * 100_000, b'{"step": 1%s}' % (b"0" * 400)]
)
def test_damaged_lines_are_dropped_and_the_file_is_named(
    damaged: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
    Recorder(tmp_path).resume(3)
    assert lines_of(tmp_path) == [{"step": 1}, {"step": 3}]
    assert caplog.messages == [f"1 lines of {path} cannot be read and are dropped"]


def test_metrics_in_a_pipe_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics must be in a file, got .*metrics\.jsonl: it is no regular file"):
        Recorder(tmp_path).resume(3)


def test_a_run_with_a_torn_last_line_goes_on(tmp_path: Path, whole_runs: Callable[..., Path]) -> None:
    directory = tmp_path / "run"
    child = Child(arguments(directory, ADAPTIVE), tmp_path / "log")
    assert child.wait_until(lambda: num_lines(directory) >= 3)
    child.send(9)
    path = directory / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: -len(content.splitlines()[-1]) // 2])
    train_here(directory, ADAPTIVE)
    assert_same_run(directory, whole_runs("adaptive", ADAPTIVE))


@pytest.mark.parametrize("ending", ["finished", "stopped"])
def test_tensorboard_shows_the_same_numbers(ending: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = {**SMALL, "trackers": "tensorboard", "steps": 20 if ending == "finished" else 1000}
    child = Child(arguments(directory, settings), tmp_path / "log")
    if ending == "finished":
        assert child.join() == 0, child.output
    else:
        assert child.wait_until(lambda: num_lines(directory) >= 4)
        assert child.send(15) == 128 + 15
    events = events_of(directory / "trackers")
    lines = {line["step"]: line for line in lines_of(directory)}
    for name, value in (("loss", lambda line: line.get("loss")), ("held_out/loss", held_out_of)):
        expected = {step: value(line) for step, line in lines.items() if value(line) is not None}
        assert len(expected) >= 2
        assert {step: pytest.approx(number, rel=1e-6) for step, number in events[name]} == expected


def held_out_of(line: dict[str, Any]) -> float | None:
    return line.get("held_out", {}).get("loss")


def events_of(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) by name, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = directory.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
    accumulator.Reload()
    names = accumulator.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in accumulator.Scalars(name)] for name in names}


def test_density_and_weights_tell_what_is_optimised(tmp_path: Path) -> None:
    often = {"density_every": 50, "log_every": 50, "batch_size": 64}
    train_here(tmp_path / "weighting", {**SMALL, **often, "weighting": "min_snr"})
    middle = (torch.arange(100) + 0.5) / 100
    process = ks.DiscreteProcess.linear()
    expected = ks.min_snr()(process.log_snr(middle), ks.EPSILON)
    assert_close(torch.tensor(lines_of(tmp_path / "weighting")[-1]["weights"]), expected)

    never_flat = {
        "sampler": "root_loss",
        "sampler.warmup": 1,
        "sampler.refresh": 40,
        "sampler.gate": 1.0,
    }  # not at the end
    train_here(tmp_path / "root", {**SMALL, **often, **never_flat, "log_every": 25, "steps": 150})
    last = lines_of(tmp_path / "root")[-1]
    density, weights = torch.tensor(last["density"]), torch.tensor(last["weights"])
    assert float(density.max() / density.min()) > 1.1
    effective = (density * weights).view(10, 10).sum(1)
    assert_close(effective / effective.sum(), torch.full((10,), 0.1), rtol=0.05, atol=0)  # the objective is kept
