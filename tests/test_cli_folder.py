"""`kairostep train images` on folders of which a part is unusable: in one process and in two."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from commands import refused
from PIL import Image
from small_runs import lines_of, start_ranks, state_of

from kairostep.cli import main

TINY = ["--network.channels=32", "--network.multipliers=[1]", "--network.blocks=1", "--network.attention=[]"]
SHORT = ["--steps=6", "--batch_size=4", "--sample_steps=2", "--workers=0", "--evaluate_every=6", "--speed=plain"]
IMAGES = ["train", "images", "--data.folder=photos_cls", "--data.size=32", *TINY, *SHORT]

pytestmark = pytest.mark.usefixtures("elsewhere")


def make_photos(num: int, num_small: int) -> Path:
    """Write JPEGs in two classes; those that would be held out first are smaller than 32 pixels."""
    names = [f"{'ab'[number % 2]}/{number}.jpg" for number in range(num)]
    small = sorted(names, key=lambda name: sha256(name.encode()).digest())[:num_small]
    for number, name in enumerate(names):
        path = Path("photos_cls", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        side = 20 if name in small else 40
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (side, side, 3), np.uint8)).save(path)
    return Path("photos_cls")


def test_fourteen_small_images_of_sixty_are_no_error(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The 46 others are fewer than 50, so that nothing is held out: the run says so and goes on."""
    make_photos(60, 14)
    main([*IMAGES, "--output=run"])
    told = capsys.readouterr()
    assert "trained 6 steps" in told.out
    assert "note: no images are held out" in told.err
    assert "no images are held out: 46 of 60 in photos_cls are usable at size=32" in caplog.text
    assert not any("held_out" in line for line in lines_of(Path("run")))


@pytest.mark.parametrize("streams", [False, True])
def test_a_usable_image_is_held_out_in_place_of_small_ones(streams: bool, capsys: pytest.CaptureFixture[str]) -> None:
    make_photos(64, 14)
    main([*IMAGES, *(["--data.in_memory_bytes=0"] if streams else []), "--output=run"])
    (line,) = [line["held_out"] for line in lines_of(Path("run")) if "held_out" in line]
    assert "note: only 1 image is held out, too few to tell runs apart: pass --data.held_out=0.1" in (
        capsys.readouterr().err
    )
    assert line["num_evaluations"] == 1
    assert line["loss"] > 0


def test_small_images_are_refused_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    make_photos(60, 14)
    message = refused(capsys, *IMAGES, "--data.bad_images=refuse")
    assert message.startswith("images must be readable and at least 32 pixels wide and high, which 14 of 60 in")


@pytest.mark.parametrize("num", [60, 64])
def test_two_processes_hold_out_what_one_does(tmp_path: Path, num: int) -> None:
    make_photos(num, 14)
    main([*IMAGES, "--output=one"])
    ranks = start_ranks([*IMAGES, "--output=two"], tmp_path / "log")
    assert [rank.join() for rank in ranks] == [0, 0], ranks[0].output
    one, two = (lines_of(Path(directory)) for directory in ("one", "two"))
    assert ["held_out" in line for line in one] == ["held_out" in line for line in two]
    assert any("held_out" in line for line in one) == (num == 64)
    assert one[-1]["step"] == two[-1]["step"] == 6
    assert state_of(Path("one"))["data"] == state_of(Path("two"))["data"]
