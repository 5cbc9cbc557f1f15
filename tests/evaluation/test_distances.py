"""FID, KID, precision and recall: other people's values, closed forms, and errors that are the spread."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from kairostep.evaluation import Estimate, FeatureStatistics, fid, frechet_distance, kernel_distance, precision_recall


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def features(num: int, dims: int, seed: int, rank: int | None = None) -> Tensor:
    """Return correlated features of this rank, not centred, none negative: as Inception's are."""
    return (normal(num, rank or dims, seed=seed) @ normal(rank or dims, dims, seed=99)).abs() + 0.1 * seed


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(0), x.T.cov()


def statistics_of(x: Tensor) -> FeatureStatistics:
    statistics = FeatureStatistics(x.shape[1])
    statistics.add(x)
    return statistics


# FID


def by_scipy(mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor) -> float:
    root = scipy.linalg.sqrtm((cov1 @ cov2).numpy())
    return float((mean1 - mean2).square().sum() + cov1.trace() + cov2.trace() - 2 * np.trace(root).real)


@pytest.mark.parametrize("dims", [2, 64, 192])
def test_fid_is_that_of_torchmetrics_and_scipy(dims: int) -> None:
    torchmetrics_fid = pytest.importorskip("torchmetrics.image.fid")
    both = (*moments(features(500, dims, 1)), *moments(features(400, dims, 2)))
    found = frechet_distance(*both)
    assert found == pytest.approx(float(torchmetrics_fid._compute_fid(*both)), rel=1e-6)
    assert found == pytest.approx(by_scipy(*both), rel=1e-6)


def test_the_sum_over_a_stream_is_that_of_torchmetrics_too() -> None:
    torchmetrics_fid = pytest.importorskip("torchmetrics.image.fid")
    x, y = features(500, 32, 1), features(400, 32, 2)
    metric = torchmetrics_fid.FrechetInceptionDistance(feature=_Pixels(), normalize=False)
    metric.set_dtype(torch.float64)
    for real, batch in ((True, y), (False, x)):
        for part in torch.split(batch, 50):
            metric.update(part, real=real)
    assert fid(statistics_of(x), statistics_of(y)).value == pytest.approx(float(metric.compute()), rel=1e-4)


class _Pixels(torch.nn.Module):
    """Features that are given instead of images."""

    num_features = 32

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        return x


@pytest.mark.parametrize(("num", "rank"), [(500, 64), (30, 64), (500, 3), (2, 64)])
def test_the_distance_of_a_set_from_itself_is_0_whatever_its_rank(num: int, rank: int) -> None:
    mean, cov = moments(features(num, 64, 1, rank))
    assert abs(frechet_distance(mean, cov, mean, cov)) < 1e-10 * float(cov.trace())


@pytest.mark.parametrize(("num", "rank"), [(30, 64), (500, 3)])
def test_covariances_without_full_rank_are_as_good_as_others(num: int, rank: int) -> None:
    torchmetrics_fid = pytest.importorskip("torchmetrics.image.fid")
    both = (*moments(features(num, 64, 1, rank)), *moments(features(num, 64, 2, rank)))
    expected = float(torchmetrics_fid._compute_fid(*both))
    assert frechet_distance(*both) == pytest.approx(expected, rel=1e-4)


def test_gaussians_have_the_closed_form() -> None:
    mean1, mean2 = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 5.0])
    std1, std2 = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3.0, 0.5, 2.0])
    expected = 1 + 4 + 4 + 2.25 + 4
    turn = torch.linalg.qr(normal(3, 3)).Q  # a rotation changes nothing
    covs = [turn @ torch.diag(std.double().square()) @ turn.T for std in (std1, std2)]
    assert frechet_distance(turn @ mean1.double(), covs[0], turn @ mean2.double(), covs[1]) == pytest.approx(expected)
    assert frechet_distance(mean1, torch.eye(3), mean1, torch.zeros(3, 3)) == pytest.approx(3)


def test_it_is_symmetric() -> None:
    one, two = moments(features(50, 64, 1)), moments(features(500, 64, 2))
    assert frechet_distance(*one, *two) == pytest.approx(frechet_distance(*two, *one), rel=1e-10)


def spread_and_error(estimate: Callable[[int], Estimate], num_seeds: int) -> tuple[float, float, float]:
    """Return the mean and the standard deviation of a figure over seeds, and the error that was stated."""
    found = [estimate(seed) for seed in range(num_seeds)]
    values, errors = (torch.tensor([getattr(e, name) for e in found]).double() for name in ("value", "error"))
    return float(values.mean()), float(values.std()), float(errors.square().mean().sqrt())


@pytest.mark.parametrize("rank", [8, 4])
def test_the_error_of_fid_is_its_spread_over_generated_sets(rank: int) -> None:
    mix = normal(rank, 8, seed=99)
    reference = statistics_of(normal(2000, rank, seed=1000) @ mix)

    def estimate(seed: int) -> Estimate:
        return fid(statistics_of(1.3 * normal(500, rank, seed=seed) @ mix + 0.2), reference)

    _, spread, stated = spread_and_error(estimate, 200)
    assert stated == pytest.approx(spread, rel=0.25)  # 5 sigma of a spread over 200


def test_near_its_floor_fid_has_an_error_that_is_too_large_rather_than_too_small() -> None:
    reference = statistics_of(normal(5000, 16, seed=1000))
    _, spread, stated = spread_and_error(lambda seed: fid(statistics_of(normal(400, 16, seed=seed)), reference), 100)
    assert 0.9 * spread < stated < 2.5 * spread


def test_fid_of_fewer_images_than_dimensions_has_no_error() -> None:
    found = fid(statistics_of(features(30, 64, 1)), statistics_of(features(500, 64, 2)))
    assert found.value > 0
    assert math.isnan(found.error)


def test_features_of_two_networks_do_not_compare() -> None:
    with pytest.raises(ValueError, match="one number of dimensions, got 3 and 4: use one network for both"):
        frechet_distance(torch.zeros(3), torch.eye(3), torch.zeros(4), torch.eye(4))
    with pytest.raises(
        ValueError, match=r"a mean \(D,\) must come with a covariance \(D, D\), got \(3,\) and \(4, 4\)"
    ):
        frechet_distance(torch.zeros(3), torch.eye(4), torch.zeros(3), torch.eye(3))


# KID


def test_kid_is_that_of_torchmetrics() -> None:
    torchmetrics_kid = pytest.importorskip("torchmetrics.image.kid")
    x, y = features(60, 16, 1), features(60, 16, 2)
    found = kernel_distance(x, y, subset_size=60)
    assert found.value == pytest.approx(float(torchmetrics_kid.poly_mmd(x, y)), rel=1e-10)


def test_kid_is_the_mean_over_subsets_that_share_no_row() -> None:
    x, y = features(65, 4, 1), features(90, 4, 2)
    one, again, other = (kernel_distance(x, y, subset_size=20, seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert one != other
    assert one.error > 0


def test_kid_has_no_bias_and_its_error_is_its_spread() -> None:
    def same(seed: int) -> Estimate:
        return kernel_distance(normal(200, 4, seed=2 * seed), normal(200, 4, seed=2 * seed + 1), subset_size=20)

    mean, spread, stated = spread_and_error(same, 200)
    assert abs(mean) < 4 * spread / math.sqrt(200)
    assert stated == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize(("shift", "most"), [(0.0, 1.3), (0.3, 1.15), (1.0, 1.15)])
def test_the_error_of_one_subset_is_its_spread(shift: float, most: float) -> None:
    def drawn(seed: int) -> Estimate:
        return kernel_distance(normal(60, 8, seed=2 * seed) + shift, normal(60, 8, seed=2 * seed + 1))

    _, spread, stated = spread_and_error(drawn, 400)
    assert 0.85 * spread < stated < most * spread  # a little more where the sets are alike: it is never 0
    assert all(drawn(seed).error > 0 for seed in range(400))


def test_two_rows_have_no_error() -> None:
    assert math.isnan(kernel_distance(normal(2, 3), normal(2, 3, seed=1)).error)


def test_kid_needs_two_rows() -> None:
    with pytest.raises(ValueError, match="at least 2 rows, got 1"):
        kernel_distance(normal(1, 3), normal(5, 3))


# Precision and recall


def by_hand(points: Tensor, centres: Tensor, k: int) -> float:
    inside = 0
    for point in points:
        for centre in centres:
            radius = sorted(float((centre - other).norm()) for other in centres)[k]
            if float((point - centre).norm()) <= radius:
                inside += 1
                break
    return inside / len(points)


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_precision_and_recall_are_those_by_hand(chunk_size: int) -> None:
    x, y = normal(20, 3, seed=1) + 1, normal(20, 3, seed=2)
    found = precision_recall(x, y, k=3, chunk_size=chunk_size)
    assert found.precision == pytest.approx(by_hand(x, y, 3))
    assert found.recall == pytest.approx(by_hand(y, x, 3))
    assert found.precision_error == pytest.approx(math.sqrt(found.precision * (1 - found.precision) / 20), rel=0.25)
    assert 0 < found.precision < 1
    assert 0 < found.recall < 1


def test_a_set_covers_itself_and_not_what_is_far_away() -> None:
    x = normal(50, 8)
    same, apart = precision_recall(x.float(), x.float()), precision_recall(x, x + 1000)
    assert (same.precision, same.recall) == (1, 1)
    assert (apart.precision, apart.recall) == (0, 0)
    assert 0 < apart.precision_error < 0.05  # 50 misses do not say that there are no hits


def test_one_mode_of_two_is_precise_without_recall() -> None:
    both = torch.cat([normal(100, 4, seed=1), normal(100, 4, seed=2) + 100])
    found = precision_recall(normal(200, 4, seed=3), both)
    assert found.precision > 0.8
    assert 0.3 < found.recall < 0.6
    assert found.num_rows == 200


def test_both_sets_have_as_many_rows() -> None:
    x, y = normal(30, 3, seed=1), normal(50, 3, seed=2)
    assert precision_recall(x, y) == precision_recall(x, y[:30])


def test_neighbours_have_to_be_there() -> None:
    with pytest.raises(ValueError, match="k must be at least 1 and below the number of rows, 3, got 3"):
        precision_recall(normal(3, 2), normal(9, 2), k=3)
