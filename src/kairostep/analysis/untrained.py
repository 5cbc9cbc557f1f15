"""The objective and the sampler of a config, without its network and data."""

from dataclasses import dataclass

import torch
from torch import nn

from kairostep.analysis.preview import NUM_DRAWS, Preview, preview_of
from kairostep.diffusion import Objective
from kairostep.experiments import Config
from kairostep.experiments.experiment import make_objective
from kairostep.experiments.parts import make_sampler, sampler_context
from kairostep.timesteps import TimestepSampler

SHAPE = (4,)  # of a sample, instead of that of the data


@dataclass(frozen=True)
class UntrainedParts:
    """The parts of a config that determine the density of draws and the loss weight."""

    config: Config
    objective: Objective
    sampler: TimestepSampler

    def preview(self) -> Preview:
        """Return density and weight before training."""
        return preview_of(self.objective, self.sampler, x0=torch.zeros(NUM_DRAWS, *SHAPE))


def untrained_parts(config: Config) -> UntrainedParts:
    """Return the objective and a new sampler of a config. A tiny network replaces the real one."""
    config, objective = make_objective(config)
    sampler = make_sampler(config.sampler, sampler_context(config, objective, nn.Linear(1, 1), SHAPE))
    return UntrainedParts(config, objective, sampler)
