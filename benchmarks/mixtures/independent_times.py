"""Theorem 1 of Kim et al. as an experiment: where should steps go if every t has parameters of its own, and if not?

    python benchmarks/mixtures/independent_times.py [--seeds 200] [--output results/independent_times/README.md]

A mixture of Gaussians is denoised: the noise is predicted by one number for each of 16 equally likely cells of x_t, the
linear schedule cut into ten bins of t. SGD with steps of 1/n starts at the best fit, so that what is lost is lost to
noise alone, as the theorem has it. With parameters of its own a bin's excess error after n steps is its gradient
variance over n, so that the total is least for steps in proportion to the root of the variance. Steps in proportion to
the variance, which the paper infers, serve all bins alike, and their total is that of uniform steps. With parameters
shared by all bins, a density without weights trains another objective; with weights 1/density its noise counts.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

import kairostep as ks

NUM_BINS, NUM_CELLS, NUM_STEPS = 10, 16, 10_000
NUM_REFERENCE = 200_000  # rows of each bin from which its best fit is computed
SLOW_START = 4 * NUM_CELLS  # steps of 1 / (n + this): the first ones shall not overshoot
CHUNK = 200  # steps whose rows are drawn at once


class Bins:
    """Regression problems, one per bin of t, and the one of all bins with shared parameters."""

    def __init__(self) -> None:
        process = ks.DiscreteProcess.linear()
        t = (torch.arange(NUM_BINS, dtype=torch.float64) + 0.5) / NUM_BINS
        self.alpha, self.sigma = process.alpha(t), process.sigma(t)
        xt, noise = self.rows(torch.Generator().manual_seed(0), NUM_REFERENCE)
        share = torch.arange(1, NUM_CELLS, dtype=torch.float64) / NUM_CELLS
        self.edges = torch.stack([own.quantile(share) for own in xt])  # (K, F-1): equally likely cells of each bin
        self.shared_edges = xt.flatten()[::NUM_BINS].quantile(share).expand(NUM_BINS, -1).contiguous()
        self.best, self.variance = self.fit(xt, noise, self.edges, shared=False)
        self.shared_best, self.shared_moments = self.fit(xt, noise, self.shared_edges, shared=True)

    def rows(self, generator: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
        """Return x_t and its noise, (K, num) each."""
        shape = (NUM_BINS, num)
        centre = torch.randint(3, shape, generator=generator).double() * 1.5 - 1.5
        x0 = centre + 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        return self.alpha[:, None] * x0 + self.sigma[:, None] * noise, noise

    def fit(self, xt: Tensor, noise: Tensor, edges: Tensor, *, shared: bool) -> tuple[Tensor, Tensor]:
        """Return the best parameters, (K, F), and the second moment of a row's gradient there, (K,)."""
        cell = torch.searchsorted(edges, xt)  # (K, N)
        total, num = (torch.zeros(NUM_BINS, NUM_CELLS, dtype=torch.float64) for _ in range(2))
        total.scatter_add_(1, cell, noise)
        num.scatter_add_(1, cell, torch.ones_like(noise))
        best = (total.sum(0) / num.sum(0)).expand(NUM_BINS, -1) if shared else total / num
        return best, (best.gather(1, cell) - noise).square().mean(1)


def own_parameters(bins: Bins, density: Tensor, num_seeds: int) -> Tensor:
    """Return the total excess error (S,) where each bin has parameters of its own and its share of the steps."""
    generator = torch.Generator().manual_seed(1)
    num_steps = (density * NUM_STEPS).round()[:, None]  # (K, 1)
    weights = bins.best[:, None].repeat(1, num_seeds, 1)  # (K, S, F)
    for first in range(0, int(num_steps.max()), CHUNK):
        xt, noise = bins.rows(generator, num_seeds * CHUNK)
        cells = torch.searchsorted(bins.edges, xt).view(NUM_BINS, CHUNK, num_seeds)
        for row, (cell, target) in enumerate(zip(cells.unbind(1), noise.view_as(cells).unbind(1), strict=True)):
            size = NUM_CELLS * (first + row < num_steps) / (first + row + SLOW_START)
            error = weights.gather(2, cell[..., None])[..., 0] - target
            weights.scatter_add_(2, cell[..., None], -(size * error)[..., None])
    return (weights - bins.best[:, None]).square().mean(2).sum(0)


def shared_parameters(bins: Bins, density: Tensor, num_seeds: int, *, weighted: bool) -> Tensor:
    """Return the excess error (S,) of the uniform objective where all bins share their parameters."""
    generator = torch.Generator().manual_seed(2)
    factor = 1 / (NUM_BINS * density) if weighted else torch.ones(NUM_BINS, dtype=torch.float64)
    weights = bins.shared_best[0].repeat(num_seeds, 1)  # (S, F)
    for first in range(0, NUM_STEPS, CHUNK):
        xt, noise = bins.rows(generator, num_seeds * CHUNK)
        cells = torch.searchsorted(bins.shared_edges, xt)
        drawn = torch.multinomial(density, num_seeds * CHUNK, replacement=True, generator=generator)[None]
        cells, noise = (own.gather(0, drawn).view(CHUNK, num_seeds) for own in (cells, noise))
        for row, (cell, target, bin_) in enumerate(zip(cells, noise, drawn.view(CHUNK, num_seeds), strict=True)):
            size = NUM_CELLS * factor[bin_] / (first + row + SLOW_START)
            error = weights.gather(1, cell[:, None])[:, 0] - target
            weights.scatter_add_(1, cell[:, None], -(size * error)[:, None])
    return (weights - bins.shared_best[0]).square().mean(1)


def ratio(values: Tensor, baseline: Tensor) -> str:
    """Return the mean (S,) over that of the baseline (S,), with a 95 % interval of resampled seeds."""
    index = torch.randint(len(values), (4000, len(values)), generator=torch.Generator().manual_seed(0))
    low, high = (values[index].mean(1) / baseline[index].mean(1)).quantile(torch.tensor([0.025, 0.975]).double())
    return f"{float(values.mean() / baseline.mean()):.2f} ({float(low):.2f} to {float(high):.2f})"


def table(num_seeds: int) -> str:
    """Return the table of all densities, as ratios to uniform steps."""
    bins = Bins()
    uniform = torch.full((NUM_BINS,), 1 / NUM_BINS, dtype=torch.float64)
    lines = ["| parameters | steps | weights | excess error over uniform's | in theory |", "|---|---|---|---|---|"]
    baseline, variance = own_parameters(bins, uniform, num_seeds), bins.variance
    own = {"variance": variance / variance.sum(), "root of the variance": ks.least_noise_density(variance)}
    for name, density in own.items():
        in_theory = f"{float(ks.noise_ratio(density, variance)):.2f}"
        excess = ratio(own_parameters(bins, density, num_seeds), baseline)
        lines.append(f"| own, of each t | in proportion to the {name} | none needed | {excess} | {in_theory} |")
    baseline, moments = shared_parameters(bins, uniform, num_seeds, weighted=False), bins.shared_moments
    shared = {"second moment": moments / moments.sum(), "root of the second moment": ks.least_noise_density(moments)}
    for name, density in shared.items():
        for how, weighted in (("none", False), ("1/density", True)):
            in_theory = f"{float(ks.noise_ratio(density, moments)):.2f}" if weighted else "another objective"
            excess = ratio(shared_parameters(bins, density, num_seeds, weighted=weighted), baseline)
            lines.append(f"| shared | in proportion to the {name} | {how} | {excess} | {in_theory} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--output", type=Path, help="file whose part below <!-- table --> is written anew")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = table(arguments.seeds)
    print(text)
    if arguments.output:
        before, marker, _ = arguments.output.read_text().partition("<!-- table -->")
        arguments.output.write_text(f"{before}{marker}\n\n{text}\n")


if __name__ == "__main__":
    main()
