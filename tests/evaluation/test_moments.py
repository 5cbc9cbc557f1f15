"""Statistics of a stream: the same however it is cut, ordered or shared between processes."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kairostep.counters import GOLDEN_RATIO, mix, mix_seed
from kairostep.evaluation import FeatureStatistics, Moments, feature_statistics
from kairostep.evaluation.moments import RowSample


def rows(num: int, dims: int = 5, offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num, dims, generator=generator) @ torch.randn(dims, dims, generator=generator) + offset


def statistics_of(features: Tensor, *sizes: int, sample_size: int = 20) -> FeatureStatistics:
    statistics = FeatureStatistics(features.shape[1], sample_size=sample_size)
    for part in torch.split(features, list(sizes)):
        statistics.add(part)
    return statistics


@pytest.mark.parametrize("sizes", [(100,), (1, 99), (33, 33, 34), (0, 50, 50), (1,) * 100])
def test_moments_are_those_of_numpy_however_the_stream_is_cut(sizes: tuple[int, ...]) -> None:
    x = rows(100)
    moments = Moments(5)
    for part in torch.split(x, list(sizes)):
        moments.add(part)
    assert moments.count == 100
    assert_close(moments.mean.numpy(), x.double().numpy().mean(0), rtol=1e-12, atol=1e-12)
    assert_close(moments.covariance.numpy(), np.cov(x.double().numpy().T), rtol=1e-12, atol=1e-12)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    x = rows(1000).double()
    near, far = Moments(5), Moments(5)
    for part in torch.split(x, 7):
        near.add(part)
        far.add(part + 1e6)
    assert_close(far.covariance, near.covariance, rtol=1e-7, atol=1e-7)


def test_processes_that_share_a_stream_find_what_one_finds() -> None:
    x = rows(100)
    whole = statistics_of(x, 30, 70)
    parts = [FeatureStatistics(5, sample_size=20) for _ in range(3)]
    for rank, part in enumerate(parts):
        part.add(x[rank::3], torch.arange(rank, 100, 3))
    for other in parts[1:]:
        parts[0].merge(other)
    assert parts[0].moments.count == 100
    assert_close(parts[0].moments.covariance, whole.moments.covariance, rtol=1e-12, atol=1e-12)
    assert torch.equal(parts[0].sample.rows, whole.sample.rows)


@pytest.mark.parametrize("sizes", [(100,), (1,) * 100, (10, 90)])
def test_the_sample_is_bounded_and_depends_on_the_index_alone(sizes: tuple[int, ...]) -> None:
    x = torch.arange(100.0)[:, None]
    sample = statistics_of(x, *sizes).sample
    assert sample.rows.shape == (20, 1)
    expected = sorted(range(100), key=lambda row: int(mix(torch.tensor([row]) + GOLDEN_RATIO)))[:20]
    assert sample.rows[:, 0].tolist() == expected
    small = statistics_of(x[:12], 12).sample
    assert sorted(small.rows[:, 0].tolist()) == list(range(12))


def test_the_sample_is_even_over_the_stream() -> None:
    sample = RowSample(1, size=1000)
    sample.add(torch.arange(10_000.0)[:, None], torch.arange(10_000))
    counts = torch.histc(sample.rows, bins=10, min=0, max=10_000)
    assert bool(((counts - 100).abs() < 40).all())  # four sigma


def test_hashes_are_those_of_the_seeds() -> None:
    for index in (0, 1, 12345, 2**40):
        expected = mix_seed(index)
        assert int(mix(torch.tensor([index]) + GOLDEN_RATIO)) % 2**64 == expected


def test_a_saved_state_goes_on_as_if_it_had_not_been_saved() -> None:
    x = rows(100)
    whole, begun = statistics_of(x, 50, 50), statistics_of(x[:50], 50)
    again = FeatureStatistics.from_state_dict(begun.state_dict())
    again.add(x[50:])
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_features_of_images_are_taken_in_a_stream() -> None:
    images = torch.randint(256, (30, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = feature_statistics(lambda batch: batch.flatten(1).float(), iter(torch.split(images, 7)), sample_size=10)
    assert found.moments.count == 30
    assert_close(found.moments.mean, images.flatten(1).double().mean(0))
    assert len(found.sample.rows) == 10


def test_what_has_no_statistics_is_refused() -> None:
    with pytest.raises(ValueError, match="a covariance must have at least 2 rows, got 1"):
        _ = statistics_of(rows(1), 1).moments.covariance
    with pytest.raises(ValueError, match="features must be finite"):
        statistics_of(torch.full((2, 3), torch.nan), 2)
    with pytest.raises(ValueError, match="at least one image, got none"):
        feature_statistics(lambda batch: batch, iter(()))
