"""`kairostep generate`: from a run directory to a folder of images, by one process or two, stopped or not."""

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import refused
from PIL import Image
from small_runs import SMALL, Child, start_ranks, train_here

from kairostep.cli import main
from kairostep.generation import image_folder

QUICK = ["--num_images", "10", "--batch_size", "4", "--steps", "3"]

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "digits"
    train_here(directory, {**SMALL, "steps": 10, "checkpoint_every": 5, "label_dropout": 0.1})
    return directory


def images_in(folder: Path) -> np.ndarray[Any, Any]:
    return np.stack([np.array(Image.open(path)) for path in sorted(folder.glob("*.png"))]).astype(int)


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "generation.json").read_text())
    return record


@pytest.mark.parametrize(
    ("solver", "evaluations", "more"),
    [("ddpm", 3, ["--weights", "model"]), ("ddim", 6, ["--guidance", "2"]), ("heun", 5, ["--precision", "bf16"])],
)
def test_images_of_every_solver(
    solver: str, evaluations: int, more: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["generate", str(run), *QUICK, "--solver", solver, "--output", "made", *more])
    cost, told = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        f"making 10 images by {solver} in 3 steps: {10 * evaluations} evaluations of the network, about .* on 1 x cpu",
        cost,
    )
    assert told == "10 images in made, 10 of them made now"
    assert images_in(Path("made")).shape == (10, 8, 8)
    record = record_of(Path("made"))
    assert (record["step"], record["solver"], record["steps"]) == (10, solver, 3)
    assert (record["network_evaluations"], record["classes"], record["complete"]) == (evaluations, [*range(10)], True)
    main(["generate", str(run), *QUICK, "--solver", solver, "--output", "made", *more])
    assert capsys.readouterr().out == "10 images in made, 0 of them made now\n"


def test_the_default_folder_is_in_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", str(run), *QUICK, "--checkpoint", "5", "--classes", "3,1", "--format", "npz", "--seed", "7"])
    folder = run / "generated" / "ddim-3-seed7-step5-classes3_1-npz"
    assert capsys.readouterr().out.splitlines()[1:] == [f"10 images in {folder}, 10 of them made now"]
    with np.load(folder / "images.npz") as arrays:
        assert arrays["images"].shape == (10, 8, 8, 1)
        assert arrays["labels"].tolist() == [3, 1] * 5


def test_64_images_are_made_unless_told_or_begun_otherwise(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["generate", str(run), "--steps", "1", "--output", "made"]
    main(short)
    assert capsys.readouterr().out.startswith(
        "making 64 images by ddim in 1 steps: 64 evaluations of the network, about "
    )
    assert len(list(Path("made").glob("*.png"))) == 64
    main([*short, "--num", "70"])
    assert capsys.readouterr().out.splitlines()[1] == "70 images in made, 6 of them made now"
    Path("made/000069.png").unlink()
    main(short)  # goes on with what was begun
    assert capsys.readouterr().out.splitlines()[1] == "70 images in made, 1 of them made now"


def test_a_generation_that_grows_knows_how_many_were_complete(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["generate", str(run), *QUICK, "--output", "made"])

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kairostep.generation.image_folder.make_missing", stopped)
    for _ in range(2):
        with pytest.raises(SystemExit):
            main(["generate", str(run), *QUICK, "--num", "20", "--output", "made"])
        record = record_of(Path("made"))
        assert (record["num"], record["num_complete"], record["complete"]) == (20, 10, False)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--solver", "euler"], "argument --solver: invalid choice: 'euler'"),
        (["--sampler", "heun"], "the solver is named by --solver, a sampler draws t in training: write --solver heun"),
        (["--classes", "cat"], "argument --classes: must be numbers with commas between them, got 'cat'"),
        (["--classes", "10"], "classes must be in 0..9, got 10"),
        (["--steps", "1001"], "steps must be at most the 1000 of the process, got 1001"),
        (["--num", "0"], "--num_images must be a whole number of at least 1, got 0: pass for instance --num_images=64"),
        (["--checkpoint", "7"], "checkpoint must be last, best or a step that was kept, got '7': there are 5, 10"),
        (["--step", "7", "--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_what_is_refused(more: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "generate", str(run), "--output", "new", *more)


def test_a_folder_that_is_no_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "generate", "nothing").startswith(
        "a run directory must hold config.yaml, got nothing: pass a directory"
    )


def test_other_settings_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", str(run), *QUICK, "--output", "made"])
    capsys.readouterr()
    before = {path: path.read_bytes() for path in Path("made").iterdir()}
    message = refused(capsys, "generate", str(run), *QUICK, "--output", "made", "--weights", "model", "--seed", "1")
    assert "were generated otherwise (weights: ema -> model; seed: 0 -> 1): pass the same settings" in message
    assert {path: path.read_bytes() for path in Path("made").iterdir()} == before


def test_three_processes_make_what_one_makes(run: Path, tmp_path: Path) -> None:
    command = ["generate", str(run), *QUICK, "--solver", "ddpm", "--output"]
    main([*command, "one"])
    ranks = start_ranks([*command, str(tmp_path / "three")], tmp_path / "log", 3)
    assert [rank.join() for rank in ranks] == [0, 0, 0], "".join(rank.output for rank in ranks)
    assert "".join(rank.output for rank in ranks).count("10 images in") == 1
    one, three = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "three"))
    assert len(one) == 11
    assert one == three  # names and bytes


def test_few_images_are_dealt_to_all_processes(run: Path, tmp_path: Path) -> None:
    command = ["generate", str(run), *QUICK, "--solver", "ddpm", "--batch_size", "100", "--format", "npz", "--output"]
    main([*command, "one"])
    ranks = start_ranks([*command, str(tmp_path / "two")], tmp_path / "log")
    assert [rank.join() for rank in ranks] == [0, 0], "".join(rank.output for rank in ranks)
    one, two = (np.load(tmp_path / name / "images.npz")["images"].astype(int) for name in ("one", "two"))
    assert np.abs(one - two).max() <= 1  # batches of 5 round otherwise than one of 10
    assert record_of(Path("two")) == record_of(Path("one"))


def write_slowly() -> None:
    plain = image_folder.Writer._write

    def write(*arguments: Any) -> None:
        time.sleep(0.2)
        plain(*arguments)

    image_folder.Writer._write = write  # type: ignore[method-assign]


LAUNCHED = {"TORCHELASTIC_RUN_ID": "none"}  # torchrun passes on a signal that its processes may have got too


@pytest.mark.parametrize(
    ("number", "format", "environment"),
    [
        (signal.SIGINT, "png", {}),
        (signal.SIGINT, "png", LAUNCHED),
        (signal.SIGTERM, "npz", LAUNCHED),
        (signal.SIGHUP, "png", {}),
    ],
)
def test_a_signal_leaves_whole_files_and_the_same_command_goes_on(
    number: signal.Signals,
    format: str,
    environment: dict[str, str],
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "stopped"
    command = ["generate", str(run), "--num", "60", "--steps", "20", "--format", format, "--output", str(folder)]
    child = Child([*command, "--batch_size", "2"], tmp_path / "log", write_slowly, environment)
    assert child.wait_until(lambda: time.sleep(0.01) or bool(list(folder.rglob("0000*")))), child.output
    if environment:
        child.tell(number)
        time.sleep(0.05)
    assert child.send(number) == 128 + number
    found = re.search(r"stopped with (\d+) of 60 images in .*stopped; the same command goes on", child.output)
    assert found, child.output
    assert "Traceback" not in child.output
    assert not list(folder.rglob(".*"))
    assert not record_of(folder)["complete"]
    for path in folder.rglob("*.png"):
        Image.open(path).load()
    main(command)
    assert capsys.readouterr().out.splitlines()[1:] == [f"60 images in {folder}, {60 - int(found[1])} of them made now"]
