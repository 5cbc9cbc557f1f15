"""The set in memory: scaling, mirror images, checks; and the digits."""

import pickle
import sys

import pytest
import torch

from kairostep.counters import RowRandom, key_tensor
from kairostep.data import InMemory, load_digits


def pixels(num: int = 5) -> torch.Tensor:
    return torch.arange(num * 3 * 4 * 4).remainder(256).to(torch.uint8).view(num, 3, 4, 4)


def test_bytes_become_numbers_in_minus_one_to_one_and_back() -> None:
    stored = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    x0 = InMemory(stored).to_x0(stored, None)
    assert x0.dtype == torch.float32
    assert x0.is_contiguous()
    assert (float(x0.min()), float(x0.max())) == (-1.0, 1.0)
    assert torch.equal(((x0 + 1) * 127.5).round().to(torch.uint8), stored)


def test_half_of_the_images_are_mirrored_by_random_numbers() -> None:
    stored = pixels(1).expand(4000, 3, 4, 4)
    dataset = InMemory(pixels(1), flip=True)
    plain = dataset.to_x0(stored, None)
    x0 = dataset.to_x0(stored, RowRandom(key_tensor(0), torch.arange(4000)))
    mirrored = (x0 == plain.flip(-1)).flatten(1).all(1)
    untouched = (x0 == plain).flatten(1).all(1)
    assert torch.equal(mirrored, ~untouched)
    assert abs(float(mirrored.float().mean()) - 0.5) < 0.03
    assert x0.is_contiguous()


def test_without_flip_random_numbers_change_nothing_and_none_are_drawn() -> None:
    dataset, random = InMemory(pixels()), RowRandom(key_tensor(0), torch.arange(5))
    assert torch.equal(dataset.to_x0(pixels(), random), dataset.to_x0(pixels(), None))
    assert random.num_calls == 0


def test_rows_and_the_whole_agree() -> None:
    dataset = InMemory(pixels(), torch.tensor([2, 0, 1, 1, 2]), num_classes=3)
    stored, labels = dataset.read_all()
    for row in range(len(dataset)):
        sample, label = dataset.read(row)
        assert torch.equal(sample, stored[row])
        assert label == labels[row]
    assert dataset.shape == (3, 4, 4)
    assert dataset.num_bytes == 5 * 48


def test_a_set_without_labels_reads_zeros() -> None:
    dataset = InMemory(pixels())
    assert dataset.num_classes == 0
    assert dataset.read(3)[1] == 0
    assert torch.equal(dataset.read_all()[1], torch.zeros(5, dtype=torch.int64))


def test_the_fingerprint_tells_content_apart_and_nothing_else() -> None:
    labels = torch.tensor([0, 1, 0, 1, 0])
    base = InMemory(pixels(), labels, num_classes=2)
    changed = pixels()
    changed[4, 2, 3, 3] += 1
    others = [
        InMemory(pixels()),
        InMemory(pixels().view(5, 3, 2, 8)),
        InMemory(changed, labels, num_classes=2),
        InMemory(pixels(), labels.flip(0).roll(1), num_classes=2),
        InMemory(pixels(), labels, num_classes=3),
    ]
    assert len({base.fingerprint(), *(other.fingerprint() for other in others)}) == 6
    assert InMemory(pixels(), labels.int(), num_classes=2, flip=True).fingerprint() == base.fingerprint()
    assert pickle.loads(pickle.dumps(base)).fingerprint() == base.fingerprint()


@pytest.mark.parametrize(
    ("images", "labels", "num_classes", "message"),
    [
        (torch.zeros(2, 3, 4, 4), None, 0, r"uint8 of shape \(N, C, H, W\).*float32"),
        (pixels()[0], None, 0, r"\(3, 4, 4\)"),
        (pixels()[:0], None, 0, "at least one image"),
        (pixels(), torch.zeros(5, dtype=torch.int64), 0, "given together, got num_classes=0 and labels present"),
        (pixels(), None, 3, "given together, got num_classes=3 and labels missing"),
        (pixels(), torch.zeros(4, dtype=torch.int64), 2, r"of shape \(5,\)"),
        (pixels(), torch.zeros(5), 2, "whole numbers"),
        (pixels(), torch.tensor([0, 1, 2, 3, 1]), 3, r"got 0\.\.3: pass num_classes=4"),
        (pixels(), None, -1, "num_classes must be a whole number"),
    ],
)
def test_what_is_no_set_of_images_is_refused(
    images: torch.Tensor, labels: torch.Tensor | None, num_classes: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        InMemory(images, labels, num_classes=num_classes)


def test_digits_are_split_into_two_parts_that_share_no_row() -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    train, test = load_digits("train"), load_digits("test")
    assert (len(train), len(test)) == (1500, 297)
    assert train.shape == test.shape == (1, 8, 8)
    together = torch.cat([train.stored, test.stored]).flatten(1).double()
    source = torch.from_numpy(sklearn.load_digits().data) * 255 / 16
    assert float((together.sort(0).values - source.sort(0).values).abs().max()) <= 0.5
    assert (int(together.min()), int(together.max())) == (0, 255)
    assert all(int(part.labels.bincount().min()) > len(part) // 15 for part in (train, test))
    assert torch.equal(load_digits("test").stored, test.stored)
    assert not train.flip


def test_labels_of_digits_stay_with_their_images() -> None:
    """A nearest-neighbour classifier knows the digits only if labels fit."""
    train, test = load_digits("train"), load_digits("test")
    distance = torch.cdist(test.stored.flatten(1).float(), train.stored.flatten(1).float())
    assert float((train.labels[distance.argmin(1)] == test.labels).float().mean()) > 0.95


def test_an_unknown_split_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="split must be one of 'train', 'test', got 'valid'"):
        load_digits("valid")


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"the digits set needs scikit-learn.*: pip install .*\[train\]'"):
        load_digits()
