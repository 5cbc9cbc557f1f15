"""Which runs belong together, what they are called, and how soon they get where the baseline ends."""

import json
import math
import random
import re
from array import array
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run
from scipy.stats import sem
from scipy.stats import t as student

from kairostep.reports.arms import Arm, arms_of
from kairostep.reports.configurations import differences, warnings
from kairostep.reports.report import make_report
from kairostep.reports.results_table import results_table
from kairostep.reports.target import Cost, loss_curve, paired_ratio_to, ratio_to
from kairostep.runs.history import RunHistory
from kairostep.runs.thinning import select_points, select_rows
from kairostep.seed_statistics import cost_to_reach, ratio_text, spread_of

COSTS: tuple[Cost, ...] = ("seconds", "evaluations")


def read(*directories: Path) -> list[Arm]:
    return arms_of([RunHistory.read(directory) for directory in directories])


def test_runs_that_differ_in_their_seed_alone_are_one_arm(tmp_path: Path) -> None:
    made = [make_run(tmp_path / f"mine-{i}", "root_loss", i, evaluate_every=100 + 100 * i) for i in range(3)]
    (arm,) = read(*made)
    assert arm.name == "mine"
    assert [run.name for run in arm.runs] == [f"mine-{i}" for i in range(3)]
    assert [run.short for run in arm.runs] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("settings", "parted"),
    [
        ([{"sampler": "adaptive"}, {}], ["uniform", "adaptive"]),
        ([{"weighting": "min_snr"}, {}], ["constant", "min_snr"]),
        ([{"sampler": "speed", "weighting": "p2"}, {}, {"weighting": "p2"}], ["uniform", "speed · p2", "uniform · p2"]),
        ([{"learning_rate": 1e-3}, {"learning_rate": 2e-4}], ["learning_rate 0.001", "learning_rate 0.0002"]),
        (
            [{"sampler": "adaptive", "options": {"num_selected": n}} for n in (1, 3)] + [{}],
            ["uniform", "adaptive · num_selected 1", "adaptive · num_selected 3"],
        ),
        ([{"network": {"name": "unet", "channels": n}} for n in (8, 16)], ["channels 8", "channels 16"]),
    ],
)
def test_arms_say_what_differs_and_the_baseline_comes_first(
    settings: list[dict[str, Any]], parted: list[str], tmp_path: Path
) -> None:
    arms = read(*(make_run(tmp_path / f"r{i}", **chosen) for i, chosen in enumerate(settings)))
    assert [arm.settings for arm in arms] == parted
    for arm in arms:
        assert [arm.name, arm.runs[0].name] == [arm.first.directory.name] * 2
        assert arm.runs[0].settings.splitlines()[0] == arm.settings
    assert [arm.baseline for arm in arms] == [True] + [False] * (len(arms) - 1)


def test_the_same_run_twice_is_told_apart(tmp_path: Path) -> None:
    (arm,) = read(make_run(tmp_path / "one"), make_run(tmp_path / "two"))
    assert [run.name for run in arm.runs] == [run.short for run in arm.runs] == ["one", "two"]


def test_a_tooltip_has_the_settings_and_the_folder(tmp_path: Path) -> None:
    (arm,) = read(make_run(tmp_path / "run", "adaptive", 7, options={"floor": 0.2}))
    lines = arm.runs[0].settings.splitlines()
    assert lines[1:3] == ["sampler: adaptive, num_selected 3, every 40, floor 0.2", "weighting: constant"]
    assert lines[-2:] == ["seed: 7", str(tmp_path / "run")]


@pytest.mark.parametrize(
    ("folders", "seeds", "names", "arm"),
    [
        (["uniform-0", "uniform-1"], [0, 1], ["uniform-0", "uniform-1"], "uniform"),
        (["uniform-seed10", "uniform-seed11"], [10, 11], ["uniform-seed10", "uniform-seed11"], "uniform"),
        (["digits-adaptive", "digits-adaptive-seed=3"], [0, 3], None, "digits-adaptive"),
        (["runs-0", "runs-1"], [0, 1], None, "runs"),
        (["cold1", "cold2"], [0, 1], None, "cold"),
        (["x-1-a", "x-1-b"], [0, 1], None, "x-1"),
        (["warm/seed-0", "warm/seed-1"], [0, 1], ["seed-0", "seed-1"], "warm"),
        (["a/run", "b/run"], [0, 1], ["a/run", "b/run"], "a/run and 1 more"),
        (["another", "a-run"], [0, 1], None, "runs"),
    ],
)
def test_runs_and_arms_are_named_by_their_folders(
    folders: list[str], seeds: list[int], names: list[str] | None, arm: str, tmp_path: Path
) -> None:
    made = [make_run(tmp_path / "runs" / folder, seed=seed) for folder, seed in zip(folders, seeds, strict=True)]
    (found,) = read(*made)
    assert [run.name for run in found.runs] == (names or folders)
    assert found.name == arm


def test_no_two_arms_have_one_name(tmp_path: Path) -> None:
    made = [make_run(tmp_path / f"x-{i}", seed=i) for i in range(2)] + [make_run(tmp_path / "x", "adaptive")]
    assert len({arm.name for arm in read(*made)}) == 2


def test_differences_and_devices_are_told(tmp_path: Path) -> None:
    arms = read(make_run(tmp_path / "a"), make_run(tmp_path / "b", "adaptive", 1, learning_rate=1e-3))
    found = differences(arms)
    assert found is not None
    assert found.columns == [arm.name for arm in arms]
    told = {row.key: row.cells for row in found.rows}
    assert told == {
        "sampler": ["uniform", "adaptive: num_selected 3, every 40"],
        "learning_rate": ["0.0002", "0.001"],
    }
    assert differences(arms[:1]) is None
    config = tmp_path / "b" / "config.yaml"
    config.write_text(config.read_text().replace("cpu: x86_64", "cuda: H200"))
    runs = [run for arm in read(tmp_path / "a", tmp_path / "b") for run in arm.runs]
    assert warnings(runs) == [
        "Seconds do not compare, the runs were made on different devices: cpu: x86_64, cuda: H200."
    ]


def test_several_processes_are_told_and_their_seconds_have_no_ratio_to_those_of_one(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / "one"), make_better(tmp_path / "eight")]
    config = paths[1] / "config.yaml"
    config.write_text(config.read_text().replace("device: 'cpu: x86_64'", "device: 'cpu: x86_64'\n  processes: 8"))
    arms = read(*paths)
    runs = [run for arm in arms for run in arm.runs]
    assert [run.history.devices for run in runs] == ["cpu: x86_64", "8 x cpu: x86_64"]
    assert "different devices: cpu: x86_64, 8 x cpu: x86_64." in warnings(runs)[0]
    found = differences(arms)
    assert found is not None
    assert {row.key: row.cells for row in found.rows}["provenance.processes"] == ["\u2013", "8"]
    assert results_table(arms).blocks[1].rows[0].cells[2] == "\u2013"
    intro = make_report(paths).context["intro"]
    assert intro.endswith("Trained on cpu: x86_64 and 8 x cpu: x86_64.")


def test_costs_are_those_of_measurements_with_a_loss_and_leave_out_the_start(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "adaptive")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["seconds"] += 60.0  # of compiling
    lines[19]["held_out"]["loss"] = None
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = RunHistory.read(run)
    steps = [100, *range(300, 1001, 100)]
    seconds, losses = loss_curve(history, "seconds")
    assert seconds == pytest.approx([step * 12e-3 for step in steps])
    assert losses == [lines[step // 10 - 1]["held_out"]["loss"] for step in steps]
    spent, _ = loss_curve(history, "evaluations")
    assert spent == [step * 128 + 640 * (step // 40) for step in steps]  # with probes
    assert history.costs_at(200) == pytest.approx({"steps": 200, "images": 25600, "evaluations": 28800, "seconds": 2.4})


def test_ratios_pair_by_seed_and_count_probes(tmp_path: Path) -> None:
    made = [make_run(tmp_path / f"{name}{seed}", name, seed) for name in ("uniform", "adaptive") for seed in (0, 1)]
    baseline, arm = read(*made)
    for run, other in zip(arm.runs, baseline.runs, strict=True):
        end = other.history.held_out[-1]
        assert end.loss is not None
        for cost in COSTS:
            ratio = ratio_to(run.history, baseline, cost)
            own, spent = loss_curve(run.history, cost), loss_curve(other.history, cost)
            reached = cost_to_reach(*own, end.loss)
            assert ratio is not None
            assert ratio.reached == (reached is not None)
            assert ratio.value == pytest.approx((reached or own[0][-1]) / spent[0][-1])
    same = ratio_to(baseline.runs[0].history, baseline, "seconds")
    assert same is not None
    assert str(same) == "1.000"


def make_better(directory: Path, seed: int = 0) -> Path:
    """Make a run that ends below uniform's."""
    make_run(directory, "root_loss", seed)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "held_out" in line:
            line["held_out"]["loss"] *= 0.8
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_the_mean_ratio_is_geometric_with_an_interval_on_logarithms_and_one_ratio_per_seed(tmp_path: Path) -> None:
    uniform = [make_run(tmp_path / f"uniform{seed}", seed=seed) for seed in range(3)]
    better = [make_better(tmp_path / f"better{seed}", seed) for seed in range(3)]
    arms = read(*uniform, *better)
    baseline, arm = arms
    table = results_table(arms)
    again = RunHistory.read(make_better(tmp_path / "again", 2))
    for column, cost in enumerate(COSTS, start=2):
        ratios = [ratio_to(run.history, baseline, cost) for run in arm.runs]
        logs = [math.log(ratio.value) for ratio in ratios if ratio is not None]
        low, high = (math.exp(end) for end in student.interval(0.95, 2, sum(logs) / 3, sem(logs)))
        found = paired_ratio_to([*(run.history for run in arm.runs), again], baseline, cost)
        assert found is not None
        assert found.interval == pytest.approx((low, high))
        assert found.mean == pytest.approx(math.exp(sum(logs) / 3))
        assert table.blocks[1].rows[0].cells[column] == ratio_text(found)
        assert table.blocks[0].rows[0].cells[column] == "1"


def test_a_run_that_never_gets_there_has_a_bound(tmp_path: Path) -> None:
    baseline, arm = read(make_run(tmp_path / "a"), make_run(tmp_path / "b", "min_snr", steps=500, log_every=5))
    ratio = ratio_to(arm.runs[0].history, baseline, "seconds")
    assert ratio is not None
    assert str(ratio) == f"> {ratio.value:.3f}"
    assert ratio.value == pytest.approx(0.5, abs=0.05)


def test_a_run_that_has_not_finished_has_no_ratio_yet(tmp_path: Path) -> None:
    whole, half = make_run(tmp_path / "a"), make_run(tmp_path / "b", "speed", reach=500)
    baseline, arm = read(whole, half)
    assert ratio_to(arm.runs[0].history, baseline, "seconds") is None
    baseline, arm = read(make_run(tmp_path / "c", reach=500), make_run(tmp_path / "d", "speed"))
    assert ratio_to(arm.runs[0].history, baseline, "seconds") is None


def test_seconds_of_another_device_or_commit_have_no_ratio(tmp_path: Path) -> None:
    baseline, arm = make_run(tmp_path / "a"), make_better(tmp_path / "b")
    config = arm / "config.yaml"
    config.write_text(config.read_text().replace("commit: abc", "commit: def"))
    table = results_table(read(baseline, arm))
    assert table.blocks[1].rows[0].cells[2] == "\u2013"
    assert re.fullmatch(r"0\.\d{3}", table.blocks[1].rows[0].cells[3])
    assert table.notes[-1] == "No ratio of seconds where device or commit differ from the baseline's: b."


@pytest.mark.parametrize("wrong", [{"seconds": -1.0}, {"seconds": 0.0}, {"training_evaluations": -5}])
def test_costs_that_cannot_be_make_no_ratio(wrong: dict[str, float], tmp_path: Path) -> None:
    made = [make_run(tmp_path / f"{name}{seed}", name, seed) for name in ("uniform", "root_loss") for seed in (0, 1)]
    for run in made[2:]:
        lines = [json.loads(line) | wrong for line in (run / "metrics.jsonl").read_text().splitlines()]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cells = results_table(read(*made)).blocks[1].rows[0].cells
    assert "\u2013" in cells[2:4]


def test_runs_on_another_task_are_not_compared(tmp_path: Path) -> None:
    arms = read(
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", process={"name": "cosine"}),
        make_run(tmp_path / "c", "speed", 7),
    )
    table = results_table(arms)
    cells = {block.arm: block.rows[0].cells[2] for block in table.blocks}
    assert cells["b"] == "\u2013"
    assert "differ from the baseline's: b." in table.notes[1]
    assert cells["c"] == "\u2013"
    assert table.notes[2] == "Not compared where the baseline lacks their seeds: c."


@pytest.mark.parametrize(("factor", "shown"), [(0.5, True), (1.0, False), (1 + 1e-7, False), (None, False)])
def test_the_loss_under_a_weighting_has_a_column_where_there_is_one(
    factor: float | None, shown: bool, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for held_out in (line["held_out"] for line in lines if "held_out" in line):
        own = {} if factor is None else {"weighted_loss": factor * held_out["loss"], "weighted_loss_error": 0.001}
        held_out |= own
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = results_table(read(run))
    titles = [column.title for column in table.columns]
    assert ("weighted held-out loss" in titles) == shown
    if shown:
        cell = table.blocks[0].rows[0].cells[titles.index("weighted held-out loss")]
        assert float(cell.split()[0]) == pytest.approx(0.5 * lines[-1]["held_out"]["loss"], rel=0.05)


def test_intervals_are_those_of_student() -> None:
    for n in (2, 5, 31, 40):
        values = [random.Random(i).random() for i in range(n)]
        spread = spread_of(values)
        error = math.sqrt(sum((value - spread.mean) ** 2 for value in values) / (n - 1) / n)
        assert spread.half_width == pytest.approx(student.ppf(0.975, n - 1) * error, rel=0.035 if n > 31 else 2e-4)
    assert spread_of([3.0]).half_width is None


def test_thinning_keeps_spikes_and_ends() -> None:
    values = array("d", (math.sin(i / 5000) for i in range(100_000)))
    values[54_321], values[777] = 99.0, -99.0
    kept = select_points(values)
    assert len(kept) <= 402
    assert {0, 777, 54_321, 99_999} <= set(kept)
    assert kept == sorted(kept)
    assert select_points(values[:400]) == list(range(400))


def test_thinning_keeps_the_histogram_that_stands_out() -> None:
    rows = [[0.5, 0.5] for _ in range(1000)]
    rows[613] = [1.0, 0.0]
    kept = select_rows(rows, 50)
    assert len(kept) == 50
    assert {0, 613, 999} <= set(kept)
    assert kept == sorted(set(kept))


def with_fid(directory: Path, *lines: dict[str, object]) -> Path:
    text = "".join(json.dumps({"what": "fid", "standard_error": 0.1, **line}) + "\n" for line in lines)
    (make_run(directory) / "evaluations.jsonl").write_text(text)
    return directory


def test_the_last_checkpoint_counts_and_its_averaged_weights(tmp_path: Path) -> None:
    last = {"value": 5.0, "checkpoint": 1000, "weights": "ema"}
    others = [
        {"value": 4.0, "checkpoint": 500, "weights": "ema"},
        {"value": 3.0, "checkpoint": 1000, "weights": "model"},
    ]
    for i, lines in enumerate(([last, *others], [*others, last], [{**last, "value": 6.0}, *others, last])):
        measured = RunHistory.read(with_fid(tmp_path / str(i), *lines)).measured("fid")
        assert measured is not None
        assert measured["value"] == 5.0


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"n": 40}, []),
        ({"n": 20}, ["FIDs do not compare: they use different numbers of images (40, 20)."]),
        ({"n": 40, "features": "inception-2015-12-05"}, []),  # as the config's default
        (
            {"n": 40, "features": "mine:net"},
            ["FIDs do not compare: they use different networks (Inception, mine:net)."],
        ),
    ],
)
def test_fids_that_do_not_compare_are_told(other: dict[str, object], told: list[str], tmp_path: Path) -> None:
    first = {"value": 5.0, "checkpoint": 1000, "weights": "ema", "n": 40}
    arms = read(with_fid(tmp_path / "a", first), with_fid(tmp_path / "b", {**first, **other}))
    assert warnings([run for arm in arms for run in arm.runs]) == told
