"""`kairostep train` as a person types it: what it says, what it leaves, and folders of images."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from commands import contents, python, refused
from PIL import Image

from kairostep.began import BEGAN
from kairostep.cli import main

TINY = ["--network.channels=8", "--network.multipliers=[1,1]", "--network.blocks=1", "--network.attention=[]"]
SHORT = ["--steps=2", "--batch_size=4", "--held_out_images=8", "--sample_steps=2", "--workers=0", "--warmup_steps=0"]
QUICK = [*TINY, *SHORT]

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder of 60 images in two classes, PNG and JPEG, of several sizes."""
    for number in range(60):
        folder = tmp_path / "photos" / ("cats" if number % 2 else "dogs")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (16 + number % 5, 20, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.{'png' if number % 3 else 'jpg'}")
    return tmp_path / "photos"


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
    assert lines[8] == "make images with: kairostep generate run --num_images 64"


def test_the_time_of_a_command_counts_from_the_first_import(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kairostep.cli.BEGAN", BEGAN - 7200)
    monkeypatch.setattr(sys, "argv", ["kairostep", "train", "digits", *QUICK, "--output=run"])
    main()
    assert re.search("^this command took 2 h", capsys.readouterr().out, re.MULTILINE)
    first = python("-X", "importtime", "-c", "import kairostep").stderr
    assert first.index(" kairostep.began\n") < first.index(" torch\n")


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


def test_a_size_that_the_network_cannot_halve_is_named_as_it_is_typed(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, *IMAGES, "--data.size=15")
    assert message.startswith(
        "--data.size must be divisible by 2 to be halved 1 times, got 15: pad to 16 (--data.size="
    )
    fixed = refused(capsys, "train", "digits", "--network.multipliers=1,1,1,1,1")
    assert fixed.startswith("sample_size must be divisible by 16 to be halved 4 times, got 8: ")


@pytest.mark.parametrize("option", ["folder=photos", "size=32", "classes=none"])
def test_options_of_a_folder_name_the_preset_for_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = option.partition("=")[0]
    assert refused(capsys, "train", "digits", f"--data.{option}") == (
        f"unknown option of data digits: {name}: valid are flip; a folder of images is trained on with "
        "`kairostep train images --data.folder=FOLDER`"
    )


def test_images_that_are_too_small_are_told(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "at least one image must be readable and 64 pixels wide" in refused(capsys, *IMAGES, "--data.size=64")


def test_a_real_process_trains_and_leaves_out_a_bad_image(photos: Path) -> None:
    (photos / "cats" / "torn.jpg").write_bytes(b"\xff\xd8 and no more")
    ended = python("-m", "kairostep", *IMAGES, "--data.classes=none")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.startswith("kairostep: left out images that cannot be read or are too small, 1 of 61 in photos")
    assert "cats/torn.jpg (" in ended.stderr
    assert ended.stderr.count("\n") == 1
    directory = re.search("run directory (runs/images-.*)", ended.stdout)[1]
    assert f'; pipeline = DDPMPipeline.from_pretrained("{directory}/model")\n' in ended.stdout
    assert Path(directory, "model", "model_index.json").is_file()
