"""Arms are read as they are written, from the command line and from YAML."""

from pathlib import Path

import pytest

from kairostep.commands.compare import seeds_of
from kairostep.comparison.arms import Arm, parse_rates, read_arms


def test_a_list_of_samplers_and_settings() -> None:
    found = read_arms("uniform,root_loss,logit_normal --weighting=min_snr,--weighting=p2,uniform --batch_size=256").arms
    assert found == [
        Arm("uniform", ("--sampler=uniform",)),
        Arm("root_loss", ("--sampler=root_loss",)),
        Arm("logit_normal-min_snr", ("--sampler=logit_normal", "--weighting=min_snr")),
        Arm("p2", ("--weighting=p2",)),
        Arm("uniform-batch_size=256", ("--sampler=uniform", "--batch_size=256")),
    ]


def test_commas_in_quotes_and_brackets_part_no_arms() -> None:
    found = read_arms("tabulated --sampler.mass=[1,2,1],'uniform --betas=0.9,0.95',mine.samplers:Mine").arms
    assert [arm.settings for arm in found] == [
        ("--sampler=tabulated", "--sampler.mass=[1,2,1]"),
        ("--sampler=uniform", "--betas=0.9,0.95"),
        ("--sampler=mine.samplers:Mine",),
    ]
    assert [arm.name for arm in found] == ["tabulated-mass=_1_2_1", "uniform-betas=0.9_0.95", "mine.samplers_Mine"]


def test_a_file_names_arms_and_what_else_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "preset: digits\nsettings: --steps=10\nseeds: [0, 2]\nbaseline: plain\nlearning_rates: [8e-4, 4e-4]\n"
        "targets: {loss: 0.1}\ntasks: {flow: --process=flow, linear: [--process=linear]}\n"
        "arms:\n  plain: uniform\n  wide: [uniform, --batch_size=256]\n  same: [--sampler=root_loss]\n"
    )
    found = read_arms(str(path))
    assert [arm.name for arm in found.arms] == ["plain", "wide", "same"]
    assert found.arms[1].settings == ("--sampler=uniform", "--batch_size=256")
    assert (found.preset, found.seeds, found.baseline) == ("digits", "0,2", "plain")
    assert (found.learning_rates, found.targets) == ((4e-4, 8e-4), ("loss=0.1",))
    assert found.tasks == {"flow": ("--process=flow",), "linear": ("--process=linear",)}


@pytest.mark.parametrize(("written", "found"), [("3", (0, 1, 2)), ("[7]", (7,)), ("[0, 4]", (0, 4)), ('"0,4"', (0, 4))])
def test_a_list_of_seeds_says_which_and_a_number_how_many(written: str, found: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"seeds: {written}\narms: {{plain: uniform}}\n")
    assert seeds_of(str(read_arms(str(path)).seeds)) == found


def test_rates_are_put_in_order() -> None:
    assert parse_rates("8e-4,0.0004") == (4e-4, 8e-4)
