"""On a CUDA device: no waiting, the rows of the CPU, and streams equal to resident sets."""

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch.testing import assert_close

from kairostep.data import Batches, InMemory

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _waiting_is_allowed_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def images(*, flip: bool) -> InMemory:
    pixels = torch.randint(256, (100, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return InMemory(pixels, torch.arange(100) % 10, num_classes=10, flip=flip)


def test_a_resident_set_never_waits_for_the_device() -> None:
    batches = Batches(images(flip=True), 32, device="cuda", label_dropout=0.1).from_step()
    next(batches)  # the set moves to the device
    torch.cuda.set_sync_debug_mode("error")
    taken = list(islice(batches, 20))  # several passes over the set
    torch.cuda.set_sync_debug_mode("default")
    assert all(batch.x0.is_cuda and batch.labels is not None and batch.labels.is_cuda for batch in taken)


def test_rows_are_those_of_the_cpu() -> None:
    pairs = zip(
        *(Batches(images(flip=False), 32, device=device).from_step() for device in ("cpu", "cuda")), strict=True
    )
    for host, device in islice(pairs, 10):
        assert_close(device.x0.cpu(), host.x0, rtol=0, atol=1e-6)  # a GPU divides with other roundings
        assert torch.equal(host.labels, device.labels.cpu())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_are_bitwise_what_a_resident_set_gives(num_workers: int) -> None:
    options = {"device": "cuda", "label_dropout": 0.2}
    resident = Batches(images(flip=True), 32, **options).from_step(3)
    streamed = Batches(images(flip=True), 32, resident=False, num_workers=num_workers, **options).from_step(3)
    for one, other in islice(zip(resident, streamed, strict=True), 10):
        assert torch.equal(one.x0, other.x0)
        assert torch.equal(one.labels, other.labels)
    streamed.close()
