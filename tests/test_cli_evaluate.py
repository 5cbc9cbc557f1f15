"""`kairostep evaluate`: every figure with its error, written down; and refusals that leave all as it was."""

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from commands import refused
from PIL import Image
from small_runs import start_ranks
from torch import Tensor

import kairostep
from kairostep.cli import main
from kairostep.evaluation import features
from kairostep.installation import install_command
from kairostep.runs.checkpoint import Checkpoints, read_digest

TINY = ["--network=unet", "--network.channels=8", "--network.multipliers=[1,1]", "--network.blocks=1"]
SHORT = ["--steps=4", "--checkpoint_every=2", "--batch_size=4", "--held_out_images=16", "--sample_steps=2"]
QUICK = [*TINY, "--network.attention=[]", *SHORT, "--workers=0", "--warmup_steps=0"]
EVALUATE = ["evaluate", "run", "--cache=cache"]
NUM = 30
PIXELS = "import torch\ndef make():\n    return lambda images: images.flatten(1)[:, :20].float()\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory, trained once."""
    patch = pytest.MonkeyPatch()
    patch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    directory = tmp_path_factory.mktemp("runs") / "run"
    main(["train", "digits", *QUICK, f"--output={directory}"])
    patch.undo()
    return directory


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of it in the working directory, without Inception and with features of our own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(features, "PACKAGE", "no_such_package")
    Path("my_pixels.py").write_text(PIXELS)
    shutil.copytree(trained, tmp_path / "run")
    return Path("run")


def put_images(folder: Path, num: int = NUM, size: int = 8, **facts: Any) -> Path:
    """Write images as `generate` does."""
    folder.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (num, size, size, 1), np.uint8)
    np.savez(folder / "images.npz", images=images)
    if facts:
        (folder / "generation.json").write_text(json.dumps({"complete": True, **facts}))
    return folder


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


def evaluate(*arguments: str | Path) -> None:
    main([*EVALUATE, *map(str, arguments)])


def refused_evaluation(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    return refused(capsys, *EVALUATE, *arguments)


def own_facts(run: Path, **facts: Any) -> dict[str, Any]:
    """Return what `generate` notes of images that the last checkpoint made."""
    checkpoint = Checkpoints(run / "checkpoints", 1).paths()[-1]
    return {"digest": read_digest(checkpoint), "weights": "ema", **facts}


HELD_OUT = ["vlb_bits_per_dim", "vlb_prior", "vlb_diffusion", "vlb_reconstruction", "loss", "epsilon_mse"]
OF_IMAGES = ["fid", "kid", "precision", "recall"]


def test_an_interrupted_generation_is_left_out_and_the_complete_one_beside_it_is_measured(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_images(run / "generated" / "heun", **own_facts(run, num=NUM))
    put_images(run / "generated" / "ddim", **own_facts(run, num=99, complete=False))
    evaluate("--features=my_pixels:make", f"--num={NUM}")
    told = capsys.readouterr().err
    assert "note: the images in run/generated/ddim are not complete and left out: run their command again" in told
    assert [line["on"] for line in lines_of(run) if line["what"] == "fid"] == ["run/generated/heun/images.npz"]


def test_images_that_were_complete_before_more_were_begun_are_measured(run: Path) -> None:
    folder = run / "generated" / "ddim"
    put_images(folder, **own_facts(run, num=99, num_complete=NUM, complete=False))
    (folder / "images.npz").unlink()
    for number in (*range(NUM), 50):
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(folder / f"{number:06d}.png")
    evaluate("--features=my_pixels:make", f"--num={NUM}")
    assert [line["n"] for line in lines_of(run) if line["what"] == "fid"] == [NUM]


def test_too_few_images_are_left_out_unless_their_number_is_stated(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = put_images(run / "generated" / "ddim", **own_facts(run))
    (folder / "generation.json").write_text(json.dumps(own_facts(run, num=NUM, complete=True)))
    evaluate("--features=my_pixels:make")
    told = capsys.readouterr().err
    assert "FID is of 50000 images by convention, run/generated/ddim has 30 and is left out" in told
    assert "kairostep generate run --num_images 50000, or state that it is of fewer by --num_images 30" in told
    assert "fid" not in [line["what"] for line in lines_of(run)]


def test_without_images_the_held_out_figures_are_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate()
    captured = capsys.readouterr()
    assert captured.err.startswith(
        "kairostep: note: no images of this checkpoint in run/generated: kairostep generate run --num_images 50000"
    )
    lines = lines_of(run)
    assert [line["what"] for line in lines] == HELD_OUT + ["epsilon_mse_at"] * 20
    for line in lines:
        assert line["standard_error"] > 0
        assert line["n"] == 16
        assert (line["checkpoint"], line["weights"], line["seeds"]) == (4, "ema", [1])
        assert line["kairostep"] == kairostep.__version__
        assert len(line["digests"]["data"]) == len(line["checkpoint_sha256"]) == 64
        assert line["network_evaluations"] > 0
        assert line["what"] in captured.out
    bits = {line["what"]: line["value"] for line in lines}
    parts = sum(bits[f"vlb_{part}"] for part in ("prior", "diffusion", "reconstruction"))
    assert bits["vlb_bits_per_dim"] == pytest.approx(parts)
    assert 2 < bits["vlb_bits_per_dim"] < 50


def test_results_are_appended_and_the_same_again(run: Path) -> None:
    evaluate("--held_out_images=8")
    first = (run / "evaluations.jsonl").read_bytes()
    evaluate("--held_out_images=8")
    assert (run / "evaluations.jsonl").read_bytes() == first + first
    evaluate("--held_out_images=8", "--checkpoint=2", "--weights=model")
    assert {(line["checkpoint"], line["weights"]) for line in lines_of(run)[-26:]} == {(2, "model")}


def test_images_of_the_checkpoint_are_found_and_measured(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = read_digest(Checkpoints(run / "checkpoints", 1).paths()[-1])
    made = {
        "digest": last,
        "weights": "ema",
        "step": 4,
        "solver": "heun",
        "steps": 50,
        "network_evaluations": 99,
        "seed": 3,
    }
    put_images(run / "generated" / "heun", **made)
    put_images(run / "generated" / "other", **{**made, "digest": "of another checkpoint"})
    evaluate(f"--num={NUM}", "--features=my_pixels:make")
    printed, lines = capsys.readouterr().out, lines_of(run)[-4:]
    assert [line["what"] for line in lines] == OF_IMAGES
    for line in lines:
        assert (line["on"], line["solver"], line["network_evaluations"]) == (
            "run/generated/heun/images.npz",
            "heun",
            99,
        )
        assert (line["seeds"], line["features"], line["checkpoint"]) == ([3], "my_pixels:make", 4)
        assert set(line["digests"]) == {"data", "network"}
        assert line["n"] == NUM
        assert line["what"] in printed
    assert [line["reference_n"] for line in lines] == [1500, NUM, NUM, NUM]
    assert lines[0]["value"] > 0
    assert lines[0]["standard_error"] > 0
    evaluate("--images=run/generated/other", f"--num={NUM}", "--features=my_pixels:make")
    assert {line["checkpoint_sha256"] for line in lines_of(run)[-4:]} == {"of another checkpoint"}


def test_statistics_of_the_data_are_kept_and_used_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_images(Path("mine"))
    evaluate("--images=mine", f"--num={NUM}", "--features=my_pixels:make")
    (cached,) = Path("cache").iterdir()
    before = (cached.stat().st_mtime_ns, cached.read_bytes())
    monkeypatch.setattr("kairostep.evaluation.reference.shared_statistics", None)
    evaluate("--images=mine", f"--num={NUM}", "--features=my_pixels:make")
    assert (cached.stat().st_mtime_ns, cached.read_bytes()) == before
    assert lines_of(run)[-4:] == lines_of(run)[26:30]


def test_the_first_of_more_images_are_taken(run: Path) -> None:
    folder = Path("pngs")
    folder.mkdir()
    for number in range(NUM):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:06d}.png")
    evaluate("--images=pngs", "--num=25", "--features=my_pixels:make")
    for number in range(25, NUM):
        (folder / f"{number:06d}.png").unlink()
    evaluate("--images=pngs", "--num=25", "--features=my_pixels:make")
    assert lines_of(run)[26:30] == lines_of(run)[-4:]
    assert lines_of(run)[26]["n"] == 25


def test_without_inception_the_rest_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_images(Path("mine"))
    evaluate("--images=mine", f"--num={NUM}")
    captured = capsys.readouterr()
    assert "FID, KID, precision and recall are left out: FID needs the Inception network" in captured.err
    assert f"{install_command('eval')}, or pass --inception=FILE" in captured.err
    assert len(lines_of(run)) == 26


class Corner(torch.nn.Module):
    """Stands in for Inception."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 16)."""
        return x[:, 0, ::75, ::75].flatten(1)


def test_another_network_is_refused_unless_it_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Corner()).save("corner.pt")
    put_images(Path("mine"))
    arguments = ["--images=mine", f"--num={NUM}", "--inception=corner.pt"]
    digest = hashlib.sha256(Path("corner.pt").read_bytes()).hexdigest()
    message = refused_evaluation(capsys, *arguments)
    assert message.startswith("the Inception network must have the SHA-256 7ff4a85c3a6378f0")
    assert f"--inception_sha256={digest}" in message
    evaluate(*arguments, f"--inception_sha256={digest}")
    line = lines_of(run)[-4]
    assert (line["what"], line["features"], line["digests"]["network"]) == ("fid", "corner.pt", digest)


def test_two_processes_measure_what_one_measures(run: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Corner()).save("corner.pt")
    digest = hashlib.sha256(Path("corner.pt").read_bytes()).hexdigest()
    network = [f"--inception={tmp_path / 'corner.pt'}", f"--inception_sha256={digest}"]
    images = [f"--images={put_images(tmp_path / 'mine')}", f"--num={NUM}", "--batch_size=5"]
    command = ["evaluate", str(tmp_path / "run"), *images, *network]
    main([*command, "--cache=cache"])
    ranks = start_ranks([*command, f"--cache={tmp_path / 'other'}"], tmp_path / "log")
    assert [rank.join() for rank in ranks] == [0, 0], "".join(rank.output for rank in ranks)
    assert "step 4, weights ema, on 2 x cpu" in ranks[0].output
    assert ranks[1].output == ""
    lines = lines_of(run)
    one, two = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    assert [line["what"] for line in one[-4:]] == ["fid", "kid", "precision", "recall"]
    for first, second in zip(one, two, strict=True):
        assert second.pop("value") == pytest.approx(first.pop("value"), rel=1e-9, abs=1e-9)
        assert second.pop("standard_error") in (
            error := first.pop("standard_error"),
            pytest.approx(error or 0, rel=1e-6),
        )
        assert second == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images=few"], "FID must be of the number of images that it states, 50000, got 30 in few"),
        (["--images=large", "--num=30"], "generated images must have the shape of the data, (1, 8, 8), got (1, 9, 9)"),
        (["--images=torn", "--num=30"], "images must be complete, got an interrupted generation in torn"),
        (["--images=missing"], "images must be an npz file or a folder, got missing"),
        (["--images=few", "--num=30", "--inception=no.pt"], "the Inception network must be a TorchScript file, got no"),
        (["--images=few", "--num=30", "--features=mine"], "--features must be module:function, got 'mine'"),
        (["--features=a:b", "--inception=c.pt"], "features must come from one network"),
        (["--num=0"], "--num_images must be a whole number of at least 2, got 0: pass for instance --num_images=64"),
        (["--held_out_images=1"], "held_out_images must be a whole number of at least 2, got 1"),
        (["--checkpoint=3"], "checkpoint must be last, best or a step that was kept, got '3'"),
        (["--weights=raw"], "argument --weights: invalid choice: 'raw'"),
        (["--nmu=3"], "unrecognized arguments: --nmu=3"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(
    arguments: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "evaluations.jsonl").write_text('{"what": "fid"}\n')
    put_images(Path("few"))
    put_images(Path("large"), size=9)
    put_images(Path("torn"), complete=False)
    assert refused_evaluation(capsys, *arguments).startswith(message)


def test_too_few_or_torn_images_in_the_run_are_told_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_images(run / "generated" / "some")
    told = "got 30 in run/generated/some/images.npz: generate more, or state fewer by --num_images=30"
    assert told in refused_evaluation(capsys)


def test_a_run_without_checkpoints_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints")
    assert refused_evaluation(capsys).startswith("a run must have a checkpoint, got run without any")
    shutil.rmtree(run)
    assert refused_evaluation(capsys).startswith("a run directory must hold config.yaml, got run")


def test_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", "--help"])
    assert ended.value.code == 0
    assert "RUN/evaluations.jsonl" in capsys.readouterr().out


def test_a_run_that_cannot_be_written_is_refused_before_it_is_measured(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kairostep.evaluation.evaluation.os.access", lambda path, mode: False)  # root may write all
    monkeypatch.setattr("kairostep.evaluation.evaluation.measure_held_out", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(SystemExit) as left:
        main(["evaluate", str(run)])
    assert left.value.code == 2
    assert "evaluations.jsonl, which cannot be written: copy the run" in capsys.readouterr().err


def test_measurements_are_printed_even_if_the_disk_is_full(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kairostep.evaluation.evaluation.append_evaluations", fail)
    with pytest.raises(SystemExit):
        main(["evaluate", str(run)])
    assert "vlb_bits_per_dim" in capsys.readouterr().out
