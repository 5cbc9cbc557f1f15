"""`kairostep preview` and `kairostep analyse`: what they print, write and refuse."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from commands import refused
from PIL import Image

from kairostep.cli import main
from kairostep.commands import noise_analysis
from kairostep.commands.checkpoint_analyses import optimizer_of
from kairostep.diffusion import Objective, StableTarget
from kairostep.experiments import Config
from kairostep.registry import samplers

TINY = ["--network.channels=8", "--network.multipliers=[1,1]", "--network.blocks=1", "--network.attention=[]"]
SHORT = ["--steps=4", "--batch_size=4", "--held_out_images=16", "--sample_steps=2", "--workers=0", "--warmup_steps=0"]
SMALL_VARIANCE = ["--timesteps=5", "--repeats=3", "--rows=2"]
SMALL_RANGES = ["--ranges=2", "--parts=4", "--range_steps=2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that `analyse` trained from a preset, with what it wrote."""
    patch = pytest.MonkeyPatch()
    patch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    folder = tmp_path_factory.mktemp("analysis")
    patch.chdir(folder)
    main(["analyse", "gradient-variance", "digits", *TINY, *SHORT, "--seed=3", *SMALL_VARIANCE])
    patch.undo()
    (run,) = folder.glob("analysis-digits*seed=3")
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of it in the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "run")
    return Path("run")


def result_of(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    assert document["schema"] == 1
    assert document["command"].startswith("kairostep ")
    assert document["provenance"]["kairostep"]
    return document


def width_of(path: str) -> int:
    with Image.open(path) as picture:
        return picture.size[0]


def test_a_preset_is_trained_and_all_its_checkpoints_are_measured(trained: Path) -> None:
    document = result_of(trained / "analysis" / "gradient-variance.json")
    result = document["result"]
    assert list(result["checkpoints"]) == ["1", "2", "3", "4"]  # as many as steps allow, all kept
    assert document["config"]["steps"] == 4
    assert document["seeds"] == [0]
    at = result["checkpoints"]["4"]["at"]
    assert [round(one["t"], 3) for one in at] == [0.1, 0.3, 0.5, 0.7, 0.9]
    assert all(one["variance"]["value"] > 0 and one["variance"]["error"] > 0 for one in at)
    ratio = result["early_to_late"]["4"]["simple"]
    assert ratio["low"] < ratio["value"] < ratio["high"]
    assert "the paper's finding, larger early than late," in result["verdicts"][0]


def test_gradient_variance_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["analyse", "gradient-variance", "run", *SMALL_VARIANCE, "--checkpoint=2", "--weights=ema", "--output=v.png"])
    printed = capsys.readouterr().out
    assert "Var L_simple" in printed
    assert "95 % interval" in printed
    assert list(result_of(run / "analysis" / "gradient-variance.json")["result"]["checkpoints"]) == ["2"]
    assert width_of("v.png") > 1000


def test_interdependence_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["analyse", "interdependence", "run", *SMALL_RANGES, "--output=effects.html"])
    printed = capsys.readouterr().out
    assert "trained on t 0.00..0.50: loss there" in printed
    result = result_of(run / "analysis" / "interdependence.json")["result"]
    assert [len(row) for row in result["matrix"]] == [4, 4, 4]
    assert result["training"]["num_steps"] == 2
    assert result["step"] == 4
    assert "change of the held-out loss" in Path("effects.html").read_text()


def test_gradient_noise_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["analyse", "noise", str(run), "--bins=4", "--rows=4", "--output=noise.png"])
    printed = capsys.readouterr().out
    result = result_of(run / "analysis" / "noise.json")["result"]
    assert result["verdict"] in printed
    assert re.match(r"in Adam's metric (the best density over t has|no density over t is clearly)", result["verdict"])
    assert set(result["densities"]) >= {"uniform", "logit_normal", "root_loss of these losses", "least"}
    for measured in result["metrics"].values():
        assert len(measured["moments"]) == 4
        ratios = {name: ratio["value"] for name, ratio in measured["noise_ratio"].items()}
        assert ratios["uniform"] == pytest.approx(1)
        assert measured["equivalent_batch"]["uniform"] == pytest.approx(4)
        assert min(measured["least"].values()) <= ratios["least"] <= max(measured["least"].values())
    adam = {name: ratio["value"] for name, ratio in result["metrics"]["adam"]["noise_ratio"].items()}
    same_rows, other_rows = (result["metrics"]["adam"]["least"][key] for key in ("same_rows", "other_rows"))
    assert f"On the same rows it has {same_rows:.3f} (adam)" in printed
    assert same_rows < adam["least"] < other_rows
    assert same_rows < min(value for name, value in adam.items() if name != "least")
    assert width_of("noise.png") > 1000
    (line,) = [line for line in printed.splitlines() if line.startswith("left out: ")]
    shown = {name.partition(" ")[0] for name in result["densities"]}
    assert [
        name for name in samplers.registered if (name in shown) == (re.search(rf"\b{name}\b", line) is not None)
    ] == []
    assert "beta, curriculum, tabulated (options without a default)" in line
    assert "infonoise, least_noise, loss_second_moment (no density of their own before they have learned)" in line
    assert "speed (a density that changes the objective)" in line


def test_gradient_noise_of_too_few_rows_has_no_verdict(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["analyse", "noise", str(run), "--bins=4", "--rows=3"])
    printed = capsys.readouterr().out
    assert "3 rows in a bin are too few to say what the best density over t saves: take at least 4" in printed
    assert re.search(r"least .* ± \?", printed) is not None
    measured = result_of(run / "analysis" / "noise.json")["result"]["metrics"]["adam"]["noise_ratio"]
    assert measured["least"]["value"] > 0
    assert measured["least"]["error"] is None
    assert measured["laplace"]["error"] > 0


def test_measuring_again_gives_the_same(run: Path) -> None:
    before = result_of(run / "analysis" / "gradient-variance.json")["result"]
    main(["analyse", "gradient-variance", "run", *SMALL_VARIANCE])
    assert result_of(run / "analysis" / "gradient-variance.json")["result"] == before


def test_increments_of_a_run_and_of_a_process(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["analyse", "increments", "run"])
    areas = result_of(run / "analysis" / "increments.json")["result"]["areas"]
    assert [area["end"] for area in areas] == [219, 641, 1000]
    main(["analyse", "increments", "--process", "cosine", "--output", "cosine.json"])
    assert result_of(Path("cosine.json"))["result"]["areas"][0]["end"] == 495
    assert "deceleration" in capsys.readouterr().out
    for kind in ("png", "html"):
        main(["analyse", "increments", "digits-flow", f"--output=flow.{kind}"])
        assert Path(f"flow.{kind}").stat().st_size > 1000


def test_preview_needs_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = ["--sampler=logit_normal", "--process=linear", "--weighting=min_snr", "--prediction=epsilon"]
    main(["preview", *chosen, "--output=p.json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "sampler logit_normal, weighting min_snr, process linear, prediction epsilon" in captured.out
    result = result_of(Path("p.json"))["result"]
    assert len(result["over_t"]) == len(result["over_log_snr"]) == 20
    assert len(result["curves"]["density"]) == 1000
    main(["preview", "cifar10-ddpm", "--parts", "5", "--output", "p.png"])
    assert "sampler adaptive changes its density in training: this is how it starts" in capsys.readouterr().err
    assert width_of("p.png") > 1000
    main(["preview", "imagenet-dit", "--output", "p.html"])
    assert "density of draws" in Path("p.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analyse"], "the following arguments are required: ANALYSIS"),
        (["analyse", "gradients", "run"], "argument ANALYSIS: invalid choice: 'gradients' (choose from"),
        (["analyse", "gradient-variance"], "an analysis must be of a run or a preset, got none"),
        (["analyse", "gradient-variance", "digit"], "unknown run or preset digit: did you mean digits?"),
        (["analyse", "interdependence", "nothing/here"], "unknown run or preset nothing/here"),
        (["analyse", "interdependence", "run/analysis"], "a run directory must hold config.yaml, got run/analysis"),
        (["analyse", "gradient-variance", "run", "--seed=1"], "a run must be analysed as it was trained, got --seed=1"),
        (["analyse", "gradient-variance", "run", "--checkpoint=9"], "checkpoint must be last, best or a step"),
        (["analyse", "gradient-variance", "run", "--timesteps=4"], "timesteps must be a whole number of at least 5"),
        (["analyse", "gradient-variance", "run", "--repeats=1"], "repeats must be a whole number of at least 2, got 1"),
        (["analyse", "gradient-variance", "run", "--rows=0"], "rows must be a whole number of at least 1, got 0"),
        (["analyse", "interdependence", "run", "--ranges=3"], "num_parts must be a multiple of the 3 ranges, got 20"),
        (["analyse", "interdependence", "run", "--output=x.gif"], "--output must end in .html, .png, .json, got x.gif"),
        (["analyse", "increments", "--output=no/x.png"], "--output must be in a folder that exists, got no/x.png"),
        (["analyse", "increments", "--process=cosin"], "unknown process cosin: did you mean cosine?"),
        (["analyse", "gradient-variance", "digits", "--stepz=3"], "unknown key --stepz: did you mean --steps?"),
        (["preview", "--sampler=logit"], "unknown sampler logit"),
        (["preview", "--parts=0"], "num_parts must be a whole number of at least 1, got 0"),
        (["preview", "digits", "--sampler.floor=2"], "floor must be"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(
    arguments: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *arguments).startswith(message)


@pytest.mark.parametrize("command", [["preview"], ["analyse"], ["analyse", "gradient-variance"]])
def test_there_is_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert "kairostep" in capsys.readouterr().out


def test_noise_is_that_of_the_stable_target_that_was_trained(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets: list[object] = []

    def stop(model: object, objective: Objective, *_: object, **__: object) -> None:
        targets.append(objective.target)
        raise SystemExit

    monkeypatch.setattr(noise_analysis, "gradient_noise", stop)
    config = run / "config.yaml"
    plain = config.read_text()
    assert "stable_target: 0" in plain
    for size in (0, 16):
        config.write_text(plain.replace("stable_target: 0", f"stable_target: {size}"))
        with pytest.raises(SystemExit):
            main(["analyse", "noise", str(run), "--bins=4", "--rows=3"])
    assert targets[0] is None
    assert isinstance(targets[1], StableTarget)


def test_ranges_are_trained_at_the_rate_before_its_decay(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cosine ends at a rate of 0, at which every range would seem to do nothing to the others."""
    config, parameter = Config(learning_rate=2e-3, schedule="cosine"), torch.nn.Parameter(torch.zeros(3))
    before = torch.optim.Adam([parameter], lr=5e-8)
    parameter.grad = torch.ones(3)
    before.step()
    found = optimizer_of(config, before.state_dict(), [parameter])
    assert found.param_groups[0]["lr"] == 2e-3
    assert torch.equal(found.state[parameter]["exp_avg"], before.state[parameter]["exp_avg"])
    main(["analyse", "interdependence", str(run), *SMALL_RANGES])
    assert "the learning rate is 0.006, without warm-up or decay" in capsys.readouterr().out
