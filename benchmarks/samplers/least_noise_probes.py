"""How many probes does `LeastNoise` need, and how long does what they found stay right?

    python benchmarks/samplers/least_noise_probes.py RUN [RUN ...] [--trials 8] [--rows 96]

Each RUN is a run directory of the same preset, trained for more and more steps; its last checkpoint counts. Single-row
gradients of each give the noise that any density has there, in Adam's metric over that of uniform draws. Samplers that
know the losses there take up to 50 probes of the last run: the first table has their noise by the number of probes.
Samplers that took ten probes of an earlier run know the losses of a later one: the second table has their noise there.
"""

import argparse
import statistics
from argparse import Namespace
from collections.abc import Sequence

import torch
from torch import Tensor

import kairostep as ks
from kairostep.analysis import gradient_noise
from kairostep.commands.checkpoint_analyses import NUM_ROWS, Study, optimizer_of
from kairostep.runs.checkpoint import read
from kairostep.timesteps.histogram import with_floor
from kairostep.timesteps.noise import least_noise_density, noise_ratio

NUM_BINS, BATCH_SIZE = 20, 128
MARKS = (5, 10, 13, 20, 30, 50)  # numbers of probes


class Checkpoint:
    """The last checkpoint of a run, and the noise that densities have there."""

    def __init__(self, directory: str, num_rows: int) -> None:
        known = Namespace(checkpoint="last", weights="model", directory=None)
        study = Study.of(known, [directory], None)  # type: ignore[arg-type]
        (self.step,) = study.steps()
        self.trained, self.rows = study.load(self.step), study.rows(study.train, NUM_ROWS)
        state = read(self.trained.checkpoint)["trainer"]["optimizer"]
        self.optimizer = optimizer_of(study.config, state, list(self.trained.model.parameters()))
        model, objective = self.trained.model, self.trained.objective
        noise = gradient_noise(model, objective, self.rows, self.optimizer, num_bins=NUM_BINS, rows_per_bin=num_rows)
        self.moments, self.losses = noise.moments("adam").double(), noise.losses.float()  # (K,), (K, R)
        self.least = self.noise_of(with_floor(least_noise_density(self.moments), 0.1))
        self.root_loss = self.noise_of(with_floor(least_noise_density(noise.predicted_moments()), 0.1))

    def noise_of(self, density: Tensor) -> float:
        """Return the noise of a density (K,) here."""
        return float(noise_ratio(density.double(), self.moments))

    def show_losses(self, sampler: ks.LeastNoise) -> None:
        """Let the sampler know the losses here, and no others."""
        t = (torch.arange(NUM_BINS).repeat_interleave(self.losses.shape[1]) + 0.5) / NUM_BINS
        for buffer in sampler.squares.buffers():
            buffer.zero_()
        sampler.squares.merge(sampler.squares.sums(t, self.losses.flatten()), 1.0)

    def probe(self, rows_per_probe: int, num_probes: int, seed: int) -> tuple[ks.LeastNoise, dict[int, float]]:
        """Return a sampler that took so many probes here, and its noise by the number of probes."""
        sampler = ks.LeastNoise(self.optimizer, rows_per_probe=rows_per_probe, seed=seed)
        self.show_losses(sampler)
        generator, model, found = torch.Generator().manual_seed(seed), self.trained.model.eval(), {}
        for number in range(num_probes):
            x0 = self.rows.x0[torch.randint(len(self.rows.x0), (BATCH_SIZE,), generator=generator)]

            def loss_at(rows: Tensor, t: Tensor, x0: Tensor = x0) -> Tensor:
                noise = torch.randn(x0[rows].shape, generator=generator)
                return self.trained.objective(model, x0[rows], t, noise=noise)

            sampler.record_probe(number, sampler.probe(x0, loss_at, number))
            if number + 1 in MARKS:
                found[number + 1] = self.noise_of(with_floor(sampler.learned_mass(), sampler.floor))
        return sampler, found


def with_spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation."""
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--rows", type=int, default=96, help="single-row gradients in each bin")
    known = parser.parse_args()
    checkpoints = sorted((Checkpoint(run, known.rows) for run in known.runs), key=lambda checkpoint: checkpoint.step)
    for at in checkpoints:
        print(f"step {at.step}: least with the floor {at.least:.3f}, root_loss {at.root_loss:.3f}")
    for rows in (8, 16, 32):
        trials = [checkpoints[-1].probe(rows, max(MARKS), seed)[1] for seed in range(known.trials)]
        by_number = (f"{number}: {with_spread([trial[number] for trial in trials])}" for number in MARKS)
        print(f"probes of {rows} rows at step {checkpoints[-1].step}, by number: {', '.join(by_number)}")
    for place, at in enumerate(checkpoints):
        samplers = [at.probe(16, 10, seed)[0] for seed in range(known.trials)]
        for later in checkpoints[place:]:
            for sampler in samplers:
                later.show_losses(sampler)
            noise = [later.noise_of(with_floor(sampler.learned_mass(), sampler.floor)) for sampler in samplers]
            print(f"probed at step {at.step}, used at {later.step}: {with_spread(noise)}")


if __name__ == "__main__":
    main()
