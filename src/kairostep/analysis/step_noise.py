"""The gradient noise of a training step under any density of t, in the metric of the optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from kairostep.analysis.noise_ratios import LeastRatio, NoiseRatio, least_ratio, ratio_of
from kairostep.analysis.rows import Rows
from kairostep.checks import count
from kairostep.diffusion import Objective
from kairostep.diffusion.conditions import class_condition
from kairostep.timesteps.gradient_size import Metric, gradients_of, squared_size, trained_parameters, warn_of_plain_norm
from kairostep.timesteps.histogram import with_floor
from kairostep.timesteps.noise import least_noise_density, noise_ratio
from kairostep.timesteps.probes import eval_mode

METRICS: tuple[Metric, ...] = get_args(Metric)
ROOT_LOSS_FLOOR = 0.1  # the default of `RootLoss`
LEAST = "least"  # name of the density of least noise


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """Second moments of single-row gradients by bin of t, and the noise of densities that follows from them."""

    squared: dict[Metric, Tensor]  # (K, R) squared size of the gradient of each row in each bin
    mean_squared: dict[Metric, Tensor]  # (K,) squared size of the mean gradient of each bin, unbiased
    losses: Tensor  # (K, R) weighted, as they are trained
    weights: Tensor  # (K, R) of the objective, at the time of each row

    def moments(self, metric: Metric) -> Tensor:
        """Return the second moment of a single row's gradient in each bin, (K,)."""
        return self.squared[metric].mean(1)

    def within_share(self, metric: Metric) -> float:
        """Return the share of the noise of uniform draws that comes from rows and noise at a fixed t.

        The rest comes from the differences between the mean gradients of bins.
        """
        moments = self.moments(metric)
        return float((moments - self.mean_squared[metric].clamp(min=0)).clamp(min=0).sum() / moments.sum())

    def predicted_moments(self) -> Tensor:
        """Return the moments that `RootLoss` assumes, (K,): the root mean square of weight times loss."""
        return (self.weights * self.losses).square().mean(1).sqrt()

    def densities(self, given: Mapping[str, Tensor], metric: Metric) -> dict[str, Tensor]:
        """Return densities by name, each (K,): those given, root-loss of these losses, and the least noisy one."""
        root_loss = with_floor(least_noise_density(self.predicted_moments()), ROOT_LOSS_FLOOR)
        return {**given, "root_loss of these losses": root_loss, LEAST: least_noise_density(self.moments(metric))}

    def ratio(self, density: Tensor, metric: Metric) -> NoiseRatio:
        """Return the noise ratio of a density that was not learned from these gradients, with its error over rows."""
        return ratio_of(density, self.squared[metric])

    def least_ratio(self, metric: Metric, *, least_in: Metric) -> LeastRatio:
        """Return the noise ratio in a metric of the density that is least noisy in the metric `least_in`."""
        return least_ratio(self.squared[metric], self.squared[least_in])

    def ratios(self, densities: Mapping[str, Tensor], metric: Metric, *, least_in: Metric) -> dict[str, NoiseRatio]:
        """Return the noise ratio in a metric of each density of `densities(given, least_in)`, by name."""
        found = {name: self.ratio(density, metric) for name, density in densities.items() if name != LEAST}
        return {**found, LEAST: self.least_ratio(metric, least_in=least_in).ratio}

    def predicted_ratio(self, density: Tensor) -> float:
        """Return the noise ratio that the losses predict, as `RootLoss.diagnostics` does."""
        return float(noise_ratio(density, self.predicted_moments()))


def gradient_noise(
    model: nn.Module,
    objective: Objective,
    rows: Rows,
    optimizer: torch.optim.Optimizer,
    *,
    num_bins: int = 20,
    rows_per_bin: int = 64,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> GradientNoise:
    """Return the size of single-row gradients in each bin of t, in three metrics, in eval mode.

    Args:
        model: The network that the optimizer trains.
        objective: The loss as it is trained, including its weighting.
        rows: Drawn from with replacement; all bins share rows and noise.
        optimizer: With the state of the run. The metrics "half" and "adam" use what it divides gradients by; where that
            cannot be read, a warning says that they are "plain".
        num_bins: Equal bins of t. Times are spread evenly over a bin.
        rows_per_bin: Single-row gradients of each bin.
        seed: Of rows, times and noise.
        progress: Called with the number of rows that were measured since the call before.
    """
    count("num_bins", num_bins, at_most=10**6, example=20)
    count("rows_per_bin", rows_per_bin, at_least=2)
    warn_of_plain_norm(optimizer)
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(len(rows.x0), (rows_per_bin,), generator=generator).to(rows.x0.device)
    noise = torch.randn((rows_per_bin, *rows.x0.shape[1:]), generator=generator).to(rows.x0)
    place = (torch.randperm(rows_per_bin, generator=generator) + 0.5) / rows_per_bin
    times = (torch.arange(num_bins)[:, None] + place).to(rows.x0.device) / num_bins  # (K, R)
    measure = _RowGradients(model, objective, optimizer, rows.x0.device)
    bins = []
    with eval_mode(model), torch.enable_grad():
        for t in times:
            bins.append(measure.of_bin(rows, index, noise, t))
            if progress is not None:
                progress(len(t))
    return GradientNoise(
        squared={m: torch.stack([one.squared[m] for one in bins]) for m in METRICS},
        mean_squared={m: torch.stack([one.mean_squared[m] for one in bins]) for m in METRICS},
        losses=torch.stack([one.losses for one in bins]),
        weights=objective.weight(times.flatten()).view_as(times).double().cpu(),
    )


@dataclass(frozen=True, slots=True)
class _Bin:
    squared: dict[Metric, Tensor]  # (R,)
    mean_squared: dict[Metric, Tensor]  # ()
    losses: Tensor  # (R,)


class _RowGradients:
    """Gradients of single rows, one after the other.

    On a GPU they are replayed as a CUDA graph: launching the kernels of one row takes longer than running them.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        self.model, self.objective, self.optimizer = model, objective, optimizer
        self.parameters = trained_parameters(optimizer)
        self.total = [torch.zeros_like(p) for p in self.parameters]  # of the gradients of a bin
        self.measure: Callable[..., tuple[Any, ...]] = self._measure
        if device.type == "cuda":
            from kairostep.training.cuda_graphs import Graphs  # takes seconds to import

            self.measure = Graphs(device).wrap("a row's gradient", self._measure)

    def _measure(self, x0: Tensor, t: Tensor, noise: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the loss of a row, (1,), and its gradient's squared size in each metric, (3,). Add it to the total."""
        loss = self.objective(self.model, x0, t, noise=noise, **class_condition(labels))
        gradients = gradients_of(loss.sum(), self.parameters)
        torch._foreach_add_(self.total, list(gradients))
        return loss.detach(), torch.stack([squared_size(gradients, self.optimizer, metric) for metric in METRICS])

    def of_bin(self, rows: Rows, index: Tensor, noise: Tensor, t: Tensor) -> _Bin:
        """Return the squared sizes of the gradients of rows (R,) at t (R,), and of their mean without bias."""
        torch._foreach_zero_(self.total)
        labels = None if rows.labels is None else rows.labels[index]
        found = []
        for row in range(len(index)):
            one = slice(row, row + 1)
            found.append(self.measure(rows.x0[index[one]], t[one], noise[one], None if labels is None else labels[one]))
        losses, sizes = torch.cat([loss for loss, _ in found]), torch.stack([size for _, size in found], dim=1)
        squared = dict(zip(METRICS, sizes.double().cpu(), strict=True))  # (R,) each
        of_total = {metric: squared_size(self.total, self.optimizer, metric).double().cpu() for metric in METRICS}
        num = len(index)
        mean_squared = {metric: (of_total[metric] - squared[metric].sum()) / (num * (num - 1)) for metric in METRICS}
        return _Bin(squared, mean_squared, losses.double().cpu())
