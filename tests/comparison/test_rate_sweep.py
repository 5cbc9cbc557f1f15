"""`kairostep find-lr`: which rates it tries, what it suggests, and that it goes on where it was stopped."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from commands import contents, refused
from PIL import Image
from small_comparisons import SMALL
from small_runs import lines_of

import kairostep.cli
from kairostep.commands.find_lr import heading
from kairostep.comparison import rate_sweep
from kairostep.comparison.plan import Plan
from kairostep.comparison.rate_sweep import RateSweep, further_rates, geometric_rates, plan_sweep, train_for_loss
from kairostep.experiments import preset
from kairostep.experiments.config import load
from kairostep.training.monitor import Monitor
from kairostep.training.run import Run
from kairostep.training.run_errors import RunError

SWEEP = (*SMALL, "--steps=4", "--from=1e-3", "--to=2e-3")


def test_rates_rise_by_a_factor_up_to_the_last() -> None:
    assert geometric_rates(1e-4, 8e-4) == (1e-4, 2e-4, 4e-4, 8e-4)
    assert geometric_rates(1e-3, 5e-2, 10.0) == (1e-3, 1e-2)
    assert geometric_rates(3e-3, 3e-3) == (3e-3,)


@pytest.mark.parametrize(("low", "high", "factor"), [(0.0, 1.0, 2.0), (1e-2, 1e-3, 2.0), (1e-3, 1e-2, 1.0)])
def test_rates_that_do_not_rise_are_refused(low: float, high: float, factor: float) -> None:
    with pytest.raises(ValueError, match="rates must rise from above 0 by a factor above 1"):
        geometric_rates(low, high, factor)


def test_the_smallest_rate_that_ends_about_lowest_is_suggested_and_whether_to_look_further() -> None:
    inside = RateSweep({1e-3: 0.3, 2e-3: 0.2, 4e-3: 0.2005, 8e-3: None}, 100)
    assert inside.best == inside.suggested == 2e-3
    assert inside.verdict() == "--learning_rate=0.002: the lowest held-out loss after 100 steps, 0.2"
    alike = RateSweep({1e-3: 0.3, 2e-3: 0.2005, 4e-3: 0.2, 8e-3: 0.25}, 100)
    assert (alike.best, alike.suggested) == (4e-3, 2e-3)
    lowest = "the lowest held-out loss after 100 steps, 0.2 at 0.004"
    assert alike.verdict() == f"--learning_rate=0.002: the smallest rate within 0.5 % of {lowest}"
    assert "largest rate tried: pass a larger --to" in RateSweep({1e-3: 0.3, 2e-3: 0.2}, 100).verdict()
    assert "smallest rate tried: pass a smaller --from" in RateSweep({1e-3: 0.2, 2e-3: 0.3}, 100).verdict()
    with pytest.raises(ValueError, match=r"got none of 0\.001, 0\.002: pass a smaller --from"):
        RateSweep({1e-3: None, 2e-3: None}, 100).verdict()


def test_one_rate_is_neither_best_nor_largest() -> None:
    assert RateSweep({1e-3: 0.3}, 100).verdict() == (
        "--learning_rate=0.001: the held-out loss after 100 steps is 0.3; it is the only rate tried: "
        "pass --from and --to to try others"
    )
    assert heading([1e-3], 100) == "learning rate 0.001, 100 steps"


def plan(folder: Path, rates: tuple[float, ...] = (1e-3, 2e-3), *settings: str) -> Plan:
    return plan_sweep(folder, preset("digits"), [*SMALL, "--steps=4", *settings], rates)


def test_runs_are_short_without_a_warm_up_and_measure_the_end_alone_unless_told(tmp_path: Path) -> None:
    base = load(write(tmp_path / "long.yaml", "{steps: 5000, warmup_steps: 300, fid_every: 100, keep_every: 50}"))
    config = plan_sweep(tmp_path, base, SMALL, (1e-3,)).configs["sweep"]
    assert (config.steps, config.warmup_steps, config.evaluate_every) == (500, 0, 500)
    assert (config.fid_every, config.keep_every, config.sample_every) == (0, 0, 0)
    longest = load(write(tmp_path / "longest.yaml", "{steps: 800000}"))
    assert plan_sweep(tmp_path, longest, SMALL, (1e-3,)).configs["sweep"].steps == 3000
    told = plan_sweep(tmp_path, base, [*SMALL, "--steps=8", "--warmup_steps=2", "--evaluate_every=4"], (1e-3,))
    config = told.configs["sweep"]
    assert (config.steps, config.warmup_steps, config.evaluate_every) == (8, 2, 4)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("losses", "tried"),
    [
        ({1e-3: 0.3, 2e-3: 0.2}, [1e-3, 2e-3, 4e-3]),  # turns at the first further rate
        ({2e-3: 0.2, 4e-3: 0.1, 8e-3: 0.05, 16e-3: 0.01}, [1e-3, 2e-3, 4e-3, 8e-3, 16e-3]),  # three at most
        ({2e-3: 0.2, 4e-3: None}, [1e-3, 2e-3, 4e-3]),  # one diverged
        ({1e-3: 0.1, 2e-3: 0.2}, [1e-3, 2e-3]),
    ],
)
def test_larger_rates_are_tried_while_the_largest_is_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: dict[float, float | None], tried: list[float]
) -> None:
    monkeypatch.setattr(rate_sweep, "train_for_loss", lambda run: losses.get(run.rate, 0.3))
    rates = (1e-3, 2e-3)
    sweep = rate_sweep.sweep_rates(plan(tmp_path, rates), further_rates(rates, 2.0))
    assert list(sweep.losses) == tried
    assert list(rate_sweep.sweep_rates(plan(tmp_path, rates)).losses) == [1e-3, 2e-3]


def test_a_run_that_diverges_is_no_candidate_and_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = plan(tmp_path, (1e30,)).runs("sweep", 0)
    assert train_for_loss(run) is None
    assert capsys.readouterr().out.startswith("learning rate 1e+30: diverged, ")
    monkeypatch.setattr(rate_sweep, "train_run", lambda *_, **__: pytest.fail("it is known"))
    assert train_for_loss(run) is None
    assert capsys.readouterr().out == ""


def test_data_without_held_out_images_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the loss of held-out images, got none: pass --held_out_images=1024"):
        plan(tmp_path / "rates", (1e-3,), "--held_out_images=0")
    photos(tmp_path / "few", 4)
    with pytest.raises(ValueError, match="got none: pass data with a test part, or a folder of 50 images or more"):
        plan(tmp_path / "rates", (1e-3,), "--data=images", f"--data.folder={tmp_path / 'few'}", "--data.size=8")
    assert not (tmp_path / "rates").exists()


def photos(folder: Path, num: int) -> None:
    """Write images of two classes, each in a subfolder."""
    for number in range(num):
        path = folder / ("cats" if number % 2 else "dogs") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, number, 4 * number)).save(path)


def test_a_run_without_its_last_loss_is_named(tmp_path: Path) -> None:
    (run,) = plan(tmp_path, (1e-3,)).runs("sweep", 0)
    assert train_for_loss(run) is not None
    (run.directory / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="must hold the held-out loss of its last step, got none"):
        train_for_loss(run)


def test_a_run_whose_last_held_out_loss_is_not_finite_has_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Monitor, "evaluate", lambda monitor: {"loss": float("nan")})
    sweep = rate_sweep.sweep_rates(plan(tmp_path))
    assert sweep.losses == {1e-3: None, 2e-3: None}
    assert capsys.readouterr().out.count("diverged") == 2


def test_a_weighted_run_is_compared_by_what_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = rate_sweep.sweep_rates(plan(tmp_path, (1e-3,), "--weighting=debias"))
    (run,) = plan(tmp_path, (1e-3,), "--weighting=debias").runs("sweep", 0)
    (held_out,) = [line["held_out"] for line in lines_of(run.directory) if "held_out" in line]
    assert sweep.losses == {1e-3: held_out["weighted_loss"]}
    assert held_out["weighted_loss"] != pytest.approx(held_out["loss"], rel=0.01)
    assert capsys.readouterr().out.startswith("learning rate 0.001: weighted held-out loss ")
    assert "the weighted held-out loss after 4 steps" in sweep.verdict()


def test_checkpoints_along_the_way_measure_nothing(tmp_path: Path) -> None:
    (run,) = plan(tmp_path, (1e-3,), "--checkpoint_every=2").runs("sweep", 0)
    assert train_for_loss(run) is not None
    assert [line["step"] for line in lines_of(run.directory) if "held_out" in line] == [4]
    assert (run.directory / "checkpoints").is_dir()


def test_the_command_trains_each_rate_once_and_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["find-lr", "digits", *SWEEP, "--picture=rates.png"]
    kairostep.cli.main(command)
    printed = capsys.readouterr().out
    heading, first, second = printed.splitlines()[:3]  # no line of a run's own
    assert re.fullmatch("2 learning rates from 0.001 to 0.002, 4 steps each: about .* s", heading)
    assert first.startswith("learning rate 0.001: held-out loss ")
    assert second.startswith("learning rate 0.002: held-out loss ")
    assert "--learning_rate=" in printed
    assert Path("rates.png").stat().st_size > 10_000
    runs = sorted(Path("rates-digits/runs/sweep").glob("rate-*/seed-0/config.yaml"))
    assert [path.parts[3] for path in runs] == ["rate-0.001", "rate-0.002"]
    written = {path.name for path in runs[0].parent.iterdir()}
    assert not written & {"model", "samples"}
    lines = map(json.loads, (runs[0].parent / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "held_out" in line] == [4]
    kairostep.cli.main(command)
    again = capsys.readouterr().out
    assert again.splitlines()[1] == ""
    assert again.splitlines()[-3] == printed.splitlines()[-3]


@pytest.mark.parametrize(
    ("argument", "fix"),
    [
        ("--learning_rate=1e-3", "pass --from and --to"),
        ("--picture=rates.html", "--picture must end in .png"),
    ],
)
def test_what_it_cannot_do_is_refused_before_training(
    argument: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        kairostep.cli.main(["find-lr", "digits", argument])
    assert ended.value.code == 2
    assert fix in capsys.readouterr().err


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return the folder of a finished sweep, below the working directory."""
    monkeypatch.chdir(tmp_path)
    kairostep.cli.main(["find-lr", "digits", *SWEEP, "--output=rates"])
    capsys.readouterr()
    return Path("rates")


@pytest.mark.parametrize(
    ("name", "settings", "difference"),
    [
        ("digits", ["--batch_size=16"], "batch_size: 8 -> 16"),
        ("digits", ["--process=cosine"], "process: linear -> cosine"),
        ("digits", ["--sampler=uniform"], "sampler: root_loss -> uniform"),
        ("digits", ["--warmup_steps=1"], "warmup_steps: 0 -> 1"),
        ("digits", ["--held_out_images=32"], "held_out_images: 64 -> 32"),
        ("digits", ["--steps=2"], "(steps: 4 -> 2)"),
        ("digits", ["--steps=8"], "(steps: 4 -> 8)"),
        ("digits", ["--steps=8", "--schedule=cosine"], "(steps: 4 -> 8; schedule: constant -> cosine)"),
        ("digits", ["--batch_size=16", "--from=3e-3", "--to=3e-3"], "batch_size: 8 -> 16"),  # a rate that is not there
        ("digits-flow", [], "process: linear -> flow"),
    ],
)
def test_a_folder_with_another_sweep_is_refused_with_what_differs(
    name: str, settings: list[str], difference: str, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "find-lr", name, *SWEEP, *settings, "--output", sweep)
    assert said.startswith("rates holds another sweep (")
    assert difference in said
    assert said.endswith("): pass the same settings to go on with it, or another --output")


def test_a_folder_with_a_run_that_has_only_begun_or_diverged_is_refused_too(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in sweep.glob("runs/sweep/*/seed-0/*"):
        if path.name == "metrics.jsonl":
            path.unlink()
    assert "batch_size: 8 -> 16" in refused(capsys, "find-lr", "digits", *SWEEP, "--batch_size=16", "--output", sweep)
    for run in sweep.glob("runs/sweep/*/seed-0"):
        (run / "diverged.json").write_text('{"step": 2, "message": "so it was"}')
    assert "batch_size: 8 -> 16" in refused(capsys, "find-lr", "digits", *SWEEP, "--batch_size=16", "--output", sweep)


def test_whether_a_folder_has_classes_and_where_it_lies_is_part_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    photos(Path("photos"), 60)
    photos(Path("others"), 60)
    command = ["find-lr", "images", *SWEEP, "--to=1e-3", "--data.size=8", "--output=rates"]
    for _ in range(2):  # auto stands for the same once the data are known
        kairostep.cli.main([*command, "--data.folder=photos"])
    assert capsys.readouterr().out.count("learning rate 0.001: held-out loss") == 1
    assert "label_dropout: 0.1 -> null" in refused(capsys, *command, "--data.folder=photos", "--label_dropout=null")
    assert "data.folder: photos -> others" in refused(capsys, *command, "--data.folder=others")


def test_places_and_rates_may_change(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(sweep)
    more = ["--workers=1", "--log_every=1", "--evaluate_every=1", "--cache=latents", "--from=2e-3", "--to=4e-3"]
    kairostep.cli.main(["find-lr", "digits", *SWEEP, *more, "--output", str(sweep)])
    tried = [line for line in capsys.readouterr().out.splitlines() if line.startswith("learning rate 0")]
    assert [line.partition(":")[0] for line in tried] == ["learning rate 0.004"]  # 0.002 was there
    assert contents(sweep).items() >= before.items()
    kairostep.cli.main(["find-lr", "digits", *SWEEP, "--to=1e-3", "--seed=3", "--output", str(sweep)])
    assert "learning rate 0.001: held-out loss" in capsys.readouterr().out
    assert load(sweep / "runs/sweep/rate-0.001/seed-3/config.yaml").seed == 3
    assert contents(sweep).items() >= before.items()


def test_a_config_may_come_from_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time, its runs are found
        reads, writes = os.pipe()
        os.write(writes, b"{data: digits, steps: 70, sampler: uniform}")
        os.close(writes)
        kairostep.cli.main(["find-lr", "--config", f"/dev/fd/{reads}", *SWEEP, "--to=1e-3"])
        os.close(reads)
    printed = capsys.readouterr().out
    assert printed.count("learning rate 0.001: held-out loss") == 1
    assert load(Path("rates-config/runs/sweep/rate-0.001/seed-0/config.yaml")).sampler.name == "uniform"


@pytest.mark.parametrize("step", [2, 4])  # in the middle, and in the last step, after which the next rate would follow
def test_a_signal_stops_the_sweep_and_the_same_command_goes_on(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    measure = Run._measure

    def stop(run: Run, *arguments: object) -> object:
        if run.trainer.step_number == step:
            signal.raise_signal(signal.SIGTERM)
        return measure(run, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Run, "_measure", stop)
    with pytest.raises(SystemExit) as ended:
        kairostep.cli.main(["find-lr", "digits", *SWEEP])
    monkeypatch.setattr(Run, "_measure", measure)
    assert ended.value.code == 128 + signal.SIGTERM
    where = {2: "at step 2 of 4, saved", 4: "after sweep/seed-0, learning rate 0.001, which is complete"}[step]
    assert capsys.readouterr().err == f"stopped {where}; the same command goes on\n"
    kairostep.cli.main(["find-lr", "digits", *SWEEP])
    kairostep.cli.main(["find-lr", "digits", *SWEEP, "--output=whole"])
    interrupted, whole = capsys.readouterr().out.split("\n--learning_rate=")[:2]
    assert interrupted.splitlines()[-3:] == whole.splitlines()[-3:]


def test_a_run_that_cannot_continue_ends_the_sweep_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> float:
        raise RunError("cannot write to rates: the disk is full")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rate_sweep, "train_run", fails)
    with pytest.raises(SystemExit) as ended:
        kairostep.cli.main(["find-lr", "digits", *SWEEP])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "kairostep: error: cannot write to rates: the disk is full\n"
