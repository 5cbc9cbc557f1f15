"""The measurements of a trained model: on held-out data, and of the images it generated."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kairostep.data import Dataset
from kairostep.evaluation.bound import NUM_TIMES, variational_bound
from kairostep.evaluation.distances import fid, kernel_distance, precision_recall
from kairostep.evaluation.estimate import Estimate
from kairostep.evaluation.features import FeatureNetwork
from kairostep.evaluation.images import ImageSource
from kairostep.evaluation.likelihood import NUM_BINS, loss_profile
from kairostep.evaluation.measurement import Measurement
from kairostep.evaluation.moments import FeatureStatistics, shared_statistics
from kairostep.progress_meter import ProgressMeter
from kairostep.runs.trained import Trained
from kairostep.shares import WHOLE, Share

SEED = 1  # of the noise on held-out data and of KID's subsets: the same in all runs so that they pair
LEVELS = 256


@dataclass(frozen=True)
class HeldOutData:
    """The rows that held-out measurements are taken on."""

    x0: Tensor  # (N, ...)
    labels: Tensor | None  # (N,)
    levels: int | None  # of pixels; None for latents
    digest: str  # of the whole set

    @classmethod
    def of(cls, dataset: Dataset, num: int, device: torch.device, *, classes: bool, pixels: bool) -> "HeldOutData":
        """Return `num` rows spread over a set, or all if there are fewer: the rows that training is monitored on."""
        samples, labels = dataset.read_some(num)
        x0 = dataset.to_x0(samples.to(device), None)
        kept = labels.to(device) if classes else None
        return cls(x0, kept, LEVELS if pixels else None, dataset.fingerprint())


def measure_held_out(
    trained: Trained, data: HeldOutData, *, batch_size: int = 256, share: Share = WHOLE
) -> list[Measurement]:
    """Return bound, losses, and losses by time, in float32. Processes share the work and return the same."""
    seen: dict[str, Any] = {"labels": data.labels, "seed": SEED, "batch_size": batch_size, "share": share}
    n = len(data.x0)
    num_evaluations = n * (NUM_TIMES + 1 + NUM_BINS)
    meter = ProgressMeter(num_evaluations, "held-out data", unit="evaluation", shown=share.is_first)
    with meter, meter.watching(trained.model, lambda num: num * share.num_processes):
        bound = variational_bound(trained.model, trained.objective, data.x0, levels=data.levels, **seen)
        profile = loss_profile(trained.model, trained.objective, data.x0, **seen)
    facts = {"on": "held-out data", "seeds": [SEED], "digests": {"data": data.digest}}
    bits = {**facts, "levels": data.levels, "network_evaluations": bound.num_evaluations}
    losses = {**facts, "network_evaluations": profile.num_evaluations}
    measurements = [
        Measurement("vlb_bits_per_dim", bound.total, n, bits),
        Measurement("vlb_prior", bound.prior, n, bits),
        Measurement("vlb_diffusion", bound.diffusion, n, bits),
        Measurement("vlb_reconstruction", bound.reconstruction, n, bits),
        Measurement("loss", profile.loss, n, losses),
        *([Measurement("weighted_loss", profile.weighted_loss, n, losses)] if trained.objective.is_weighted() else []),
        Measurement("epsilon_mse", profile.epsilon_mse, n, losses),
    ]
    for part in profile.bins:
        place = {"t": [part.start, part.end], "log_snr": part.log_snr, "network_evaluations": n}
        loss = {"loss": part.loss.value, "loss_standard_error": part.loss.error}
        measurements.append(Measurement("epsilon_mse_at", part.epsilon_mse, n, {**facts, **place, **loss}))
    return measurements


def measure_images(
    generated: FeatureStatistics, reference: FeatureStatistics, facts: Mapping[str, Any] | None = None
) -> list[Measurement]:
    """Return FID, KID, precision and recall of features."""
    n, rows = generated.moments.count, (generated.sample.rows, reference.sample.rows)
    shared = {**(facts or {}), "reference_n": reference.moments.count}
    measurements = [Measurement("fid", fid(generated, reference), n, shared)]
    num_rows = min(map(len, rows))
    if num_rows > 1:
        kid = kernel_distance(*rows, seed=SEED)
        measurements.append(Measurement("kid", kid, num_rows, {**shared, "reference_n": num_rows}))
    if num_rows > 3:
        shares = precision_recall(*rows)
        for name in ("precision", "recall"):
            estimate = Estimate(getattr(shares, name), getattr(shares, f"{name}_error"))
            measurements.append(Measurement(name, estimate, num_rows, {**shared, "reference_n": num_rows}))
    return measurements


def source_statistics(
    source: ImageSource,
    network: FeatureNetwork,
    num: int,
    *,
    device: torch.device,
    batch_size: int = 64,
    share: Share = WHOLE,
) -> FeatureStatistics:
    """Return the statistics of the first `num` images of a source. Processes share the work and return the same."""
    batches = zip(share.batches(num, batch_size), source.batches(num, batch_size, share), strict=True)
    return shared_statistics(network, _with_bar(batches, num, share), device=device, share=share)


def generation_facts(source: ImageSource) -> dict[str, Any]:
    """Return what a measurement of generated images depends on, as far as `generation.json` beside them says it."""
    made = source.generation()
    known = {"checkpoint": "step", "checkpoint_sha256": "digest", "weights": "weights"}
    return {
        "on": str(source.path),
        "solver": made.get("solver"),
        "steps": made.get("steps"),
        "guidance": made.get("guidance"),
        "seeds": [made["seed"]] if "seed" in made else None,
        "network_evaluations": made.get("network_evaluations"),
        **{key: made[name] for key, name in known.items() if name in made},
    }


def _with_bar(batches: Iterable[tuple[range, Tensor]], num: int, share: Share) -> Iterator[tuple[range, Tensor]]:
    with ProgressMeter(num, "features of generated images", unit="image", shown=share.is_first) as meter:
        for rows, images in batches:
            yield rows, images
            meter.update(len(rows) * share.num_processes)
