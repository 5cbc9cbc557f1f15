"""Statistics of the features of a data set, computed once."""

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kairostep.data import Dataset
from kairostep.data.streaming import stream
from kairostep.evaluation.features import FeatureNetwork
from kairostep.evaluation.moments import SAMPLE_SIZE, FeatureStatistics, shared_statistics
from kairostep.files import one_at_a_time, whole_file
from kairostep.progress_meter import ProgressMeter
from kairostep.shares import WHOLE, Share

_FORMAT = 1  # raise it when files of an earlier version must not be read any more
log = logging.getLogger("kairostep")


def reference_statistics(
    dataset: Dataset,  # of images
    network: FeatureNetwork,
    *,
    cache: Path | str,
    device: torch.device | str = "cpu",
    batch_size: int = 64,
    num_workers: int = 0,
    share: Share = WHOLE,  # of the images, where several processes call this
) -> FeatureStatistics:
    """Return the statistics of all images of a set, not mirrored, from the cache or computed now.

    The file is named after data, number, shape and network, and written under a temporary name first.
    Of several processes that share the images, the first one reads and writes it, and all return the same statistics.
    Other processes that want the same file wait for it.
    """
    description = {
        "format": _FORMAT,
        "data": dataset.fingerprint(),
        "num": len(dataset),
        "shape": list(dataset.shape),
        "network": network.digest,
        "sample_size": SAMPLE_SIZE,
    }
    text = json.dumps(description, sort_keys=True)
    path = Path(cache).expanduser() / f"features-{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"
    with one_at_a_time(path) if share.is_first else nullcontext():
        found = share.from_first(_read(path, text) if share.is_first else None)
        if found is None:
            batches = _images(dataset, torch.device(device), batch_size, num_workers, share)
            found = shared_statistics(network, batches, device=device, share=share)
            if share.is_first:
                _write(path, found, text)
    return found


def _images(
    dataset: Dataset, device: torch.device, batch_size: int, num_workers: int, share: Share
) -> Iterator[tuple[range, Tensor]]:
    batches = list(share.batches(len(dataset), batch_size))
    stored = stream(dataset, map(list, batches), device=device, num_workers=num_workers)
    with ProgressMeter(len(dataset), "features of the data", unit="image", shown=share.is_first) as meter:
        for rows, (images, _) in zip(batches, stored, strict=True):
            yield rows, images
            meter.update(len(rows) * share.num_processes)


def _read(path: Path, text: str) -> FeatureStatistics | None:
    """Return the content of a file, or None. A damaged file is named and will be replaced."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            described = (file.metadata() or {}).get("description")
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        if described == text:
            return FeatureStatistics.from_state_dict(state)
    except (OSError, SafetensorError, KeyError) as error:
        log.warning("%s is damaged (%s): computing it again", path, error)
    return None


def _write(path: Path, statistics: FeatureStatistics, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, shared=True) as temporary:
        save_file(statistics.state_dict(), temporary, metadata={"description": text})
