"""What a person types, and what is said in return."""

import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from accelerate.state import AcceleratorState
from PIL import Image

import kairostep
from kairostep.cli import main
from kairostep.data import cifar10_obtain
from kairostep.experiments import (
    PRESETS,
    Component,
    Config,
    preset,
)
from kairostep.installation import install_command
from kairostep.registry import REGISTRIES

TINY = ["--network.channels=8", "--network.multipliers=[1,1]", "--network.blocks=1", "--network.attention=[]"]
SHORT = ["--steps=2", "--batch_size=4", "--held_out_images=8", "--sample_steps=2", "--workers=0", "--warmup_steps=0"]
QUICK = [*TINY, *SHORT]


@pytest.fixture(autouse=True)
def _new_process_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)  # accelerate remembers the precision of the first run in a process


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder of 60 images in two classes, PNG and JPEG, of several sizes."""
    for number in range(60):
        folder = tmp_path / "photos" / ("cats" if number % 2 else "dogs")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (16 + number % 5, 20, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.{'png' if number % 3 else 'jpg'}")
    return tmp_path / "photos"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Return the one line with which a command is refused, before it has left anything behind."""
    before = set(Path().rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    assert ended.value.code == code
    assert captured.err.startswith("kairostep: error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert set(Path().rglob("*")) == before
    return captured.err.removeprefix("kairostep: error: ").strip()


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


# Wrong usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "argument COMMAND: invalid choice: 'trian' (choose from"),
        (["presets", "--all"], "unrecognized arguments: --all"),
        (["data"], "the following arguments are required: name, folder"),
        (["data", "mnist", "here"], "argument name: invalid choice: 'mnist' (choose from"),
        (["train", "--config"], "argument --config: expected one argument"),
        (["train"], "train takes a preset or --config FILE: `kairostep presets` lists the presets"),
        (["train", "digits", "--config=x.yaml"], "train takes a preset or --config FILE"),
        (["train", "digts"], "unknown preset digts: did you mean digits?"),
        (["train", "zzz"], "unknown preset zzz: valid are digits, digits-flow"),
        (["train", "digits", "more"], "settings must be written --key=value, got 'more'"),
        (["train", "digits", "--stesp=3"], "unknown key --stesp: did you mean --steps?"),
        (["train", "digits", "--steps"], "steps must be a whole number, got True"),
        (["train", "digits", "--steps=-1"], "steps must be a whole number of at least 1, got -1"),
        (["train", "digits", "--learning_rate=fast"], "learning_rate must be a number, got 'fast'"),
        (["train", "digits", "--lr=1e-3"], "unknown key --lr: valid are --data, "),
        (["train", "digits", "--ema=0.9"], "unknown key --ema: did you mean --ema_decay?"),
        (
            ["train", "digits", "--label_dropout=1"],
            "label_dropout must be in [0, 1), got 1.0: pass for instance label_",
        ),
        (
            ["data", "cifar10", "texts/key.yaml/x"],
            "folder must be one that can be written, got texts/key.yaml/x: Not a",
        ),
        (["evaluate", "nowhere", "--inception=no.pt"], "the Inception network must be a TorchScript file, got no"),
        (
            ["generate", "nowhere", "--sampler=heun"],
            "the solver is named by --solver, a sampler draws t in training: wri",
        ),
        (["doctor", "--all"], "unrecognized arguments: --all"),
        (["train", "digits", "--sampler=adaptve"], "unknown sampler adaptve: did you mean adaptive?"),
        (["train", "digits", "--sampler", "adaptve"], "unknown sampler adaptve: did you mean adaptive?"),
        (["train", "--sampler=adaptve", "digits"], "unknown sampler adaptve: did you mean adaptive?"),
        (["train", "digits", "--sampler=adaptive", "--sampler.flor=1"], "unknown option of sampler adaptive: flor:"),
        (["train", "digits", "--sampler=beta"], "sampler beta needs a: pass --sampler.a=..."),
        (["train", "digits", "--batch_size=7", "--accumulate=2"], "batch_size must be a multiple of accumulate, got 7"),
        (["train", "digits", "--precision=fp16"], "precision fp16 needs a GPU, got a CPU: pass --precision=fp32"),
        (["train", "digits", "--sample_steps=2000"], "sample_steps must be at most the 1000 steps of the process"),
        (["train", "images", "--label_dropout=0.1"], "data images needs folder: pass --data.folder=..."),
        (["train", "images", "--data.folder=nowhere"], "folder must be an existing folder of images, got nowhere"),
        (["train", "images", "--data.folder=empty"], "folder must hold at least one image (.bmp"),
        (["train", "images", "--data.folder=texts"], "folder must hold at least one image (.bmp"),
        (["train", "cifar10-small"], "data cifar10 needs path: pass --data.path=..."),
        (["train", "cifar10-small", "--data.path=no.npz"], "path must be a file or a folder of CIFAR-10, got no.npz"),
        (["train", "fashion-mnist", "--data.folder=empty"], "the folder of Fashion-MNIST must hold train-images-idx3"),
        (["train", "digits", "--autoencoder=empty"], "the folder of an autoencoder must hold config.json, got empty"),
        (["train", "--config=missing.yaml"], "--config must be a readable YAML file, got 'missing.yaml'"),
        (["train", "--config=texts/list.yaml"], "--config must hold `key: value` lines, got"),
        (["train", "--config=texts/key.yaml"], "unknown key stesp: did you mean steps?"),
        (["train", "--config=texts/number.yaml"], "unknown key 1: valid are data"),
        (["train", "digits", "--trackers=nonsense"], "Unsupported logging capability: nonsense"),
    ],
)
def test_wrong_usage_is_told_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("empty", "texts"):
        (tmp_path / name).mkdir()
    for name, text in {"list": "- 1", "key": "stesp: 3", "number": "1: 2"}.items():
        (tmp_path / "texts" / f"{name}.yaml").write_text(text)
    assert refused(capsys, *arguments).startswith(message)


def test_yaml_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "torn.yaml").write_text("steps: [")
    assert refused(capsys, "train", "--config=torn.yaml").startswith("--config must be a readable YAML file, got 'torn")


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_a_run_directory_that_cannot_be_made_is_told(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert "file" in refused(capsys, "train", "digits", *QUICK, f"--output={output}")


# Help and lists


def test_help_lists_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--sampler=adaptive", "--help"])
    text = capsys.readouterr().out
    assert re.search(r"--sampler=adaptive: .*\bevery=40, .*policy=network", text)
    plain = replace(preset("digits"), sampler=Component("adaptive"), output="runs/digits-adaptive")
    for field in fields(Config):
        value = getattr(plain, field.name)
        assert f"  --{field.name}={getattr(value, 'name', value)} " in text
        assert field.metadata["help"] in text
    for registry in REGISTRIES.values():
        assert ", ".join(registry) in text


@pytest.mark.parametrize("arguments", [["--help"], ["presets", "--help"], ["data", "--help"]])
def test_every_other_command_has_help_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: kairostep")


def test_presets_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    main(["presets"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert all(line.endswith(preset.text) for line, preset in zip(lines, PRESETS.values(), strict=True))


# Training


def test_a_run_leaves_these_files(tmp_path: Path) -> None:
    main(["train", "digits", *QUICK, "--output=run"])
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "checkpoints", "samples", "model"}


def test_runs_lie_under_runs_unless_told(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"network": {"name": "unet", "channels": 8, "attention": [4]}}))
    common = ["--steps=1", "--batch_size=2", "--held_out_images=0", "--sample_steps=1"]
    main(["train", "digits", *common])
    main(["train", "--config", "mine.yaml", *common, "--network.multipliers=[1,1]"])
    assert {path.name for path in Path("runs").iterdir()} == {"digits-batch_size=2", "mine"}


def test_a_finished_run_says_so_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "digits", *QUICK, "--output=run"])
    assert "trained 2 steps" in capsys.readouterr().out
    before = contents(tmp_path / "run")
    for again in (["digits", *QUICK, "--output=run"], ["--config=run/config.yaml"]):
        main(["train", *again])
        assert "nothing to do, all steps were taken before" in capsys.readouterr().out
        assert contents(tmp_path / "run") == before
    main(["train", "--config=run/config.yaml", "--steps=3"])
    assert "going on from step 2 to 3" in capsys.readouterr().out
    assert (tmp_path / "run" / "samples" / "step-00000003.png").is_file()


def test_a_directory_with_another_run_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "digits", *QUICK, "--output=run"])
    capsys.readouterr()
    before = contents(tmp_path / "run")
    again = ["train", "digits", *QUICK, "--output=run"]
    assert refused(capsys, *again, "--resume=false").startswith("run already holds a run and --resume is false")
    message = refused(capsys, *again, "--seed=3", "--sampler=mode")
    assert "(sampler: root_loss -> mode; seed: 0 -> 3)" in message
    message = refused(capsys, *again, "--network.channels=16")
    assert "(network.channels: 8 -> 16)" in message
    assert contents(tmp_path / "run") == before


def test_fewer_steps_than_a_run_has_are_told_and_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "digits", *QUICK, "--output=run"])
    before = contents(tmp_path / "run")
    capsys.readouterr()
    main(["train", "digits", *QUICK, "--steps=1", "--output=run"])
    told = capsys.readouterr().out
    assert "2 steps taken before, " in told
    assert "nothing to do, 2 steps were taken before, more than --steps=1: raise --steps to go on" in told
    assert contents(tmp_path / "run") == before


def test_a_list_is_stored_as_a_list_however_it_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = [argument.replace("[1,1]", "1,1") for argument in QUICK]
    main(["train", "digits", *written, "--output=run"])
    config = Path("run/config.yaml")
    assert yaml.safe_load(config.read_text())["network"]["multipliers"] == [1, 1]
    config.write_text(
        config.read_text().replace("  multipliers:\n  - 1\n  - 1\n", "  multipliers: 1,1\n")
    )  # as it was once
    main(["train", "digits", *QUICK, "--steps=3", "--output=run"])
    assert "going on from step 2 to 3" in capsys.readouterr().out


def test_a_run_says_what_it_writes_and_how_long_all_of_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "digits", *QUICK, "--output=run", "--log_every=1"])
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step 1/2: loss \d\.\d+, [\d.e+]+ images/s, .* left", lines[3])
    assert re.fullmatch(r"step 2/2: loss \d\.\d+, [\d.e+]+ images/s, held-out loss \d\.\d+", lines[4])
    assert lines[5] == "all 2 steps taken: writing a checkpoint, the model and samples to run"
    assert re.fullmatch(r"trained 2 steps in .* of training: run", lines[6])
    assert re.fullmatch("this command took .* s, with start, held-out losses, samples and files", lines[7])
    assert lines[8] == "make images with: kairostep generate run --num 64"


def test_the_warm_up_of_a_preset_shrinks_with_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    quick = [argument for argument in QUICK if not argument.startswith(("--warmup", "--steps"))]
    main(["train", "digits", *quick, "--steps=20", "--output=run"])
    assert "warm-up" not in capsys.readouterr().err
    assert yaml.safe_load(Path("run/config.yaml").read_text())["warmup_steps"] == 2
    main(["train", "digits", *quick, "--steps=30", "--output=run"])  # goes on with the warm-up that it has
    assert yaml.safe_load(Path("run/config.yaml").read_text())["warmup_steps"] == 2
    assert "going on from step 20 to 30" in capsys.readouterr().out
    main(["train", "digits", *quick, "--steps=2", "--warmup_steps=5", "--output=long"])
    assert "note: warm-up is longer than a tenth of the run, 5 of 2 steps" in capsys.readouterr().err


IMAGES = ["train", "images", "--data.folder=photos", "--data.size=16", "--data.held_out=0.2", *QUICK]


def test_a_folder_of_images_is_trained_on_by_class(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*IMAGES, "--label_dropout=0.1", "--output=run"])
    assert "(3, 16, 16)" in capsys.readouterr().out
    config = yaml.safe_load(Path("run/model/unet/config.json").read_text())
    assert config["num_class_embeds"] == 3  # two classes, and none
    with Image.open("run/samples/step-00000002.png") as grid:
        assert grid.size == (270, 270)  # eight images of 16 and seven lines between them, twice as large


def classes_in(directory: str) -> int | None:
    classes: int | None = yaml.safe_load(Path(directory, "model/unet/config.json").read_text())["num_class_embeds"]
    return classes


def test_class_folders_are_used_unless_told_otherwise(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*IMAGES, "--output=run"])
    told = capsys.readouterr()
    assert "note: 2 subfolders are used as classes, 10% of the labels hidden" in told.err
    assert ", 2 classes, " in told.out
    assert (classes_in("run"), yaml.safe_load(Path("run/config.yaml").read_text())["label_dropout"]) == (3, 0.1)
    for number, without in enumerate(("--data.classes=none", "--label_dropout=null", "--stable_target=4")):
        main([*IMAGES, without, f"--output=without{number}"])
        assert classes_in(f"without{number}") is None
        assert "classes" not in capsys.readouterr().out


def test_a_run_that_began_without_classes_goes_on_without_them(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*IMAGES, "--label_dropout=null", "--output=run"])
    main([*IMAGES, "--output=run", "--steps=3"])
    assert "going on from step 2 to 3" in capsys.readouterr().out
    assert yaml.safe_load(Path("run/config.yaml").read_text())["label_dropout"] is None


def test_a_folder_without_classes_is_trained_on_as_before(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*IMAGES, "--data.folder=photos/cats", "--output=run"])
    told = capsys.readouterr()
    assert "classes" not in told.out + told.err
    assert "note: no images are held out: there will be no held-out loss, no best checkpoint" in told.err
    assert yaml.safe_load(Path("run/config.yaml").read_text())["label_dropout"] is None


def test_classes_are_needed_to_hide_labels(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, *IMAGES, "--data.classes=none", "--label_dropout=0.1")
    assert message.startswith("label_dropout must be null for data without classes, got 0.1")


def test_bad_images_are_refused_if_that_is_asked_for(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "cats" / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    message = refused(capsys, *IMAGES, "--data.bad_images=refuse")
    assert message.startswith("images must be readable and at least 16 pixels wide and high, which 1 of ")
    assert "cats/torn.png (not an image, or of an unknown format)" in message


def test_images_that_are_too_small_are_told(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "at least one image must be readable and 64 pixels wide" in refused(capsys, *IMAGES, "--data.size=64")


# Data


def test_data_prints_where_the_set_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kairostep.data.obtain_cifar10", lambda folder: folder / "cifar10.npz")
    main(["data", "cifar10", "here"])
    assert capsys.readouterr().out.endswith("--data.path=here/cifar10.npz\n")


def test_data_that_cannot_be_had_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(cifar10_obtain.urllib.request, "urlopen", offline)
    monkeypatch.setattr(cifar10_obtain.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["data", "cifar10", "here"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("kairostep: error: here/cifar10.npz must come from somewhere, but every way failed:\n")
    for part in ("there are none", "no route to host", "npm is not installed", "into here and try again"):
        assert part in message


# As processes


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(kairostep.__file__).parents[1])}  # absolute: we are elsewhere
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_real_process_trains_and_leaves_out_a_bad_image(photos: Path) -> None:
    (photos / "cats" / "torn.jpg").write_bytes(b"\xff\xd8 and no more")
    ended = python("-m", "kairostep", *IMAGES, "--data.classes=none")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.startswith("kairostep: left out images that cannot be read or are too small, 1 of 61 in photos")
    assert "cats/torn.jpg (" in ended.stderr
    assert ended.stderr.count("\n") == 1
    directory = re.search("run directory (runs/images-.*)", ended.stdout)[1]
    assert f'DDPMPipeline.from_pretrained("{directory}/model")' in ended.stdout
    assert Path(directory, "model", "model_index.json").is_file()


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(kairostep.__file__).parents[1])}
    for arguments in ("train --help", "generate --help", "presets"):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "kairostep", *arguments.split()]
        ended = subprocess.run(
            command, env=environment, stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False
        )
        os.close(writer)
        assert ended.stderr == b""


def test_a_report_on_settings_that_cannot_be_read_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text("seed: [")
    with pytest.raises(SystemExit) as ended:
        main(["report", "run"])
    assert ended.value.code == 1
    assert re.search(
        r"run: config\.yaml cannot be read.*so that its settings are not on the page", capsys.readouterr().err
    )
    assert Path("report.html").is_file()


def test_a_real_process_is_refused_without_a_traceback() -> None:
    ended = python("-m", "kairostep", "train", "digits", "--sampler=adaptve")
    assert ended.returncode == 2
    assert ended.stderr == "kairostep: error: unknown sampler adaptve: did you mean adaptive?\n"
    assert ended.stdout == ""
    assert not list(Path().iterdir())


WITHOUT_EXTRA = """
import sys
import torch
before = set(sys.modules)
import kairostep
import kairostep.cli
new = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert new == {"kairostep"}, new

def code_of(*arguments):
    try:
        kairostep.cli.main(arguments)
    except SystemExit as ended:
        return ended.code

sys.modules["yaml"] = None
assert code_of("train", "--help") == code_of("train", "digits") == 1
del sys.modules["yaml"]
sys.modules["diffusers"] = None
assert code_of("train", "digits") == 1
"""


def test_without_the_extra_the_core_needs_torch_alone_and_commands_name_the_extra() -> None:
    ended = python("-c", WITHOUT_EXTRA)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stderr.splitlines()
    needed = "kairostep: error: kairostep train needs {}, which is not installed: " + install_command("train")
    assert lines == [needed.format("pyyaml")] * 2 + [needed.format("diffusers")]
    assert not list(Path().iterdir())
