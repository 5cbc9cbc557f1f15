"""Folders of images: real files in many formats, classes, the held-out part."""

import os
import pickle
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import LEFT, RIGHT, halves, in_memory, picture, streamed, write, write_many
from PIL import Image

from kairostep.data import Batches, load_folder
from kairostep.data.folder import is_held_out

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a single core


@pytest.mark.parametrize("ending", ["png", "jpg", "JPEG", "webp", "bmp", "gif", "tif", "tiff"])
@pytest.mark.parametrize("size", [20, 10])
def test_every_format_gives_the_middle_square(tmp_path: Path, ending: str, size: int) -> None:
    write(tmp_path / f"picture.{ending}", picture(32, 20), **({"quality": 95} if ending == "webp" else {}))
    dataset = in_memory(tmp_path, size)
    assert dataset.shape == (3, size, size)
    assert dataset.num_classes == 0
    found = torch.tensor(halves(dataset.stored[0]))
    assert int((found - torch.tensor([LEFT, RIGHT])).abs().max()) <= 12  # JPEG and palettes lose a little


@pytest.mark.parametrize("shape", [(40, 20), (20, 40), (41, 20), (20, 20), (200, 100)])
def test_the_square_is_taken_from_the_middle(tmp_path: Path, shape: tuple[int, int]) -> None:
    """A square of another colour in the middle of the picture is all that is left."""
    width, height = shape
    side = min(shape)
    image = Image.new("RGB", shape, "white")
    left, top = (width - side) // 2, (height - side) // 2
    image.paste((10, 20, 30), (left, top, left + side, top + side))
    write(tmp_path / "a.png", image)
    pixels = in_memory(tmp_path, 20).stored[0]
    assert torch.equal(pixels, torch.tensor([10, 20, 30], dtype=torch.uint8).view(3, 1, 1).expand(3, 20, 20))


def test_an_image_of_the_right_size_is_untouched(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    write(tmp_path / "a.png", Image.fromarray(pixels))
    assert torch.equal(in_memory(tmp_path, 16).stored[0], torch.from_numpy(pixels).permute(2, 0, 1))


def test_shrinking_averages_instead_of_picking(tmp_path: Path) -> None:
    """A chessboard of single pixels becomes grey."""
    board = (np.indices((256, 256)).sum(0) % 2 * 255).astype(np.uint8)
    write(tmp_path / "a.png", Image.fromarray(board))
    pixels = in_memory(tmp_path, 16, channels=1).stored
    assert int((pixels.int() - 127).abs().max()) <= 2


def test_orientation_in_exif_is_followed(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 2  # mirrored
    write(tmp_path / "a.jpg", picture(20, 20), exif=exif, quality=95)
    found = torch.tensor(halves(in_memory(tmp_path, 20).stored[0]))
    assert int((found - torch.tensor([RIGHT, LEFT])).abs().max()) <= 12


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "RGBA", "LA", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_other_pixel_formats_become_colour_or_grey(tmp_path: Path, mode: str, channels: int) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.full((20, 20), 130 * 256, np.uint16))
    else:
        image = Image.new("RGB", (20, 20), (130, 130, 130)).convert(mode)
    write(tmp_path / ("a.tif" if mode == "CMYK" else "a.png"), image)
    pixels = in_memory(tmp_path, 20, channels=channels).stored
    assert pixels.shape == (1, channels, 20, 20)
    mean = float(pixels.float().mean())
    assert abs(mean - 130) < (25 if mode == "1" else 3)  # black and white are dithered


def test_what_is_transparent_becomes_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (20, 20), (0, 0, 0, 0))
    image.paste((10, 20, 30, 255), (0, 0, 10, 20))
    write(tmp_path / "a.png", image)
    assert halves(in_memory(tmp_path, 20).stored[0]) == [[10, 20, 30], [255, 255, 255]]


@pytest.mark.parametrize("ending", ["png", "webp", "gif", "tif"])
def test_of_several_frames_the_first_is_read(tmp_path: Path, ending: str) -> None:
    first, second = (Image.new("RGB", (8, 8), colour) for colour in ("red", "lime"))
    first.save(tmp_path / f"a.{ending}", save_all=True, append_images=[second])
    dataset = in_memory(tmp_path, 8)
    assert len(dataset) == 1
    assert (dataset.stored[0].float().mean((1, 2)) - torch.tensor([255.0, 0, 0])).abs().max() <= 5  # WebP is lossy


def test_subfolders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("dog/1.png", "cat/x/2.png", "cat/3.png", "ant/4.png"):
        write(tmp_path / name)
    dataset = in_memory(tmp_path, 8)
    assert dataset.num_classes == 3
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [0, 1, 1, 2]  # ant/4, cat/3, cat/x/2, dog/1
    assert in_memory(tmp_path, 8, classes="none").labels is None


@pytest.mark.parametrize("names", [("a/1.png", "b/2.png", "3.png"), ("a/1.png", "a/2.png"), ("1.png",)])
def test_else_there_are_no_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        write(tmp_path / name)
    assert in_memory(tmp_path, 8).num_classes == 0


def test_hidden_and_other_files_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "a.png")
    for name in ("._a.png", ".cache/b.png", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("no image")
    assert len(in_memory(tmp_path, 8)) == 1


def test_links_are_followed_and_circles_end(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "a.png")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(tmp_path / "elsewhere")
    assert len(in_memory(tmp_path / "set", 8)) == 1


def test_train_and_test_share_no_image_and_miss_none(tmp_path: Path) -> None:
    write_many(tmp_path, 120)
    train, test = (in_memory(tmp_path, 8, split=split, channels=1, held_out=0.2) for split in ("train", "test"))
    brightness = torch.cat([train.stored, test.stored])[:, 0, 0, 0].tolist()
    assert sorted(brightness) == list(range(120))
    assert 10 <= len(test) <= 40
    assert all(part.labels is not None and part.num_classes == 2 for part in (train, test))
    assert torch.equal(test.stored[:, 0, 0, 0] % 2, test.labels)


def test_the_share_that_is_held_out_is_as_stated_and_never_changes() -> None:
    names = [f"some/{number}.jpg" for number in range(20_000)]
    held = {name for name in names if is_held_out(name, 0.02)}
    assert abs(len(held) / len(names) - 0.02) < 0.004
    assert {name for name in names if is_held_out(name, 0.01)} < held
    assert is_held_out("some/0.jpg", 0.905)
    assert not is_held_out("some/0.jpg", 0.904)


def test_added_files_leave_the_held_out_part_as_it_was(tmp_path: Path) -> None:
    write_many(tmp_path, 60)
    before = in_memory(tmp_path, 8, split="test", channels=1, held_out=0.3).stored[:, 0, 0, 0].tolist()
    write_many(tmp_path, 120)
    after = in_memory(tmp_path, 8, split="test", channels=1, held_out=0.3).stored[:, 0, 0, 0].tolist()
    assert set(before) == {number for number in after if number < 60}


def test_a_small_folder_is_for_training_alone(tmp_path: Path) -> None:
    write_many(tmp_path, 49)
    assert len(load_folder(tmp_path, 8, held_out=0.5)) == 49
    with pytest.raises(ValueError, match=r"split 'test' must have at least one image, got none of the 49.*at least 50"):
        load_folder(tmp_path, 8, "test", held_out=0.5)


def test_a_grey_image_of_the_right_size_streams_as_memory_of_its_own(tmp_path: Path) -> None:
    """Pillow's memory is read-only, which torch warns of."""
    Image.new("L", (8, 8), 7).save(tmp_path / "a.png")
    pixels, _ = streamed(tmp_path, 8, channels=1).read(0)
    assert pixels.unique().tolist() == [7]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_streamed_folder_gives_bitwise_what_one_in_memory_gives(tmp_path: Path, num_workers: int) -> None:
    write_many(tmp_path, 30, size=12)
    one = Batches(in_memory(tmp_path, 8), 7, seed=1, label_dropout=0.2).from_step(2)
    other = Batches(streamed(tmp_path, 8), 7, seed=1, label_dropout=0.2, resident=False, num_workers=num_workers)
    stream = other.from_step(2)
    for first, second in islice(zip(one, stream, strict=True), 8):
        assert torch.equal(first.x0, second.x0)
        assert first.labels is not None
        assert second.labels is not None
        assert torch.equal(first.labels, second.labels)
    stream.close()


def test_a_streamed_set_can_be_sent_to_another_process(tmp_path: Path) -> None:
    dataset = streamed(write_many(tmp_path, 5), 8)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.fingerprint() == dataset.fingerprint()
    assert torch.equal(copy.read(3)[0], dataset.read(3)[0])
    assert dataset.num_bytes == 5 * 3 * 8 * 8


def test_the_fingerprint_follows_names_content_size_and_channels(tmp_path: Path) -> None:
    write_many(tmp_path, 6)
    fingerprints = [streamed(tmp_path, 8).fingerprint(), streamed(tmp_path, 8, channels=1).fingerprint()]
    fingerprints.append(streamed(tmp_path, 7).fingerprint())
    assert streamed(tmp_path, 8).fingerprint() == fingerprints[0]
    os.utime(tmp_path / "odd" / "001.png", ns=(1, 1))
    fingerprints.append(streamed(tmp_path, 8).fingerprint())
    (tmp_path / "odd" / "001.png").rename(tmp_path / "odd" / "0010.png")
    fingerprints.append(streamed(tmp_path, 8).fingerprint())
    assert len(set(fingerprints)) == 5


def test_missing_and_empty_folders_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(ValueError, match=f"an existing folder of images, got {tmp_path / 'nowhere'}"):
        load_folder(tmp_path / "nowhere", 8)
    for folder in (tmp_path / "empty", tmp_path):
        with pytest.raises(ValueError, match=rf"at least one image \(.bmp.*got none in {folder}"):
            load_folder(folder, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size must be a whole number of at least 1, got 0"),
        ({"split": "valid"}, "split must be one of"),
        ({"channels": 4}, r"channels must be 3 \(colour\) or 1 \(grey\), got 4"),
        ({"classes": "labels.csv"}, "classes must be one of 'auto', 'none'"),
        ({"bad_images": "ignore"}, "bad_images must be one of 'skip', 'refuse'"),
        ({"held_out": 1.0}, r"held_out must be in \[0, 1\), got 1.0"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_folder(**{"folder": tmp_path, "size": 8, **arguments})  # type: ignore[arg-type]
