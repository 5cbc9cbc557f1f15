"""What cannot be compared is refused before anything is trained: the rule, the value, the fix."""

import re
from pathlib import Path

import pytest
from small_comparisons import command

import kairostep.cli

BAD: dict[str, tuple[list[str], str]] = {
    "no arms": (["compare", "digits", "--output", "OUT"], r"needs arms, got none: pass .*--arms"),
    "one arm": (["compare", "digits", "--arms", "uniform", "--output", "OUT"], "two arms or more, got .*uniform"),
    "an unknown arm": (
        ["compare", "digits", "--arms", "uniform,rot_loss", "--output", "OUT"],
        "did you mean root_loss",
    ),
    "two arms of one name": (
        ["compare", "digits", "--arms", "uniform,root_loss,uniform", "--output", "OUT"],
        "a name of its own, got 'uniform' twice: name them",
    ),
    "two arms with the same settings": (
        ["compare", "digits", "--arms", "uniform,uniform --batch_size=128", "--output", "OUT"],
        "arms must differ, got uniform and .* leave one out",
    ),
    "an empty arm": (["compare", "digits", "--arms", "uniform,,root_loss", "--output", "OUT"], "name a sampler"),
    "an open quote": (["compare", "digits", "--arms", "uniform,'root_loss", "--output", "OUT"], "whole quotes, got"),
    "a word that is no setting": (
        ["compare", "digits", "--arms", "uniform,root_loss p2", "--output", "OUT"],
        r"written --key=value, got 'p2'",
    ),
    "a setting that does not exist": (
        ["compare", "digits", "--arms", "uniform,root_loss --batchsize=4", "--output", "OUT"],
        r"unknown key --batchsize: did you mean --batch_size\? \(in arm root_loss-batchsize=4\)",
    ),
    "another process in an arm": (
        ["compare", "digits", "--arms", "uniform,root_loss --process=cosine", "--output", "OUT"],
        r"share data, network, process .* got process .*cosine.* in arm .* pass --process for all",
    ),
    "a seed in an arm": (
        ["compare", "digits", "--arms", "uniform,root_loss --seed=3", "--output", "OUT"],
        "sets --seed of each run, got it in arm root_loss-seed=3: pass --seeds, such as --seeds 0,1,2",
    ),
    "a seed in the settings": (command(Path("OUT"), "--seed=3"), "got it in the settings: pass --seeds"),
    "zero seeds": (command(Path("OUT"), "--seeds", "0"), r"--seeds must be in 1..1000, got 0: pass"),
    "seeds that are no numbers": (command(Path("OUT"), "--seeds", "a,b"), "--seeds must be a number or a list"),
    "a seed twice": (command(Path("OUT"), "--seeds", "1,1"), "seeds must differ, got '1,1'"),
    "a target without a metric": (command(Path("OUT"), "--target", "40"), r"METRIC=VALUE, got '40': pass .*fid=40"),
    "a target of an unknown metric": (
        command(Path("OUT"), "--target", "fdi=40"),
        "unknown metric fdi: valid are loss, weighted_loss, bound, fid",
    ),
    "a target that is no number": (command(Path("OUT"), "--target", "loss=low"), "a number above 0, got 'low'"),
    "a target that is never measured": (
        command(Path("OUT"), "--target", "fid=40"),
        "needs FID along the way.*fid_every",
    ),
    "a choice by what is not measured": (command(Path("OUT"), "--choose_by", "fid"), "needs FID, got runs without"),
    "a rate that is none": (command(Path("OUT"), "--learning_rates", "4e-4,fast"), "above 0, got 'fast'"),
    "a rate twice": (command(Path("OUT"), "--learning_rates", "1e-3,0.001"), "must differ, got"),
    "a rate of an arm and rates for all": (
        command(Path("OUT"), "--learning_rates", "1e-3,2e-3", arms="uniform,root_loss --learning_rate=1e-3"),
        "one of --learning_rates, got an arm with its own",
    ),
    "a budget without a unit": (command(Path("OUT"), "--budget", "30"), r"such as 90s, 30m or 1h30m, got '30'"),
    "no jobs": (command(Path("OUT"), "--jobs", "0"), "--jobs must be .* at least 1, got 0"),
    "an unknown baseline": (command(Path("OUT"), "--baseline", "unifrom"), "the baseline must be one of the arms"),
    "no output": (["compare", "digits", "--arms", "uniform,root_loss"], "a folder to work in, got none: pass"),
    "no preset": (["compare", "--arms", "uniform,root_loss", "--output", "OUT"], "takes a preset or --config FILE"),
    "an unknown preset": (command(Path("OUT"), preset="digts"), "unknown preset digts: did you mean digits"),
    "YAML that is not there": (command(Path("OUT"), arms="nowhere.yaml"), "readable YAML file, got 'nowhere.yaml'"),
    "YAML that cannot be read": (command(Path("OUT"), arms="torn.yaml"), "readable YAML file, got 'torn.yaml'"),
    "YAML without arms": (command(Path("OUT"), arms="armless.yaml"), r"arms must be names .*\(in armless.yaml\)"),
    "YAML with an unknown key": (command(Path("OUT"), arms="odd.yaml"), r"unknown key sedes: did you mean seeds"),
    "YAML with a name for no folder": (command(Path("OUT"), arms="named.yaml"), "must be one of a folder.*rename it"),
    "an output with other files": (command(Path("full")), "a folder of its own, got full with other files"),
    "a table of nothing": (["compare", "--table", "nowhere"], "must be a folder, got nowhere: name what"),
    "a table of another folder": (["compare", "--table", "full"], r"must hold comparison.yaml, got full"),
    "a table with settings": (["compare", "--table", "full", "--steps=3"], "shows what is there, got --steps=3"),
    "a table with seeds": (["compare", "--table", "full", "--seeds", "2"], "shows what is there, got --seeds"),
    "a table with a budget": (["compare", "--table", "full", "--budget=2h"], "shows what is there, got --budget"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torn.yaml").write_text("arms: {uniform: [")
    (tmp_path / "armless.yaml").write_text("seeds: 3\n")
    (tmp_path / "odd.yaml").write_text("sedes: 3\narms: {a: uniform, b: root_loss}\n")
    (tmp_path / "named.yaml").write_text("arms: {../a: uniform, b: root_loss}\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("not ours")
    return tmp_path


@pytest.mark.parametrize("what", BAD)
def test_it_is_refused_in_words(what: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = BAD[what]
    with pytest.raises(SystemExit) as left:
        kairostep.cli.main(arguments)
    said = capsys.readouterr().err
    assert left.value.code == 2, said
    assert "Traceback" not in said
    assert re.search(message, said), said
    assert not (folder / "OUT" / "runs").exists()


def test_another_comparison_in_the_folder_is_refused_with_what_differs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kairostep.cli.main(command(Path("OUT"), "--steps=2", "--seeds", "1"))
    before = sorted(path for path in (folder / "OUT").rglob("*") if path.is_file())
    for arguments, message in (
        (["--steps=4"], "steps: 2 -> 4"),
        (["--steps=2", "--batch_size=16"], "batch_size: 8 -> 16"),
        (["--steps=2", "--data=fashion_mnist"], "data: digits -> fashion_mnist"),
        (["--steps=2", "--baseline", "root_loss"], "baseline: uniform -> root_loss"),
    ):
        with pytest.raises(SystemExit) as left:
            kairostep.cli.main(command(Path("OUT"), "--seeds", "1", *arguments))
        assert left.value.code == 2
        said = capsys.readouterr().err
        assert "holds another comparison" in said
        assert message in said
    assert sorted(path for path in (folder / "OUT").rglob("*") if path.is_file()) == before
