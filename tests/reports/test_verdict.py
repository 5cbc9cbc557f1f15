"""The sentence on top of a report says what several seeds show, and nothing from a single one."""

import json
import math
import re
from pathlib import Path

from made_runs import add_grids, make_run
from read_pages import data_of, lines_of, text_of
from scipy.stats import ttest_rel

from kairostep.reports import write_report
from kairostep.reports.arms import arms_of
from kairostep.reports.verdict import Verdict, verdict
from kairostep.runs.history import RunHistory


def run_ending_at(loss: float, directory: Path, sampler: str = "uniform", seed: int = 0, **options: int) -> Path:
    """Make a run whose last held-out loss is this one."""
    make_run(directory, sampler, seed, **options)
    *lines, last = lines_of(directory)
    last["held_out"]["loss"] = loss
    text = "".join(json.dumps(line) + "\n" for line in [*lines, last])
    (directory / "metrics.jsonl").write_text(text)
    return directory


def made(tmp_path: Path, **losses: list[float]) -> list[Path]:
    """Make arms, named by their samplers, with these final losses of seeds 0, 1, ..."""
    return [
        run_ending_at(loss, tmp_path / f"{name}-{seed}", name, seed)
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]


def verdict_of(directories: list[Path]) -> Verdict:
    found = verdict(arms_of([RunHistory.read(directory) for directory in directories]))
    assert found is not None
    return found


def test_one_seed_is_no_verdict_however_large_the_difference(tmp_path: Path) -> None:
    found = verdict_of(made(tmp_path, uniform=[0.05], root_loss=[0.01]))
    assert found.line.startswith("One seed for each arm shows no difference beyond the spread of seeds")
    assert found.details == ["Held-out loss at the end, measured once each: uniform-0 0.0500, root_loss-0 0.0100."]
    assert not re.search("lower|higher|better|worse", " ".join([found.line, *found.details]))


def test_one_seed_trained_twice_is_no_verdict(tmp_path: Path) -> None:
    runs = [run_ending_at(0.05, tmp_path / f"a{i}") for i in range(3)]
    runs += [run_ending_at(0.04 + i * 1e-5, tmp_path / f"b{i}", "root_loss") for i in range(3)]
    assert verdict_of(runs).line.startswith("One seed for each arm shows no difference")


def test_several_seeds_show_a_difference_with_its_interval(tmp_path: Path) -> None:
    losses = {"uniform": [0.050, 0.051, 0.049], "root_loss": [0.0452, 0.0458, 0.0443]}
    found = verdict_of(made(tmp_path, **losses))
    logs = [[math.log(loss) for loss in values] for values in losses.values()]
    interval = ttest_rel(logs[1], logs[0]).confidence_interval(0.95)
    low, high = (f"{-100 * math.expm1(end):.{1 if end > math.log(0.9) else 0}f} % lower" for end in interval)
    mean = -100 * math.expm1(sum(logs[1]) / 3 - sum(logs[0]) / 3)
    assert found.line == (
        f"root_loss: held-out loss {mean:.1f} % lower than uniform (95 % interval {low} to {high}, 3 seeds), "
        "with as many network evaluations."
    )


def test_a_difference_within_the_spread_of_seeds_is_none(tmp_path: Path) -> None:
    found = verdict_of(made(tmp_path, uniform=[0.050, 0.051, 0.049], adaptive=[0.049, 0.052, 0.047]))
    assert found.line.startswith("adaptive: no difference from uniform beyond the spread of seeds (95 % interval ")
    assert found.line.endswith("3 seeds), with 1.12 times the network evaluations.")  # with its probes


def test_several_arms_have_a_line_each(tmp_path: Path) -> None:
    baseline = [0.050, 0.051, 0.049]
    arms = {name: [loss * factor for loss in baseline] for name, factor in (("root_loss", 0.9), ("speed", 1.2))}
    arms["root_loss"][0] *= 1.001
    arms["speed"][0] *= 1.001
    found = verdict_of(made(tmp_path, uniform=baseline, laplace=[0.049, 0.052, 0.047], **arms))
    assert found.line == (
        "In held-out loss, root_loss ends lower and speed ends higher than uniform; "
        "the others do not differ beyond the spread of seeds."
    )
    assert [line.partition(":")[0] for line in found.details] == ["laplace", "root_loss", "speed"]
    assert "20 % higher than uniform" in found.details[2]


def test_runs_that_have_not_finished_are_no_verdict(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", "root_loss", reach=500)]
    assert verdict_of(runs).line == "No verdict yet: 1 run has not finished."


def test_a_run_by_itself_is_not_compared(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1)]
    end = lines_of(runs[0])[-1]["held_out"]
    line = f"Held-out loss {end['loss']:.5f} ± {end['loss_error']:.5f} after 1,000 steps. There is nothing to compare "
    assert verdict_of(runs[:1]).line == f"{line}it with."
    assert "(mean ± standard deviation of 2 seeds)" in verdict_of(runs).line
    other = make_run(tmp_path / "c", process={"name": "cosine"})
    assert verdict_of([runs[0], other]).line.endswith("There is nothing to compare it with.")
    assert verdict(arms_of([RunHistory.read(make_run(tmp_path / "d", reach=10))])) is None


def test_it_stands_on_top_and_samples_before_all_figures(tmp_path: Path) -> None:
    runs = made(tmp_path, uniform=[0.05], root_loss=[0.01])
    add_grids(runs[0], [1000])
    page = write_report(runs, tmp_path / "report.html")
    text = page.read_text()
    places = [text.index(f'id="{name}"') for name in ("verdict", "results", "samples", "figure-0")]
    assert places == sorted(places)
    assert "One seed for each arm shows no difference" in text_of(page)


def test_uniform_draws_are_a_line_and_no_panel(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{name}-{seed}", name, seed) for name in ("uniform", "adaptive") for seed in (0, 1)]
    data = data_of(write_report(runs, tmp_path / "report.html"))
    (figure,) = [figure for figure in data["figures"] if figure["title"] == "Where the draws go"]
    assert [panel["title"] for panel in figure["panels"]] == ["adaptive-0", "adaptive-1"]
    assert figure["note"] == "Drawn uniformly from the first step to the last: uniform."
    page = write_report(runs[:1], tmp_path / "one.html")
    assert "Where the draws go" not in [figure["title"] for figure in data_of(page)["figures"]]
    assert "Drawn uniformly from the first step to the last: uniform-0." in text_of(page)


def test_what_an_unbiased_sampler_trains_is_a_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "adaptive")
    lines = [
        {**line, **({"weights": [0.01 / mass for mass in line["density"]]} if "density" in line else {})}
        for line in lines_of(run)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    weighted = make_run(tmp_path / "weighted", weighting="min_snr")
    (figure,) = [
        figure
        for figure in data_of(write_report([run, weighted], tmp_path / "report.html"))["figures"]
        if figure["title"] == "What is trained: draws times weights"
    ]
    assert [panel["title"] for panel in figure["panels"]] == ["weighted"]
    assert figure["note"] == "Uniform as draws times weights, within 10 % in the second half of training: run."
