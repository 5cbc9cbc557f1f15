"""From what a person types to a config: where the preset stands, how a run is named."""

import pytest

from kairostep.experiments.command_line import configure, take_preset


@pytest.mark.parametrize(
    ("settings", "output"),
    [
        ([], "runs/digits"),
        (["--network=unet", "--steps=7", "--workers=0"], "runs/digits"),
        (["--weighting=min_snr"], "runs/digits-min_snr"),
        (["--sampler=adaptive", "--sampler.floor=0.2"], "runs/digits-adaptive-floor=0.2"),
        (
            ["--learning_rate=1e-4", "--prediction=x0", "--seed=3"],
            "runs/digits-prediction=x0-learning_rate=0.0001-seed=3",
        ),
        (["--network.multipliers=[1, 1]"], "runs/digits-multipliers=[1,1]"),
        (["--data=images", "--data.folder=a/b", "--data.size=48"], "runs/digits-images-size=48"),
        (["--output=some/where", "--seed=3"], "some/where"),
    ],
)
def test_a_run_is_named_after_what_was_chosen(settings: list[str], output: str) -> None:
    assert configure("digits", None, settings).output == output


def test_long_names_are_cut_and_still_differ() -> None:
    masses = [f"--sampler.mass={list(range(1, num))}" for num in (60, 61)]
    names = [configure("digits", None, ["--sampler=tabulated", mass]).output for mass in masses]
    assert len(set(names)) == 2
    assert max(map(len, names)) < 150


@pytest.mark.parametrize("arguments", [["digits", "--steps", "5"], ["--steps", "5", "digits"], ["--steps=5", "digits"]])
def test_the_preset_may_stand_anywhere(arguments: list[str]) -> None:
    name, settings = take_preset(arguments)
    assert configure(name, None, settings).steps == 5
