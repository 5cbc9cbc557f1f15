"""Statistics of a data set: computed once, found again, and never mistaken for others."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kairostep.data import InMemory
from kairostep.evaluation import FeatureNetwork
from kairostep.evaluation.reference import reference_statistics


class Counted:
    """Pixels as features, counting the images."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, images: Tensor) -> Tensor:
        """Return (N, D)."""
        self.num += len(images)
        return images.flatten(1).float()


def dataset(num: int = 20, seed: int = 0) -> InMemory:
    generator = torch.Generator().manual_seed(seed)
    return InMemory(torch.randint(256, (num, 1, 3, 3), dtype=torch.uint8, generator=generator), flip=True)


def test_they_are_those_of_all_images_unmirrored_and_computed_once(tmp_path: Path) -> None:
    count = Counted()
    network = FeatureNetwork(count, "pixels", "1")
    found = reference_statistics(dataset(), network, cache=tmp_path / "new", batch_size=7)
    assert count.num == 20
    assert torch.equal(found.sample.rows.sort(0).values, dataset().stored.flatten(1).float().sort(0).values)
    again = reference_statistics(dataset(), network, cache=tmp_path / "new", batch_size=3)
    assert count.num == 20
    for name, tensor in found.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_several_that_need_them_at_once_compute_them_once(tmp_path: Path) -> None:
    class Slow(Counted):
        def __call__(self, images: Tensor) -> Tensor:
            """Return (N, D), after a while in which the others come to wait."""
            time.sleep(0.2)
            return super().__call__(images)

    count = Slow()
    network = FeatureNetwork(count, "pixels", "1")
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: reference_statistics(dataset(), network, cache=tmp_path), range(3)))
    assert count.num == 20
    assert all(torch.equal(each.sample.rows, found[0].sample.rows) for each in found)


def test_other_data_and_other_networks_have_files_of_their_own(tmp_path: Path) -> None:
    for number, (data, digest) in enumerate(
        [(dataset(), "1"), (dataset(seed=1), "1"), (dataset(19), "1"), (dataset(), "2")]
    ):
        count = Counted()
        reference_statistics(data, FeatureNetwork(count, "pixels", digest), cache=tmp_path)
        assert count.num == len(data)
        assert len(list(tmp_path.iterdir())) == number + 1


@pytest.mark.parametrize("damage", [b"", b"torn", None])
def test_a_damaged_file_is_told_and_computed_again(
    damage: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    count = Counted()
    network = FeatureNetwork(count, "pixels", "1")
    found = reference_statistics(dataset(), network, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-50] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        again = reference_statistics(dataset(), network, cache=tmp_path)
    assert "is damaged" in caplog.text
    assert count.num == 40
    assert torch.equal(again.moments.scatter, found.moments.scatter)
    reference_statistics(dataset(), network, cache=tmp_path)
    assert count.num == 40


def test_nothing_is_left_of_an_interrupted_computation(tmp_path: Path) -> None:
    def failing(images: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reference_statistics(dataset(), FeatureNetwork(failing, "pixels", "1"), cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
