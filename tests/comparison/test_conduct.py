"""A comparison trains what is missing and nothing else, is fair by construction, and survives what happens to it."""

import json
import os
import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_comparisons import command
from small_runs import Child, assert_same_run, lines_of, num_lines

import kairostep.cli
from kairostep.comparison.arms import read_arms
from kairostep.comparison.conduct import every_run, rounds_of
from kairostep.comparison.outcome import outcome_of
from kairostep.comparison.plan import make_plan
from kairostep.comparison.stored_plan import read_plan
from kairostep.reports.report import Comparison, make_report
from kairostep.seed_statistics import ratio_text
from kairostep.training import Run
from kairostep.training.run_errors import Diverged

ARMS = "uniform,root_loss,logit_normal --weighting=min_snr"
PATIENCE = 300.0  # seconds, on a machine with much else to do


def runs_in(output: Path) -> list[Path]:
    return sorted(path.parent for path in output.glob("runs/*/*/*/config.yaml"))


def changes(output: Path) -> dict[Path, int]:
    """Return when the files of runs were last written."""
    return {path: path.stat().st_mtime_ns for path in (output / "runs").rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return three arms with three seeds, never interrupted."""
    output = tmp_path_factory.mktemp("compared") / "whole"
    kairostep.cli.main(command(output, "--seeds", "3", "--steps=100", "--log_every=20", arms=ARMS))
    return output


def test_killed_twice_it_ends_as_one_never_killed(compared: Path, tmp_path: Path) -> None:
    output, log = tmp_path / "killed", tmp_path / "log"
    line = command(output, "--seeds", "3", "--steps=100", "--log_every=20", arms=ARMS)
    for place in ("root_loss/rate-0.006/seed-0", "logit_normal-min_snr/rate-0.006/seed-1"):
        child = Child(line, log)
        run = output / "runs" / place
        deadline = time.monotonic() + PATIENCE
        while not (run.is_dir() and num_lines(run) >= 2):
            assert child.process.is_alive(), child.output
            assert time.monotonic() < deadline, child.output
            time.sleep(0.01)
        assert child.send(signal.SIGKILL) == -signal.SIGKILL
    child = Child(line, log)
    assert child.ends_within(PATIENCE), child.output
    assert child.join() == 0, child.output
    assert len(runs_in(output)) == 9
    for found, expected in zip(runs_in(output), runs_in(compared), strict=True):
        assert_same_run(found, expected)
    found, expected = (json.loads((place / "comparison.json").read_text()) for place in (output, compared))
    for arm in found["arms"]:
        assert found["arms"][arm]["final"] == expected["arms"][arm]["final"]
        assert found["arms"][arm]["verdict"] == expected["arms"][arm]["verdict"]


def test_arms_of_a_seed_share_initial_weights_data_and_order(compared: Path, tmp_path: Path) -> None:
    plan = read_plan(compared)
    for seed in (0, 1):
        found = []
        for arm in plan.names:
            run = Run(replace(plan.run(arm, seed, 0.006).config, output=str(tmp_path / arm / str(seed))))
            with closing(run.batches.from_step(0)) as batches:
                found.append((run.trainer.network.state_dict(), next(batches).x0, run.monitor.held_out[0]))
            run.release()
        for weights, x0, held_out in found[1:]:
            torch.testing.assert_close(weights, found[0][0], rtol=0, atol=0)
            assert torch.equal(x0, found[0][1])
            assert torch.equal(held_out, found[0][2])


def test_the_same_command_trains_nothing_twice(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = changes(compared)
    kairostep.cli.main(command(compared, "--seeds", "3", "--steps=100", "--log_every=20", arms=ARMS))
    assert changes(compared) == before
    first = capsys.readouterr().out
    kairostep.cli.main(["compare", "--table", str(compared)])
    told = capsys.readouterr().out.strip()
    assert told
    assert told in first
    assert "3 seeds: " in told.splitlines()[-1]
    kairostep.cli.main(["compare", "--table", str(compared), "--baseline", "root_loss"])
    told = capsys.readouterr().out
    assert "Ratios to root_loss of the same seeds" in told
    assert "uniform needs " in told or "uniform ends at " in told
    with pytest.raises(SystemExit):
        kairostep.cli.main(["compare", "--table", str(compared), "--baseline", "rot_loss"])
    assert "the baseline must be one of the arms: unknown arm rot_loss: did you mean root_loss?" in (
        capsys.readouterr().err
    )
    assert changes(compared) == before


def test_its_files_and_its_page_have_the_verdicts(compared: Path) -> None:
    data = json.loads((compared / "comparison.json").read_text())
    assert len(data["verdicts"]) == 2
    page = (compared / "comparison.html").read_text()
    assert data["verdicts"][0].split(" of ")[0] in page
    assert "root_loss/seed-2" in page
    assert "<title>whole" in page
    assert "No difference that these seeds can show: " in page
    assert len((compared / "comparison.csv").read_text().splitlines()) == 10


def test_its_page_has_the_ratios_of_its_table(compared: Path) -> None:
    plan = read_plan(compared)
    outcome = outcome_of(plan)
    names = {run.directory.absolute(): run.name for run in every_run(plan)}
    page = make_report(list(names), comparison=Comparison(names, plan.baseline)).context["table"]
    titles = [column.title for column in page.columns]
    costs = ("seconds", "evaluations")
    places = [titles.index(f"{cost} to target, ratio") for cost in costs]
    for each, block in zip(outcome.answers, page.blocks, strict=True):
        assert each.arm == block.arm
        ratios = each.reaching[0].ratios
        assert [block.rows[0].cells[place] for place in places] == [ratio_text(ratios[cost]) for cost in costs]
        for cost, place in zip(costs, places, strict=True):
            found = [row.cells[place] for row in block.rows[1:]]
            assert found == [str(ratio) for ratio in ratios[cost].by_seed.values()]


def test_arms_and_seeds_can_be_added(tmp_path: Path) -> None:
    output = tmp_path / "more"
    kairostep.cli.main(command(output, "--seeds", "0,5", "--steps=2"))
    before = changes(output)
    kairostep.cli.main(command(output, "--seeds", "1", "--steps=2", arms="uniform,mode"))
    after = changes(output)
    assert {path: after[path] for path in before} == before
    assert len(runs_in(output)) == 6
    assert read_plan(output).seeds == (0, 5)


def test_each_arm_is_compared_at_its_own_best_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = ("--learning_rates", "1e-6,3e-3")
    kairostep.cli.main(command(tmp_path / "rates", *rates, "--seeds", "2", "--steps=20"))
    names = [str(path.relative_to(tmp_path / "rates" / "runs")) for path in runs_in(tmp_path / "rates")]
    assert names == [
        f"{arm}/{rest}"
        for arm in ("root_loss", "uniform")
        for rest in ("rate-0.003/seed-0", "rate-0.003/seed-1", "rate-1e-06/seed-0")
    ]
    told = capsys.readouterr().out
    assert "held-out loss by rate" in told
    assert "One learning rate" not in told
    data = json.loads((tmp_path / "rates" / "comparison.json").read_text())
    assert data["arms"]["uniform"]["learning_rate"] == 0.003
    assert set(data["learning_rates"]["uniform"]) == {"1e-06", "0.003"}


def test_the_metric_that_chooses_rates_is_part_of_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = command(tmp_path / "out", "--learning_rates", "1e-6,3e-3", "--seeds", "1", "--steps=4")
    kairostep.cli.main([*line, "--choose_by", "bound"])
    assert read_plan(tmp_path / "out").choose_by == "bound"
    assert "held-out bound by rate" in capsys.readouterr().out
    kairostep.cli.main(line)  # goes on by the same
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["choose_by"] == "bound"
    table = ["compare", "--table", str(tmp_path / "out")]
    kairostep.cli.main(table)
    assert capsys.readouterr().out.count("held-out bound by rate") == 2
    for given, told in ((line, "choose_by: bound -> loss"), (table, "by bound")):
        with pytest.raises(SystemExit) as left:
            kairostep.cli.main([*given, "--choose_by", "loss"])
        assert left.value.code == 2
        assert told in capsys.readouterr().err
    assert read_plan(tmp_path / "out").choose_by == "bound"


def test_a_comparison_of_one_rate_may_still_say_what_will_choose(tmp_path: Path) -> None:
    line = command(tmp_path / "out", "--seeds", "1", "--steps=2")
    kairostep.cli.main(line)
    kairostep.cli.main([*line, "--choose_by", "bound"])
    assert read_plan(tmp_path / "out").choose_by == "bound"
    path = tmp_path / "out" / "comparison.yaml"
    path.write_text(path.read_text().replace("choose_by: bound\n", ""))  # as earlier versions wrote it
    assert read_plan(tmp_path / "out").choose_by == "loss"
    path.write_text(path.read_text() + "choose_by: beauty\n")
    with pytest.raises(ValueError, match="unknown metric beauty: valid are loss, weighted_loss, bound, fid"):
        read_plan(tmp_path / "out")


def test_an_arm_that_diverges_stops_no_other_and_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Run._progress

    def diverging(run: Run) -> dict[str, object]:
        if run.config.sampler.name == "root_loss" and run.trainer.step_number >= 10:
            raise Diverged("the loss is no longer finite")
        return progress(run)

    monkeypatch.setattr(Run, "_progress", diverging)
    line = command(tmp_path / "wild", "--seeds", "2", "--steps=20", "--log_every=5", arms=ARMS)
    kairostep.cli.main(line)
    assert "root_loss diverged on every seed, at step 10, 10: nothing to compare" in capsys.readouterr().out
    monkeypatch.setattr(Run, "_progress", progress)
    before = changes(tmp_path / "wild")
    kairostep.cli.main(line)
    assert changes(tmp_path / "wild") == before
    assert len(lines_of(tmp_path / "wild/runs/logit_normal-min_snr/rate-0.006/seed-1")) > 0


def test_a_hopeless_arm_is_dropped_after_two_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = "uniform,uniform --learning_rate=1e-9"
    kairostep.cli.main(command(tmp_path / "out", "--seeds", "4", "--steps=20", "--drop", arms=arms))
    seeds = [path.name for path in runs_in(tmp_path / "out") if "1e-9" in str(path)]
    assert seeds[:2] == ["seed-0", "seed-1"]
    assert len(seeds) < 4
    assert "was dropped before seed" in capsys.readouterr().out


def test_a_budget_leaves_whole_seeds_and_the_rest_for_another_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = command(tmp_path / "out", "--seeds", "2", "--steps=4")
    kairostep.cli.main([*line, "--budget", "0.01s"])
    assert len(runs_in(tmp_path / "out")) == 1
    told = capsys.readouterr().out
    assert "leaves for another call: root_loss/seed-0" in told
    assert "no verdict" in told
    kairostep.cli.main(line)
    assert len(runs_in(tmp_path / "out")) == 4


def test_a_signal_in_the_last_step_of_a_run_stops_the_comparison_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line, measure = command(tmp_path, "--seeds", "1", "--steps=4"), Run._measure

    def stop(run: Run, *arguments: object) -> object:
        if run.finished:
            signal.raise_signal(signal.SIGTERM)
        return measure(run, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Run, "_measure", stop)
    with pytest.raises(SystemExit) as left:
        kairostep.cli.main(line)
    assert left.value.code == 128 + signal.SIGTERM
    assert "stopped after uniform/seed-0, learning rate 0.006, which is complete; the same command goes on\n" in (
        capsys.readouterr().err
    )
    assert len(runs_in(tmp_path)) == 1
    monkeypatch.setattr(Run, "_measure", measure)
    kairostep.cli.main(line)
    assert len(runs_in(tmp_path)) == 2


def test_a_config_may_come_from_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is read once for all arms and tasks."""
    reads, writes = os.pipe()
    os.write(writes, b"{data: digits, steps: 70}")
    os.close(writes)
    _, _, *line = command(tmp_path / "out", "--dry-run")
    kairostep.cli.main(["compare", "--config", f"/dev/fd/{reads}", *line])
    os.close(reads)
    assert "root_loss  3 x 70 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rates", "drop", "expected"),
    [
        ((), False, [[0, 1, 2]]),
        ((1e-3, 2e-3), False, [[0], [1, 2]]),
        ((), True, [[0], [1], [2]]),
    ],
    ids=["nothing to decide", "rates are chosen on the first seed", "arms may be dropped after each seed"],
)
def test_seeds_train_side_by_side_unless_results_decide_between_them(
    rates: tuple[float, ...], drop: bool, expected: list[list[int]], tmp_path: Path
) -> None:
    plan = make_plan(tmp_path, "digits", read_arms("uniform,root_loss").arms, (), seeds=(0, 1, 2), rates=rates)
    assert [list(seeds) for seeds in rounds_of(plan, drop=drop)] == expected


def test_processes_train_what_one_trains(tmp_path: Path) -> None:
    for jobs in ("1", "2"):
        kairostep.cli.main(command(tmp_path / jobs, "--seeds", "1", "--steps=5", "--jobs", jobs))
    for found, expected in zip(runs_in(tmp_path / "2"), runs_in(tmp_path / "1"), strict=True):
        assert_same_run(found, expected)


def test_a_file_of_tasks_is_a_comparison_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "preset: digits\nsettings: --steps=4\nseeds: 1\ntasks: {flow: --process=flow, cosine: --process=cosine}\n"
        "arms: {plain: uniform, wide: uniform --batch_size=16}\n"
    )
    kairostep.cli.main([word for word in command(tmp_path / "out", arms=str(path)) if word != "digits"])
    told = capsys.readouterr().out
    assert "\nflow\n\narm  " in told
    assert "\ncosine\n\narm  " in told
    assert "network evaluations" in told
