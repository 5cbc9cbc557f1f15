"""`compare --dry_run` trains nothing and says how long the comparison takes."""

import time
from pathlib import Path

import pytest
from small_comparisons import command

import kairostep.cli
from kairostep.comparison import estimate
from kairostep.comparison.arms import read_arms
from kairostep.comparison.plan import make_plan
from kairostep.training import Trainer


def test_a_dry_run_trains_nothing_and_says_how_long_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kairostep.cli.main(command(tmp_path / "out", "--steps=1000", "--learning_rates", "1e-3,2e-3", "--dry_run"))
    told = capsys.readouterr().out
    assert "uniform    4 x 1000 steps: about" in told
    assert "of training in all" in told
    assert not (tmp_path / "out").exists()


def test_a_dry_run_takes_one_step_of_each_arm_where_steps_are_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = list[int]()

    def slow_step(trainer: Trainer, batches: object) -> None:
        steps.append(trainer.step_number)
        time.sleep(0.02)

    monkeypatch.setattr(Trainer, "step", slow_step)
    monkeypatch.setattr(estimate, "TIMED_SECONDS", 0.01)
    plan = make_plan(tmp_path, "digits", read_arms("uniform,root_loss").arms, (), seeds=(0,), rates=())
    assert all(each.seconds_per_step > 0.02 for each in estimate.estimate(plan))
    assert len(steps) == 2
