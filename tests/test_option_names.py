"""Options as a person misspells them: the nearest name is suggested, and - and _ are alike."""

import pytest
from commands import refused

from kairostep.cli import COMMANDS, make_parser

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate run --num_imges 4", "unrecognized arguments: --num_imges 4: did you mean --num_images? See"),
        ("evaluate run --check-point=3", "unrecognized arguments: --check-point=3: did you mean --checkpoint? See"),
        ("report run --outptu x", "unrecognized arguments: --outptu x: did you mean --output? See kairostep report"),
        ("patch x.py --samplr=uniform", "unrecognized arguments: --samplr=uniform: did you mean --sampler? See"),
        ("generate run --frobnicate", "unrecognized arguments: --frobnicate: see kairostep generate --help"),
        ("generate run -n 4", "unrecognized arguments: -n 4: see kairostep generate --help"),
        ("report", "the following arguments are required: RUN: see kairostep report --help"),
        ("compare digits --dry-rnu", "unknown option --dry-rnu: did you mean --dry_run? See"),
        ("compare digits --ouput x", "unknown option --ouput: did you mean --output? See kairostep compare --help"),
        ("compare digits --arsm=uniform", "unknown option --arsm: did you mean --arms? See"),
        ("find-lr digits --fctor 2", "unknown option --fctor: did you mean --factor? See kairostep find-lr --help"),
        ("analyse noise run --bnis 3", "unknown option --bnis: did you mean --bins? See kairostep analyse noise"),
        ("preview --prats=3", "unknown option --prats: did you mean --parts? See kairostep preview --help"),
        ("train --cnofig=x", "unknown option --cnofig: did you mean --config? See kairostep train --help"),
        ("train digits --batch-sizes=4", "unknown key --batch_sizes: did you mean --batch_size?"),
        ("train digits --data.flop=true", "unknown option of data digits: flop: did you mean flip?"),
    ],
)
def test_the_nearest_option_and_the_help_of_the_command_are_named(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *line.split()).startswith(message)


@pytest.mark.parametrize("name", ["--num_images", "--num-images", "--num_im", "--num-im"])
@pytest.mark.parametrize("value", [["=-5"], ["", "-5"]])
def test_dashes_and_underscores_are_alike(name: str, value: list[str]) -> None:
    words = [name + value[0], *value[1:]]
    assert make_parser().parse_args(["generate", "run", *words]).num == -5
    assert make_parser().parse_args(["evaluate", "run", *words]).num == -5


def test_dashes_and_underscores_are_alike_beside_settings() -> None:
    for flag in ("--dry-run", "--dry_run"):
        known, settings = make_parser().parse_known_args(["compare", "digits", flag, "--learning-rates", "1e-3,2e-3"])
        assert (known.dry_run, known.learning_rates, settings) == (True, "1e-3,2e-3", ["digits"])
    line = "analyse noise run --measure-seed 3 --batch-size=4"
    known, settings = make_parser().parse_known_args(line.split())
    assert (known.measure_seed, settings) == (3, ["run", "--batch-size=4"])  # settings are read elsewhere, alike too


def test_values_stay_as_they_are() -> None:
    known = make_parser().parse_args(["generate", "my-run", "--output=num-images", "--checkpoint", "last-one"])
    assert (str(known.directory), str(known.output), known.checkpoint) == ("my-run", "num-images", "last-one")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_written_with_underscores(command: str) -> None:
    commands = make_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr,index,call-overload]
    assert [name for name in commands[command].options if "-" in name[2:]] == []
