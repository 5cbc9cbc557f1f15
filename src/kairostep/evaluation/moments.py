"""Statistics of a stream of features: mean, covariance, and a bounded sample of rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from kairostep.checks import count
from kairostep.counters import GOLDEN_RATIO, mix
from kairostep.shares import WHOLE, Share

SAMPLE_SIZE = 10_000  # features kept for KID and precision/recall; 82 MB of 2048 dimensions


class Moments:
    """Count, mean and covariance of rows in float64, independent of the order and size of batches.

    Args:
        num_dims: D of the rows.
    """

    def __init__(self, num_dims: int, device: torch.device | str = "cpu") -> None:
        count("num_dims", num_dims)
        self.count = 0
        self.mean = torch.zeros(num_dims, dtype=torch.float64, device=device)  # (D,)
        self.scatter = torch.zeros(num_dims, num_dims, dtype=torch.float64, device=device)  # (D, D), about the mean

    def add(self, rows: Tensor) -> None:
        """Take in rows (N, D)."""
        if len(rows):
            rows = rows.to(self.mean)
            mean = rows.mean(0)
            centred = rows - mean
            self._combine(len(rows), mean, centred.T @ centred)

    def merge(self, other: "Moments") -> None:
        """Add what another one has seen, for instance in another process."""
        if other.count:
            self._combine(other.count, other.mean.to(self.mean), other.scatter.to(self.mean))

    def over_processes(self, share: Share) -> "Moments":
        """Return the moments of all rows that processes have seen, the same in each."""
        total, merged = sum(share.gather(self.count)), Moments(len(self.mean), self.mean.device)
        merged.count = total
        merged.mean = share.sum(self.mean * (self.count / total))
        apart = self.mean - merged.mean
        merged.scatter = share.sum(self.scatter + torch.outer(apart, apart) * self.count)
        return merged

    @property
    def covariance(self) -> Tensor:
        """The unbiased covariance (D, D)."""
        if self.count < 2:
            raise ValueError(f"a covariance must have at least 2 rows, got {self.count}: add more")
        return self.scatter / (self.count - 1)

    def _combine(self, num: int, mean: Tensor, scatter: Tensor) -> None:
        """Combine two sets of moments without subtracting large numbers (Chan et al. 1983)."""
        total = self.count + num
        apart = mean - self.mean
        self.scatter += scatter + torch.outer(apart, apart) * (self.count * num / total)
        self.mean += apart * (num / total)
        self.count = total


class RowSample:
    """At most `size` random rows of a stream: those whose index has the smallest hash.

    The choice does not depend on the order of batches or on the process that saw them.
    """

    def __init__(self, num_dims: int, size: int = SAMPLE_SIZE) -> None:
        self.size = count("size", size, at_most=2**16, example=64)
        self.hashes = torch.empty(0, dtype=torch.int64)  # (n,), ascending
        self.rows = torch.empty(0, num_dims)  # (n, D) float32

    def add(self, rows: Tensor, indices: Tensor) -> None:
        """Take in rows (N, D) that have these indices (N,) in the whole stream."""
        self._keep(mix(indices.cpu() + GOLDEN_RATIO), rows)

    def merge(self, other: "RowSample") -> None:
        """Take in the rows of another sample, of other indices."""
        self._keep(other.hashes, other.rows)

    def over_processes(self, share: Share, device: torch.device) -> "RowSample":
        """Return the sample of all rows that processes have seen, the same in each."""
        merged = RowSample(self.rows.shape[1], self.size)
        merged.hashes = torch.cat(share.gather(self.hashes)).sort().values[: self.size]
        kept = self.hashes <= merged.hashes[-1]
        rows = torch.zeros(len(merged.hashes), self.rows.shape[1], device=device)
        rows[torch.searchsorted(merged.hashes, self.hashes[kept]).to(device)] = self.rows[kept].to(device)
        merged.rows = share.sum(rows).cpu()
        return merged

    def _keep(self, hashes: Tensor, rows: Tensor) -> None:
        if len(self.hashes) == self.size:  # most batches have few rows to offer
            fit = hashes < self.hashes[-1]
            hashes, rows = hashes[fit], rows[fit.to(rows.device)]
        if len(hashes):
            hashes, order = torch.cat([self.hashes, hashes]).sort()
            self.hashes = hashes[: self.size]
            self.rows = torch.cat([self.rows, rows.to("cpu", torch.float32)])[order[: self.size]]


class FeatureStatistics:
    """The statistics of a set of images that distances need. Their size does not depend on the number of images."""

    def __init__(self, num_dims: int, device: torch.device | str = "cpu", sample_size: int = SAMPLE_SIZE) -> None:
        self.moments = Moments(num_dims, device)
        self.sample = RowSample(num_dims, sample_size)

    def add(self, features: Tensor, indices: Tensor | None = None) -> None:
        """Take in features (N, D) of images with these indices (N,), by default the next ones."""
        if not bool(features.isfinite().all()):
            raise ValueError("features must be finite, got others: check the images and the feature network")
        if indices is None:
            indices = torch.arange(self.moments.count, self.moments.count + len(features))
        self.moments.add(features)
        self.sample.add(features, indices)

    def merge(self, other: "FeatureStatistics") -> None:
        """Take in all that another one has seen of other images."""
        self.moments.merge(other.moments)
        self.sample.merge(other.sample)

    def over_processes(self, share: Share) -> "FeatureStatistics":
        """Return the statistics of all images that processes have seen, the same in each."""
        merged = FeatureStatistics(len(self.moments.mean), self.moments.mean.device, self.sample.size)
        merged.moments = self.moments.over_processes(share)
        merged.sample = self.sample.over_processes(share, self.moments.mean.device)
        return merged

    def state_dict(self) -> dict[str, Tensor]:
        """Return all of it as tensors on the CPU."""
        moments, sample = self.moments, self.sample
        tensors = {"mean": moments.mean, "scatter": moments.scatter, "hashes": sample.hashes, "rows": sample.rows}
        counts = {"count": torch.tensor(moments.count), "sample_size": torch.tensor(sample.size)}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in (tensors | counts).items()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> "FeatureStatistics":
        """Return what `state_dict` described, on the CPU."""
        made = cls(len(state["mean"]), sample_size=int(state["sample_size"]))
        made.moments.count = int(state["count"])
        made.moments.mean, made.moments.scatter = state["mean"].clone(), state["scatter"].clone()
        made.sample.hashes, made.sample.rows = state["hashes"].clone(), state["rows"].clone()
        return made


@torch.no_grad()
def feature_statistics(
    features: Callable[[Tensor], Tensor],  # images (B, C, H, W) uint8 -> (B, D)
    batches: Iterable[Tensor],  # images, uint8
    *,
    device: torch.device | str = "cpu",
    sample_size: int = SAMPLE_SIZE,
) -> FeatureStatistics:
    """Return the statistics of the features of a stream of images."""
    return shared_statistics(features, _number(batches), device=device, sample_size=sample_size)


@torch.no_grad()
def shared_statistics(
    features: Callable[[Tensor], Tensor],  # images (B, C, H, W) uint8 -> (B, D)
    batches: Iterable[tuple[range, Tensor]],  # of this process: indices in the whole set, and images, uint8
    *,
    device: torch.device | str = "cpu",
    sample_size: int = SAMPLE_SIZE,
    share: Share = WHOLE,
) -> FeatureStatistics:
    """Return the statistics of the features of images that are dealt to processes, the same in each process."""
    statistics: FeatureStatistics | None = None
    for indices, images in batches:
        rows = features(images.to(device))  # (B, D)
        if statistics is None:
            statistics = FeatureStatistics(rows.shape[1], rows.device, sample_size)
        statistics.add(rows, torch.arange(indices.start, indices.stop))
    num_dims = max(share.gather(0 if statistics is None else len(statistics.moments.mean)))
    if num_dims == 0:
        raise ValueError("statistics must be of at least one image, got none: pass more")
    if statistics is None:  # other processes have images
        statistics = FeatureStatistics(num_dims, device, sample_size)
    return statistics.over_processes(share) if share.num_processes > 1 else statistics


def _number(batches: Iterable[Tensor]) -> Iterator[tuple[range, Tensor]]:
    start = 0
    for images in batches:
        yield range(start, start + len(images)), images
        start += len(images)
