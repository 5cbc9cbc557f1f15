"""Batches are functions of (seed, step), wherever the set lies and however many ranks share the work."""

import multiprocessing
import time
from itertools import islice

import pytest
import torch
from torch import Tensor

from kairostep.counters import RowRandom
from kairostep.data import Batch, Batches, Dataset, InMemory
from kairostep.data.batches import Order

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a single core


def numbered(num: int = 23, *, flip: bool = True, num_classes: int = 4) -> InMemory:
    """Return a set whose row i has i in its first pixel and i + 1 in the last."""
    pixels = torch.zeros(num, 1, 2, 2, dtype=torch.uint8)
    pixels[:, 0, 0, 0] = torch.arange(num)
    pixels[:, 0, 0, 1] = torch.arange(num) + 100
    labels = torch.arange(num) % num_classes if num_classes else None
    return InMemory(pixels, labels, num_classes=num_classes, flip=flip)


def rows_of(batch: Batch) -> list[int]:
    """Return which rows of `numbered` a batch holds, mirrored or not."""
    return ((batch.x0 + 1) * 127.5).round().long()[:, 0, 0].min(1).values.tolist()


def take(batches: Batches, num: int, step: int = 0) -> list[Batch]:
    iterator = batches.from_step(step)
    taken = list(islice(iterator, num))
    iterator.close()
    return taken


def assert_same(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.x0, other.x0)
        assert (one.labels is None) == (other.labels is None)
        assert one.labels is None or torch.equal(one.labels, other.labels)


@pytest.mark.parametrize("batch_size", [1, 4, 23, 30, 57])
@pytest.mark.parametrize("resident", [True, False])
def test_every_pass_covers_the_set_whatever_the_batch_size(batch_size: int, resident: bool) -> None:
    num_batches = -(-23 * 3 // batch_size)
    batches = take(Batches(numbered(), batch_size, resident=resident), num_batches)
    rows = [row for batch in batches for row in rows_of(batch)]
    passes = [rows[start : start + 23] for start in (0, 23, 46)]
    assert all(sorted(one) == list(range(23)) for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert all(batch.x0.shape == (batch_size, 1, 2, 2) for batch in batches)


def test_batches_are_contiguous_float32_with_the_labels_of_their_rows() -> None:
    for batch in take(Batches(numbered(), 8), 6):
        assert batch.x0.dtype == torch.float32
        assert batch.x0.is_contiguous()
        assert batch.labels is not None
        assert batch.labels.dtype == torch.int64
        assert batch.labels.tolist() == [row % 4 for row in rows_of(batch)]


def test_a_set_without_classes_has_no_labels() -> None:
    assert all(batch.labels is None for batch in take(Batches(numbered(num_classes=0), 8), 3))


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("step", [0, 1, 2, 5, 1000])
def test_resuming_needs_nothing_but_the_step(step: int, resident: bool) -> None:
    batches = Batches(numbered(), 9, seed=5, label_dropout=0.3, resident=resident)
    fresh = Batches(numbered(), 9, seed=5, label_dropout=0.3, resident=resident)
    if step < 1000:
        assert_same(take(batches, step + 4)[step:], take(fresh, 4, step))
    assert_same(take(batches, 4, step), take(fresh, 4, step))


def test_iterators_of_one_object_do_not_disturb_each_other() -> None:
    batches = Batches(numbered(), 9, label_dropout=0.5)
    expected = take(batches, 6)
    first, second = batches.from_step(0), batches.from_step(3)
    interleaved = [pair for _ in range(3) for pair in (next(first), next(second))]
    assert_same(interleaved[::2] + interleaved[1::2], expected)


def test_batches_neither_use_nor_move_the_global_random_stream() -> None:
    torch.manual_seed(1)
    expected = take(Batches(numbered(), 9, label_dropout=0.5), 4)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    for resident in (True, False):
        assert_same(take(Batches(numbered(), 9, label_dropout=0.5, resident=resident), 4), expected)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streaming_gives_bitwise_what_a_resident_set_gives(num_workers: int) -> None:
    options = {"seed": 3, "label_dropout": 0.2, "rank": 1, "world_size": 2}
    resident = take(Batches(numbered(), 10, resident=True, **options), 12, 2)
    streamed = take(Batches(numbered(), 10, resident=False, num_workers=num_workers, **options), 12, 2)
    assert_same(resident, streamed)


def test_closing_the_iterator_ends_its_workers() -> None:
    iterator = Batches(numbered(), 4, resident=False, num_workers=2).from_step()
    next(iterator)
    assert len(multiprocessing.active_children()) == 2
    iterator.close()
    assert multiprocessing.active_children() == []


class Broken(InMemory):
    """A set with one row that cannot be read."""

    def read(self, row: int) -> tuple[Tensor, int]:
        """Return any row but the third."""
        if row == 3:
            raise ValueError("row 3 is broken")
        return super().read(row)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_reading_arrives_and_ends_the_workers_at_once(num_workers: int) -> None:
    iterator = Batches(Broken(numbered().stored), 23, resident=False, num_workers=num_workers).from_step()
    start = time.monotonic()
    with pytest.raises(ValueError, match="row 3 is broken"):
        next(iterator)
    assert multiprocessing.active_children() == []
    assert time.monotonic() - start < 4


def join(parts: tuple[Batch, ...]) -> Batch:
    """Return the batches of all ranks as one."""
    labels = [part.labels for part in parts if part.labels is not None]
    return Batch(torch.cat([part.x0 for part in parts]), torch.cat(labels) if labels else None)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["flips and labels", "noise"])
def test_ranks_see_together_bitwise_what_one_rank_sees(kind: str, world_size: int, resident: bool) -> None:
    dataset, dropout = (Counted(), None) if kind == "noise" else (numbered(), 0.3)
    options = {"seed": 4, "label_dropout": dropout, "resident": resident}
    whole = take(Batches(dataset, 24, **options), 8)
    ranks = [take(Batches(dataset, 24, rank=rank, world_size=world_size, **options), 8) for rank in range(world_size)]
    assert_same([join(parts) for parts in zip(*ranks, strict=True)], whole)


@pytest.mark.parametrize("world_size", [3, 6])
def test_any_number_of_ranks_that_divides_the_batch_will_do(world_size: int) -> None:
    whole = take(Batches(numbered(), 12, label_dropout=0.5), 8)
    ranks = [
        take(Batches(numbered(), 12, rank=rank, world_size=world_size, label_dropout=0.5), 8)
        for rank in range(world_size)
    ]
    assert_same([join(parts) for parts in zip(*ranks, strict=True)], whole)


def test_ranks_mirror_and_drop_independently() -> None:
    same = InMemory(torch.tensor([[[[0, 1]]]], dtype=torch.uint8), torch.tensor([0]), num_classes=1, flip=True)
    first, second = (take(Batches(same, 512, rank=rank, world_size=2, label_dropout=0.5), 1)[0] for rank in range(2))
    agreeing = [(first.x0 == second.x0).flatten(1).all(1), first.labels == second.labels]
    assert all(abs(float(same.float().mean()) - 0.5) < 0.12 for same in agreeing)


def test_flips_change_from_batch_to_batch_and_with_the_seed() -> None:
    same = InMemory(torch.tensor([[[[0, 255]]]], dtype=torch.uint8), flip=True)
    batches = [*take(Batches(same, 64), 20), *take(Batches(same, 64, seed=1), 20)]
    assert len({tuple(batch.x0[:, 0, 0, 0].tolist()) for batch in batches}) == 40
    share = torch.cat([batch.x0[:, 0, 0, 0] for batch in batches]).eq(1).float().mean()
    assert abs(float(share) - 0.5) < 0.04


def test_seeds_give_different_orders() -> None:
    orders = {tuple(rows_of(take(Batches(numbered(), 23, seed=seed), 1)[0])) for seed in range(10)}
    assert len(orders) == 10


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.9, 1.0])
def test_labels_become_the_null_class_at_the_stated_rate(dropout: float) -> None:
    plain = torch.cat([batch.labels for batch in take(Batches(numbered(), 500), 8)])
    labels = torch.cat([batch.labels for batch in take(Batches(numbered(), 500, label_dropout=dropout), 8)])
    dropped = labels == 4
    assert abs(float(dropped.float().mean()) - dropout) < 0.025
    assert torch.equal(labels[~dropped], plain[~dropped])


def test_label_dropout_leaves_flips_alone() -> None:
    plain, dropped = (take(Batches(numbered(), 8, label_dropout=dropout), 4) for dropout in (0.0, 0.5))
    assert all(torch.equal(one.x0, other.x0) for one, other in zip(plain, dropped, strict=True))


def test_any_seed_fills_places_evenly() -> None:
    """Over many passes each row comes first equally often."""
    first = [int(Order(8, seed=0, device=CPU).rows(8 * epoch, 8 * epoch + 1)) for epoch in range(4000)]
    share = torch.tensor(first).bincount(minlength=8) / 4000
    assert float((share - 1 / 8).abs().max()) < 0.025


class Counted(Dataset):
    """A user's own set of vectors, which counts how often it is read."""

    shape, num_classes, flip = (3,), 0, False

    def __init__(self, num_bytes: int = 12) -> None:
        self.size = num_bytes
        self.num_reads = 0

    def __len__(self) -> int:
        return 7

    def read(self, row: int) -> tuple[Tensor, int]:
        """Return three equal numbers."""
        self.num_reads += 1
        return torch.full((3,), float(row)), 0

    def to_x0(self, stored: Tensor, random: RowRandom | None) -> Tensor:
        """Return what is stored, with noise in training."""
        return stored if random is None else stored + random.normal(self.shape)

    def fingerprint(self) -> str:
        """Return a constant."""
        return "0" * 64

    @property
    def num_bytes(self) -> int:
        """Return what the test says."""
        return self.size


def test_a_set_of_ones_own_may_hold_anything_and_is_kept_where_it_fits() -> None:
    small, large = Counted(), Counted(num_bytes=2 * 2**30 + 1)
    kept, streamed = Batches(small, 5), Batches(large, 5)
    assert (kept.resident, streamed.resident) == (True, False)
    assert_same(take(kept, 6), take(streamed, 6))
    assert (small.num_reads, large.num_reads) == (7, 30)
    assert Batches(large, 5, resident=True).resident
    assert Dataset.num_bytes.fget(small) == 7 * 12  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 10, "world_size": 4}, "multiple of world_size = 4, got 10: pass for instance batch_size=12"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank must be below world_size = 2, got 2"),
        ({"batch_size": 4, "label_dropout": 1.5}, r"label_dropout must be a share in \[0, 1\], got 1.5"),
        ({"batch_size": 4, "seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"batch_size": 4, "num_workers": -1}, "num_workers must be"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batches(numbered(), **arguments)


def test_labels_cannot_be_dropped_from_a_set_without_classes() -> None:
    with pytest.raises(ValueError, match=r"label_dropout needs a set with classes, got 0.1 .*label_dropout=0.0"):
        Batches(numbered(num_classes=0), 4, label_dropout=0.1)


def test_a_negative_step_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="step must be a whole number of at least 0, got -1"):
        Batches(numbered(), 4).from_step(-1)
