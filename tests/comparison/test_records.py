"""What counts of a run: what its training measured, up to the steps that were planned, on the data of all runs."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_comparisons import command

import kairostep.cli
from kairostep.comparison.conduct import check_data, every_run, records_of
from kairostep.comparison.outcome import headline, outcome_of
from kairostep.comparison.plan import DATA
from kairostep.comparison.records import read_record
from kairostep.comparison.stored_plan import read_plan


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two arms with one seed and one rate."""
    output = tmp_path_factory.mktemp("made") / "one"
    kairostep.cli.main(command(output, "--seeds", "1", "--steps=4", "--evaluate_every=2"))
    return output


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def refused(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        kairostep.cli.main([*line])
    assert left.value.code != 0
    return capsys.readouterr().err


def test_what_evaluate_measured_of_a_run_does_not_count(copy: Path) -> None:
    run = next(every_run(read_plan(copy)))
    before = read_record(run)
    line = {"what": "fid", "value": 3.0, "standard_error": 0.1, "n": run.config.fid_images, "checkpoint": 2}
    with (run.directory / "evaluations.jsonl").open("a") as file:
        file.write(json.dumps({**line, "weights": "model", "checkpoint_sha256": "abc"}) + "\n")
    assert read_record(run) == before


def test_steps_beyond_those_planned_do_not_count(copy: Path) -> None:
    run = next(every_run(read_plan(copy)))
    before, metrics = read_record(run), run.directory / "metrics.jsonl"
    lines = [json.loads(text) for text in metrics.read_text().splitlines()]
    last = next(line for line in reversed(lines) if "held_out" in line)
    longer = {**last, "step": 5, "held_out": {**last["held_out"], "loss": 1e-3, "loss_ranges": [1e-3] * 4}}
    metrics.write_text("".join(json.dumps(line) + "\n" for line in [*lines, longer]))
    found = read_record(run)
    assert before is not None
    assert found is not None
    assert (found.values, found.ranges) == (before.values, before.ranges)


def test_runs_on_other_data_are_refused_before_they_train(
    made: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fingerprint = (made / DATA).read_text().strip()
    assert len(fingerprint) == 64
    (copy / DATA).write_text("0" * 64 + "\n")  # as if images had been added since
    line = command(copy, "--seeds", "1", "--steps=4", "--evaluate_every=2")
    kairostep.cli.main(line)  # nothing to train
    told = refused(capsys, *[word.replace("uniform,root_loss", "uniform,root_loss,laplace") for word in line])
    assert f"the data of the runs in {copy} must stay as they were, but have changed: put them back" in told
    assert not (copy / "runs" / "laplace" / "rate-0.006" / "seed-0" / "config.yaml").exists()
    (copy / DATA).write_text(fingerprint + "\n")
    kairostep.cli.main([word.replace("uniform,root_loss", "uniform,root_loss,laplace") for word in line])
    assert (copy / "comparison.csv").read_text().count("finished") == 3


def test_the_first_run_says_what_the_data_are(tmp_path: Path) -> None:
    check_data(tmp_path, "abc")
    check_data(tmp_path, "abc")
    with pytest.raises(ValueError, match="must stay as they were, but have changed"):
        check_data(tmp_path, "def")


def test_processes_may_say_it_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:  # stand for the processes of --jobs
        for trial in range(40):
            folder = tmp_path / str(trial)
            folder.mkdir()
            for each in [pool.submit(check_data, folder, "abc") for _ in range(8)]:
                each.result()
            assert [path.name for path in folder.iterdir()] == [DATA]


def test_runs_of_an_earlier_version_say_it_too(copy: Path) -> None:
    fingerprint = (copy / DATA).read_text().strip()
    (copy / DATA).unlink()
    with pytest.raises(ValueError, match="have changed"):
        check_data(copy, "abc")
    assert (copy / DATA).read_text().strip() == fingerprint


def test_rates_that_come_later_leave_the_one_that_was_there(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = command(copy, "--seeds", "1", "--steps=4", "--evaluate_every=2")
    kairostep.cli.main([*line, "--learning_rates", "1e-7"])
    assert read_plan(copy).rates == (1e-7, 6e-3)
    assert re.search(r"held-out loss by rate +1e-07 +0.006\n", capsys.readouterr().out)
    kairostep.cli.main(line)  # adds none
    assert read_plan(copy).rates == (1e-7, 6e-3)


def test_an_arm_with_a_rate_of_its_own_refuses_rates_for_all_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = "uniform,root_loss --learning_rate=1e-3"
    line = command(tmp_path / "out", "--seeds", "1", "--steps=2", arms=arms)
    kairostep.cli.main(line)
    more = [word.replace(arms, "uniform,laplace") for word in line]
    told = refused(capsys, *more, "--learning_rates", "5e-3,6e-3")
    assert "no arm may set its own, got arm root_loss-learning_rate=1e-3" in told
    assert not (tmp_path / "out" / "runs" / "laplace").exists()


def test_an_arm_that_diverged_at_every_rate_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = command(tmp_path / "out", "--seeds", "1", "--steps=10", "--log_every=1", "--learning_rates", "700,900")
    kairostep.cli.main(line)
    told = capsys.readouterr().out
    assert re.search(r"\nuniform +diverged +diverged\n", told)
    assert "uniform diverged at every learning rate." in told
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert found["diverged_rates"] == {"uniform": [700, 900], "root_loss": [700, 900]}


def test_the_headline_names_arms_without_a_verdict_apart(copy: Path) -> None:
    outcome = outcome_of(read_plan(copy))
    assert headline(outcome.answers, "uniform", "loss") == "No verdict: no arm has two finished seeds."
    kairostep.cli.main(command(copy, "--seeds", "2", "--steps=4", "--evaluate_every=2"))
    kairostep.cli.main(command(copy, "--seeds", "1", "--steps=4", "--evaluate_every=2", arms="uniform,laplace"))
    for seed in (0, 1):
        run = read_plan(copy).run("laplace", seed, 6e-3)
        run.directory.mkdir(parents=True, exist_ok=True)
        (run.directory / "diverged.json").write_text('{"step": 2, "message": ""}')
    plan = read_plan(copy)
    assert records_of(plan, dict.fromkeys(plan.names, 6e-3))["laplace"][0].state == "diverged"
    told = headline(outcome_of(plan).answers, "uniform", "loss")
    assert told.endswith("No verdict: laplace.")
    assert "laplace" not in told.removesuffix("No verdict: laplace.")


def test_a_budget_names_the_runs_of_its_own_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(
        "preset: digits\nsettings: --steps=2\nseeds: 1\ntasks: {flow: --process=flow, cosine: --process=cosine}\n"
        "arms: {plain: uniform, root: root_loss}\n"
    )
    line = [word for word in command(tmp_path / "out", arms=str(path)) if word != "digits"]
    kairostep.cli.main([*line, "--budget", "0.01s"])
    notes = [line for line in capsys.readouterr().out.splitlines() if "leaves for another call" in line]
    assert [note.partition("call: ")[2] for note in notes] == ["root/seed-0", "plain/seed-0, root/seed-0"]
