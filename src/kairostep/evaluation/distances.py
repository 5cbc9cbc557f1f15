"""Distances between two sets of features (N, D), and the errors of their estimates."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kairostep.checks import count
from kairostep.evaluation.estimate import Estimate, mean_and_error
from kairostep.evaluation.moments import FeatureStatistics


def frechet_distance(mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor) -> float:
    """Return |mean1 - mean2|**2 + tr(cov1 + cov2 - 2 (cov1 cov2)**(1/2)), the FID of Heusel et al. 2017.

    The last trace is the sum of the singular values of cov1**(1/2) cov2**(1/2), which needs no inverse: covariances of
    any rank will do, and the distance of a set from itself is 0 up to 1e-12 of its trace.
    """
    (mean1, cov1), (mean2, cov2) = _checked(mean1, cov1), _checked(mean2, cov2)
    if mean1.shape != mean2.shape:
        raise ValueError(
            f"features must have one number of dimensions, got {len(mean1)} and {len(mean2)}: use one network for both"
        )
    cross = torch.linalg.svdvals(_root(cov1) @ _root(cov2)).sum()
    squared = (mean1 - mean2).square().sum()
    return float(squared + cov1.trace() + cov2.trace() - 2 * cross)


def fid(generated: FeatureStatistics, reference: FeatureStatistics) -> Estimate:
    """Return the Frechet distance and its standard error from the choice of the generated images alone.

    The error is that of the delta method. Each image x moves the distance by
    2 (m1 - m2) (x - m1) + (x - m1) (1 - A) (x - m1), where A is the optimal map from the generated Gaussian to the
    reference. The spread of these values over the sample gives the error. It needs more images than dimensions. The
    bias of FID, which falls with the number of images, is not part of it.
    """
    one, two = generated.moments, reference.moments
    cov1, cov2 = one.covariance.cpu(), two.covariance.cpu()
    mean1, mean2 = one.mean.cpu(), two.mean.cpu()
    value = frechet_distance(mean1, cov1, mean2, cov2)
    if one.count <= len(mean1):
        return Estimate(value, math.nan)
    centred = generated.sample.rows.double() - mean1  # (n, D)
    bend = torch.eye(len(mean1), dtype=torch.float64) - _transport(cov1, cov2)
    moves = 2 * centred @ (mean1 - mean2) + ((centred @ bend) * centred).sum(1)  # (n,)
    return Estimate(value, float(moves.std()) / math.sqrt(one.count))


def kernel_distance(
    features1: Tensor, features2: Tensor, *, subset_size: int = 1000, seed: int = 0, degree: int = 3
) -> Estimate:
    """Return the KID of Binkowski et al. 2018: the unbiased squared MMD under (x y / D + 1)**degree.

    It is the mean over disjoint subsets of `subset_size` rows of each set, chosen by the seed. Disjoint subsets are
    independent, so the standard error is that of their mean. That of a single subset is estimated from its pairs.
    """
    count("subset_size", subset_size, at_least=2)
    num = min(len(features1), len(features2))
    if num < 2:
        raise ValueError(f"both sets of features must have at least 2 rows, got {num}: add images")
    size = min(subset_size, num)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(rows), generator=generator) for rows in (features1, features2)]
    dealt = [
        torch.split(rows[order[: num // size * size].to(rows.device)].double(), size)
        for rows, order in ((features1, orders[0]), (features2, orders[1]))
    ]
    found = [_squared_mmd(x, y, degree) for x, y in zip(*dealt, strict=True)]
    if len(found) == 1:
        return found[0]
    return Estimate(*mean_and_error(torch.tensor([one.value for one in found], dtype=torch.float64)))


@dataclass(frozen=True, slots=True)
class PrecisionRecall:
    """Shares of images with binomial standard errors, which take the balls as given."""

    precision: float
    precision_error: float
    recall: float
    recall_error: float
    num_rows: int  # of each set


def precision_recall(
    generated: Tensor,  # (N, D)
    reference: Tensor,  # (M, D)
    *,
    k: int = 3,
    chunk_size: int = 1000,
) -> PrecisionRecall:
    """Return improved precision and recall (Kynkaanniemi et al. 2019).

    Precision is the share of generated features within the ball of some reference feature, whose radius is the distance
    to its k-th nearest neighbour in the reference. Recall is the same with the sets exchanged. Both depend on the
    number of rows, so the larger set is cut to the size of the smaller one.
    """
    num = min(len(generated), len(reference))
    if not 1 <= k < num:
        raise ValueError(f"k must be at least 1 and below the number of rows, {num}, got {k}: add images or lower k")
    generated, reference = generated[:num], reference[:num]
    precision = _share_inside(generated, reference, k, chunk_size)
    recall = _share_inside(reference, generated, k, chunk_size)
    return PrecisionRecall(precision, _binomial_error(precision, num), recall, _binomial_error(recall, num), num)


def _checked(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    if mean.ndim != 1 or cov.shape != (len(mean), len(mean)):
        raise ValueError(
            f"a mean (D,) must come with a covariance (D, D), got {tuple(mean.shape)} and {tuple(cov.shape)}: "
            "pass moments.mean and moments.covariance"
        )
    return mean.double(), cov.double()


def _root(cov: Tensor) -> Tensor:
    """Return the symmetric square root of a covariance. Eigenvalues that rounding made negative count as 0."""
    values, vectors = torch.linalg.eigh(cov)
    root: Tensor = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return root


def _transport(cov1: Tensor, cov2: Tensor) -> Tensor:
    """Return the matrix that maps N(0, cov1) to N(0, cov2) optimally, 0 where cov1 has no extent."""
    values, vectors = torch.linalg.eigh(cov1)
    kept = values > values.max() * len(values) * torch.finfo(values.dtype).eps
    safe = torch.where(kept, values, torch.ones_like(values))
    root = vectors * torch.where(kept, safe.sqrt(), 0.0) @ vectors.T
    inverse = vectors * torch.where(kept, safe.rsqrt(), 0.0) @ vectors.T
    transport: Tensor = inverse @ _root(root @ cov2 @ root) @ inverse
    return transport


def _squared_mmd(x: Tensor, y: Tensor, degree: int) -> Estimate:
    """Return the unbiased squared MMD of x (m, D) and y (m, D) under the polynomial kernel, with its standard error.

    The value is a mean over pairs of rows, a U-statistic: its variance has a part of rows and one of pairs (Hoeffding
    1948). The means of rows vary by both, by twice the second, which is taken off once. Two rows have no error.
    """
    m, dims = x.shape
    xx, yy, xy = ((a @ b.T / dims + 1) ** degree for a, b in ((x, x), (y, y), (x, y)))
    within = (xx.sum() - xx.trace() + yy.sum() - yy.trace()) / (m * (m - 1))
    pairs = (xx + yy - xy - xy.T).fill_diagonal_(0.0)  # (m, m)
    rows = pairs.sum(1) / (m - 1)
    of_pairs = 2 / (m * (m - 1)) * (pairs.square().sum() / (m * (m - 1)) - rows.mean().square())
    variance = torch.maximum(4 / m * rows.var() - of_pairs, of_pairs)
    return Estimate(float(within - 2 * xy.mean()), float(variance.sqrt()) if m > 2 else math.nan)


def _binomial_error(share: float, num: int) -> float:
    """Return the standard error of a share, never 0: two hits and two misses are added (Agresti & Coull 1998)."""
    likely = (share * num + 2) / (num + 4)
    return math.sqrt(likely * (1 - likely) / (num + 4))


def _share_inside(points: Tensor, centres: Tensor, k: int, chunk_size: int) -> float:
    """Return the share of points (N, D) inside the ball to the k-th neighbour around any of the centres (N, D)."""
    radii = torch.cat(
        [torch.cdist(chunk, centres).kthvalue(k + 1, dim=1).values for chunk in torch.split(centres, chunk_size)]
    )  # (N,); the nearest is the centre itself
    inside = [(torch.cdist(chunk, centres) <= radii).any(1) for chunk in torch.split(points, chunk_size)]
    return float(torch.cat(inside).double().mean())
