"""`kairostep find-lr`: which rates it tries, what it suggests, and that it goes on where it was stopped."""

from pathlib import Path

import pytest
from small_comparisons import SMALL

import kairostep.cli
from kairostep.comparison import rate_sweep
from kairostep.comparison.plan import Plan
from kairostep.comparison.rate_sweep import RateSweep, further_rates, geometric_rates, plan_sweep, train_for_loss


def test_rates_rise_by_a_factor_up_to_the_last() -> None:
    assert geometric_rates(1e-4, 8e-4) == (1e-4, 2e-4, 4e-4, 8e-4)
    assert geometric_rates(1e-3, 5e-2, 10.0) == (1e-3, 1e-2)
    assert geometric_rates(3e-3, 3e-3) == (3e-3,)


@pytest.mark.parametrize(("low", "high", "factor"), [(0.0, 1.0, 2.0), (1e-2, 1e-3, 2.0), (1e-3, 1e-2, 1.0)])
def test_rates_that_do_not_rise_are_refused(low: float, high: float, factor: float) -> None:
    with pytest.raises(ValueError, match="rates must rise from above 0 by a factor above 1"):
        geometric_rates(low, high, factor)


def test_the_lowest_loss_is_suggested_with_what_is_as_good_and_whether_to_look_further() -> None:
    inside = RateSweep({1e-3: 0.3, 2e-3: 0.2, 4e-3: 0.2005, 8e-3: None}, 100)
    assert inside.best == 2e-3
    assert inside.verdict() == (
        "--learning_rate=0.002: the lowest held-out loss after 100 steps, 0.2; 0.002, 0.004 end within 0.5 % of it"
    )
    assert "largest rate tried: try larger ones" in RateSweep({1e-3: 0.3, 2e-3: 0.2}, 100).verdict()
    assert "smallest rate tried: try smaller ones" in RateSweep({1e-3: 0.2, 2e-3: 0.3}, 100).verdict()
    with pytest.raises(ValueError, match=r"got none of 0\.001, 0\.002: pass a smaller --to"):
        RateSweep({1e-3: None, 2e-3: None}, 100).verdict()


def plan(folder: Path, rates: tuple[float, ...] = (1e-3, 2e-3), *settings: str) -> Plan:
    return plan_sweep(folder, "digits", [*SMALL, "--steps=4", *settings], rates, seed=0)


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


def test_data_without_held_out_images_are_refused(tmp_path: Path) -> None:
    (run,) = plan(tmp_path, (1e-3,), "--held_out_images=0").runs("sweep", 0)
    with pytest.raises(ValueError, match="rates are compared by the loss of held-out images, got none: pass"):
        train_for_loss(run)


def test_the_command_trains_each_rate_once_and_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["find-lr", "digits", *SMALL, "--steps=4", "--from=1e-3", "--to=2e-3", "--picture=rates.png"]
    kairostep.cli.main(command)
    printed = capsys.readouterr().out
    heading, first, second = printed.splitlines()[:3]  # no line of a run's own
    assert heading == "2 learning rates from 0.001 to 0.002, 4 steps each"
    assert first.startswith("learning rate 0.001: held-out loss ")
    assert second.startswith("learning rate 0.002: held-out loss ")
    assert "--learning_rate=" in printed
    assert Path("rates.png").stat().st_size > 10_000
    runs = sorted(Path("rates-digits/runs/sweep").glob("rate-*/seed-0/config.yaml"))
    assert [path.parts[3] for path in runs] == ["rate-0.001", "rate-0.002"]
    written = {path.name for path in runs[0].parent.iterdir()}
    assert not written & {"model", "samples"}
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
