"""Folders of images: real files in many formats, classes, the held-out part, and what is done about bad files."""

import logging
import os
import pickle
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kairostep.data import Batches, InMemory, load_folder
from kairostep.data.folder import is_held_out
from kairostep.data.image_set import StreamedImages

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a single core
LEFT, RIGHT = (200, 30, 60), (20, 180, 220)


def picture(width: int = 24, height: int = 20, mode: str = "RGB") -> Image.Image:
    """Return a picture whose left half has one colour and whose right half another."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:, : width // 2], pixels[:, width // 2 :] = LEFT, RIGHT
    return Image.fromarray(pixels).convert(mode)


def write(path: Path, image: Image.Image | None = None, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or picture()).save(path, **options)
    return path


def write_many(folder: Path, num: int, *, size: int = 8) -> Path:
    """Write `num` grey pictures, the i-th of brightness i, in two subfolders."""
    for number in range(num):
        image = Image.new("L", (size, size), number)
        write(folder / ("even" if number % 2 == 0 else "odd") / f"{number:03}.png", image)
    return folder


def streamed(folder: Path, size: int, **options: object) -> StreamedImages:
    dataset = load_folder(folder, size, in_memory_bytes=0, **options)  # type: ignore[arg-type]
    assert isinstance(dataset, StreamedImages)
    return dataset


def in_memory(folder: Path, size: int, **options: object) -> InMemory:
    dataset = load_folder(folder, size, **options)  # type: ignore[arg-type]
    assert isinstance(dataset, InMemory)
    return dataset


def halves(image: torch.Tensor) -> list[list[int]]:
    """Return the colours in the middle of the left and of the right half of (C, H, W)."""
    side = image.shape[-1]
    return [image[:, side // 2, column].tolist() for column in (side // 4, side - 1 - side // 4)]


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


def spoil(folder: Path) -> dict[str, str]:
    """Put four bad files among the good and return a word of what is wrong with each."""
    (folder / "odd" / "text.png").write_text("no image at all")
    (folder / "odd" / "empty.jpg").write_bytes(b"")
    write(folder / "odd" / "small.png", picture(30, 7))
    Image.fromarray(np.zeros((9, 9), np.float32)).save(folder / "odd" / "float.tif")
    return {
        "text.png": "not an image",
        "empty.jpg": "unknown format",
        "small.png": "7 pixels",
        "float.tif": "mode F",
    }


def cut(path: Path) -> None:
    """Leave the header of an image whole and cut its pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    write(path, Image.fromarray(pixels))
    path.write_bytes(path.read_bytes()[:-80])


def test_bad_images_are_left_out_of_memory_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_many(tmp_path, 10)
    bad = {**spoil(tmp_path), "cut.png": "OSError"}
    cut(tmp_path / "odd" / "cut.png")
    dataset = in_memory(tmp_path, 8, channels=1)
    assert sorted(dataset.stored[:, 0, 0, 0].tolist()) == list(range(10))
    assert dataset.labels is not None
    assert torch.equal(dataset.stored[:, 0, 0, 0] % 2, dataset.labels)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("kairostep", logging.WARNING)
    assert f"5 of 15 in {tmp_path}" in record.message
    assert all(f"odd/{name} (" in record.message and reason in record.message for name, reason in bad.items())


def test_bad_headers_are_left_out_of_a_stream_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_many(tmp_path, 10)
    bad = spoil(tmp_path)
    assert len(streamed(tmp_path, 8)) == 10
    (record,) = caplog.records
    assert "4 of 14" in record.message
    assert all(f"odd/{name} (" in record.message and reason in record.message for name, reason in bad.items())


def test_a_long_list_of_bad_images_is_cut_after_ten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_many(tmp_path, 1)
    for number in range(13):
        (tmp_path / "even" / f"bad{number:02}.png").write_text("no image")
    in_memory(tmp_path, 8)
    assert caplog.text.count("even/bad") == 10
    assert "; and 3 more" in caplog.text


@pytest.mark.parametrize("in_memory_bytes", [0, 2**31])
def test_bad_images_are_refused_on_demand(tmp_path: Path, in_memory_bytes: int) -> None:
    write_many(tmp_path, 3)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=r"which 4 of 7 in .*odd/small.png \(.*below size=8\).*bad_images='skip'"):
        load_folder(tmp_path, 8, bad_images="refuse", in_memory_bytes=in_memory_bytes)


def test_the_next_readable_image_stands_in_for_one_that_fails_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_many(tmp_path, 6)  # even: 0 2 4, odd: 1 3 5
    for name in ("odd/001.png", "odd/005.png"):
        cut(tmp_path / name)
    dataset = streamed(tmp_path, 8)
    assert caplog.records == []  # headers are whole
    for _ in range(2):
        read = [dataset.read(row) for row in range(6)]
        assert [int(pixels[0, 0, 0]) for pixels, _ in read] == [0, 2, 4, 3, 3, 0]
        assert [label for _, label in read] == [0, 0, 0, 1, 1, 0]  # each image keeps its own label
    assert [str(name) in caplog.text for name in ("001.png", "005.png")] == [True, True]
    assert len(caplog.records) == 2
    assert "number 2 of this process" in caplog.records[1].message


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_image_that_fails_later_is_refused_on_demand(tmp_path: Path, num_workers: int) -> None:
    cut(write_many(tmp_path, 6) / "odd" / "001.png")
    dataset = streamed(tmp_path, 8, bad_images="refuse")
    batches = Batches(dataset, 6, resident=False, num_workers=num_workers).from_step()
    with pytest.raises(ValueError, match=r"images must be readable, got .*001.png \(OSError"):
        next(batches)


def test_a_stream_whose_images_all_fail_ends(tmp_path: Path) -> None:
    cut(tmp_path / "a.png")
    with pytest.raises(ValueError, match="at least one image must be readable, got none in"):
        streamed(tmp_path, 8).read(0)


def test_a_folder_of_bad_images_alone_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.png", picture(7, 7))
    with pytest.raises(ValueError, match=r"at least one image must be readable.*got none: 1 of 1.*smaller size"):
        load_folder(tmp_path, 8)


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
