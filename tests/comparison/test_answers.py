"""Answers from made records: costs to the same loss, targets, verdicts, and none where labels mean nothing."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from kairostep.comparison.answers import NO_DIFFERENCE, Target, answer, best_rates, parse_target, verdict_metric
from kairostep.comparison.records import Record
from kairostep.comparison.tables import Outcome, csv_text, make_notes, plain, terminal_table

STEPS = (100, 200, 300, 400, 500)


def record(
    arm: str,
    seed: int,
    losses: Sequence[float],
    *,
    state: str = "finished",
    batch_size: int = 10,
    probes: float = 0.0,
    place: str = "here",
    more: Mapping[str, Sequence[float]] | None = None,
    ranges: Sequence[float] = (),
    weighting: str | None = "",
) -> Record:
    """Return a run with these held-out losses; a step takes a second, and `probes` evaluations beside its own."""
    steps = STEPS[: len(losses)]
    spent = {
        step: {
            "steps": float(step),
            "images": float(step * batch_size),
            "evaluations": step * (batch_size + probes),
            "seconds": float(step),
        }
        for step in steps
    }
    values = {"loss": losses, "bound": losses, **(more or {})}
    by_step = {name: dict(zip(steps, found, strict=True)) for name, found in values.items()}
    stopped = steps[-1] if state == "diverged" else None
    return Record(arm, seed, state, spent, by_step, ranges, place, stopped, batch_size, probes > 0, weighting)


def falling(speed: float, noise: float = 1.0) -> list[float]:
    """Return losses that fall exponentially, so that a speed of 2 needs half the steps."""
    return [noise * math.exp(-speed * step / 500) for step in STEPS]


def arms(**given: Sequence[Record]) -> dict[str, dict[int, Record]]:
    return {name: {each.seed: each for each in records} for name, records in given.items()}


def of(found: Sequence, arm: str):
    return next(each for each in found if each.arm == arm)


def test_an_arm_that_is_faster_is_better_and_says_by_how_much() -> None:
    speeds = {0: 1.5, 1: 1.6, 2: 1.55}
    found = answer(
        arms(
            uniform=[record("uniform", seed, falling(1.0)) for seed in range(3)],
            quick=[record("quick", seed, falling(speed)) for seed, speed in speeds.items()],
        ),
        "uniform",
    )
    quick = of(found, "quick")
    assert quick.decided == -1
    assert quick.verdict == (
        "quick needs 0.65 (0.60\u20130.70) of uniform's steps to the same held-out loss, 3 seeds: better"
    )
    ratio = quick.reaching[0].ratios["steps"]
    assert ratio.by_seed[0].value == pytest.approx(1 / 1.5)
    assert of(found, "uniform").verdict == ""


def test_an_arm_that_never_gets_there_is_told_by_its_end() -> None:
    found = answer(
        arms(
            uniform=[record("uniform", seed, falling(1.0)) for seed in range(3)],
            slow=[record("slow", seed, falling(speed)) for seed, speed in enumerate((0.80, 0.81, 0.82))],
        ),
        "uniform",
    )
    slow = of(found, "slow")
    assert slow.verdict == "slow ends at 1.21 (1.18\u20131.24) of uniform's held-out loss, 3 seeds: worse"
    assert not slow.reaching[0].ratios["steps"].reached


def test_seeds_that_disagree_show_no_difference_and_one_seed_is_no_verdict() -> None:
    found = answer(
        arms(
            uniform=[record("uniform", seed, falling(1.0)) for seed in range(3)],
            odd=[record("odd", seed, falling(speed)) for seed, speed in enumerate((0.9, 1.1, 1.0))],
            lone=[record("lone", 0, falling(3.0))],
            other=[record("other", 7, falling(3.0))],
        ),
        "uniform",
    )
    assert of(found, "odd").verdict.endswith(f"3 seeds: {NO_DIFFERENCE}")
    assert of(found, "lone").verdict == (
        "lone needs 0.333 of uniform's steps to the same held-out loss, one seed: no verdict"
    )
    assert of(found, "other").verdict == "other has no finished seed that uniform has too: no verdict"
    assert [each.decided for each in found] == [0, 0, 0, 0]


def weighted(arm: str, seed: int, speed: float, weighting: str = "min_snr") -> Record:
    """Return a run whose unweighted loss rises while the weighted one, which it trains, falls."""
    rising = [2 - loss for loss in falling(speed)]
    return record(arm, seed, rising, more={"weighted_loss": falling(speed)}, weighting=weighting)


def test_arms_of_one_weighting_are_judged_by_what_they_train() -> None:
    both = arms(
        uniform=[weighted("uniform", seed, 1.0) for seed in range(3)],
        quick=[weighted("quick", seed, speed) for seed, speed in enumerate((1.5, 1.6, 1.55))],
    )
    found = answer(both, "uniform")
    assert verdict_metric(both) == "weighted_loss"
    assert of(found, "quick").verdict == (
        "quick needs 0.65 (0.60\u20130.70) of uniform's steps to the same weighted held-out loss, 3 seeds: better"
    )
    table = terminal_table(Outcome("uniform", found, both, {}, [], judge_by=verdict_metric(both)))
    assert "weighted held-out loss" in table.splitlines()[0]
    assert "those of getting to uniform's final weighted held-out loss" in table
    diverged = replace(record("other", 0, [], state="finished"), weighting=None)  # it measured nothing
    assert verdict_metric({**both, "other": {0: diverged}}) == "weighted_loss"


def test_weighted_losses_of_other_weightings_do_not_compare() -> None:
    seeds = range(3)
    several = arms(
        uniform=[record("uniform", seed, falling(1.0), more={"weighted_loss": falling(1.0)}) for seed in seeds],
        min_snr=[weighted("min_snr", seed, 1.5) for seed in seeds],
        p2=[weighted("p2", seed, 1.5, "p2") for seed in seeds],
    )
    for baseline in several:
        found = answer(several, baseline)
        assert verdict_metric(several) == "loss"
        assert all("weighted_loss" not in each.ratios for each in found)
        others = [each for each in found if each.arm != baseline]
        assert all(reaching.metric != "weighted_loss" for each in others for reaching in each.reaching)
        assert "weighted" not in terminal_table(Outcome(baseline, found, several, {}, []))


def test_rates_are_chosen_by_the_weighted_loss_where_asked() -> None:
    runs = {1e-3: weighted("min_snr", 0, 1.5), 2e-3: weighted("min_snr", 0, 1.0)}  # the unweighted loss says 2e-3
    assert best_rates(lambda _, rate: runs[rate], ["min_snr"], list(runs), "weighted_loss") == {"min_snr": 1e-3}
    assert best_rates(lambda _, rate: runs[rate], ["min_snr"], list(runs), "loss") == {"min_snr": 2e-3}


def test_a_target_of_the_weighted_loss_is_for_arms_of_the_weighting_of_the_baseline() -> None:
    both = arms(
        uniform=[record("uniform", 0, falling(1.0), more={"weighted_loss": falling(1.0)})],
        min_snr=[weighted("min_snr", 0, 1.5)],
    )
    target = Target("weighted_loss", 0.8)
    assert not any(each.target for each in of(answer(both, "uniform", [target]), "min_snr").reaching)
    alone = {"min_snr": both["min_snr"], "quick": {0: weighted("quick", 0, 2.0)}}
    assert any(each.target for each in of(answer(alone, "min_snr", [target]), "quick").reaching)


def test_batch_sizes_and_probes_are_compared_by_evaluations() -> None:
    found = answer(
        arms(
            uniform=[record("uniform", seed, falling(1.0)) for seed in range(2)],
            wide=[record("wide", seed, falling(2.0), batch_size=20) for seed in range(2)],
            probing=[record("probing", seed, falling(2.0), probes=30.0) for seed in range(2)],
        ),
        "uniform",
    )
    wide, probing = of(found, "wide"), of(found, "probing")
    assert {cost: round(ratio.mean, 6) for cost, ratio in wide.reaching[0].ratios.items()} == {
        "steps": 0.5,
        "images": 1.0,
        "evaluations": 1.0,
        "seconds": 0.5,
    }
    assert "wide needs 1 of uniform's network evaluations" in wide.verdict
    assert wide.decided == 0
    assert probing.reaching[0].ratios["evaluations"].mean == pytest.approx(2.0)
    assert probing.verdict.endswith("worse")


def test_seconds_of_another_device_or_commit_are_not_compared() -> None:
    found = answer(
        arms(
            uniform=[record("uniform", 0, falling(1.0))],
            elsewhere=[record("elsewhere", 0, falling(2.0), place="there")],
        ),
        "uniform",
    )
    assert set(of(found, "elsewhere").reaching[0].ratios) == {"steps", "images", "evaluations"}


def test_targets_are_met_by_some_and_never_by_others() -> None:
    fids = {"uniform": (90, 80, 60, 50, 45), "good": (80, 60, 40, 30, 20)}
    found = answer(
        arms(
            **{
                name: [record(name, seed, falling(1.0), more={"fid": values}) for seed in range(2)]
                for name, values in fids.items()
            }
        ),
        "uniform",
        [parse_target("fid=40"), parse_target("fid=50")],
    )
    never, met = of(found, "uniform").reaching[-2:]
    assert (never.target, never.spent["steps"], never.ratios) == (Target("fid", 40.0), {0: None, 1: None}, {})
    assert met.spent["steps"] == {0: 400.0, 1: 400.0}
    assert of(found, "good").reaching[-2].spent["steps"] == {0: 300.0, 1: 300.0}
    assert of(found, "good").reaching[-1].ratios["steps"].mean < 0.7


def test_a_diverged_run_is_told_and_leaves_the_others_to_speak() -> None:
    found = answer(
        arms(
            uniform=[record("uniform", seed, falling(1.0)) for seed in range(3)],
            wild=[record("wild", seed, falling(2.0)) for seed in range(2)]
            + [record("wild", 2, [1.0, 2.0], state="diverged")],
            gone=[record("gone", seed, [3.0], state="diverged") for seed in range(3)],
        ),
        "uniform",
    )
    assert of(found, "wild").verdict.endswith("2 seeds: better; it diverged on seed 2")
    assert of(found, "gone").verdict == "gone diverged on every seed, at step 100, 100, 100: nothing to compare"
    assert "wild diverged: seed 2 at step 200." in make_notes((), found)


def test_ranges_of_noise_have_ratios_of_their_own() -> None:
    found = answer(
        arms(
            uniform=[record("uniform", seed, falling(1.0), ranges=(1.0, 2.0)) for seed in range(2)],
            low=[record("low", seed, falling(1.0), ranges=(0.5, 3.0)) for seed in range(2)],
        ),
        "uniform",
    )
    assert [ratio.mean for ratio in of(found, "low").ranges] == pytest.approx([0.5, 1.5])


def test_the_best_rate_is_that_of_the_lowest_end_and_never_one_that_diverged() -> None:
    ends = {("a", 1e-3): record("a", 0, falling(1.0)), ("a", 2e-3): record("a", 0, falling(2.0))}
    ends |= {("b", 1e-3): record("b", 0, falling(1.0)), ("b", 2e-3): record("b", 0, falling(2.0), state="diverged")}
    ends |= {("c", 1e-3): record("c", 0, falling(1.0), state="diverged")}
    chosen = best_rates(lambda arm, rate: ends.get((arm, rate)), "abc", (1e-3, 2e-3))
    assert chosen == {"a": 2e-3, "b": 1e-3}


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_arms_with_permuted_labels_have_no_verdict(num_seeds: int) -> None:
    """Noisy curves of one law under two names: a verdict is as rare as intervals of 95 % allow."""
    chance, num, decided = random.Random(num_seeds), 1000, {-1: 0, 0: 0, 1: 0}
    for _ in range(num):
        curves = {
            name: [
                record(name, seed, falling(math.exp(chance.gauss(0, 0.03)), math.exp(chance.gauss(0, 0.01))))
                for seed in range(num_seeds)
            ]
            for name in ("one", "two")
        }
        decided[of(answer(arms(**curves), "one"), "two").decided] += 1
    assert decided[-1] / num < 0.045, decided
    assert decided[1] / num < 0.045, decided


def outcome() -> Outcome:
    records = arms(
        uniform=[record("uniform", seed, falling(1.0), ranges=(1.0, 2.0)) for seed in range(2)],
        quick=[record("quick", seed, falling(1.5 + seed / 100), ranges=(0.5, 3.0)) for seed in range(2)],
    )
    found = answer(records, "uniform", [parse_target("loss=0.5")], {"uniform": 1e-3, "quick": 2e-3})
    trials = {"uniform": {1e-3: 0.3, 2e-3: 0.4}, "quick": {1e-3: 0.3, 2e-3: None}}
    return Outcome("uniform", found, records, trials, make_notes((1e-3, 2e-3), found))


def test_tables_hold_what_was_found() -> None:
    text = terminal_table(outcome())
    assert text.splitlines()[-1].endswith("better")
    assert "0.3 *" in text  # the chosen rate
    data = json.loads(json.dumps(plain(outcome()), allow_nan=False))
    assert data["arms"]["quick"]["decided"] == "better"
    assert data["arms"]["quick"]["final_ratio"]["loss"]["interval"][1] < 1
    assert data["arms"]["quick"]["reaching"][-1]["target"] == 0.5
    rows = [line.split(",") for line in csv_text(outcome()).splitlines()]
    assert rows[0][:4] == ["arm", "learning_rate", "seed", "state"]
    assert [row[0] for row in rows[1:]] == ["uniform", "uniform", "quick", "quick"]


def test_one_rate_for_all_is_told() -> None:
    assert any("One learning rate" in note for note in make_notes((), []))
    assert not any("One learning rate" in note for note in make_notes((1e-3, 2e-3), []))


def test_arms_with_rates_of_their_own_did_not_share_one() -> None:
    found = outcome().answers
    faster = [replace(each, rate=1e-3 * number) for number, each in enumerate(found, 1)]
    assert not any("One learning rate" in note for note in make_notes((), faster))
