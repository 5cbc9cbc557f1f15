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

SHAPE = (4,)  # of a sample that stands in for those of the data


@dataclass(frozen=True)
class Parts:
    """What decides where draws go and what is optimised; config has all defaults of these parts filled in."""

    config: Config
    objective: Objective
    sampler: TimestepSampler

    def preview(self) -> Preview:
        """Return density and weight before training."""
        return preview_of(self.objective, self.sampler, x0=torch.zeros(NUM_DRAWS, *SHAPE))


def parts_without_data(config: Config) -> Parts:
    """Return the objective and the fresh sampler of a config; a tiny network stands in for the one it trains."""
    config, objective = make_objective(config)
    sampler = make_sampler(config.sampler, sampler_context(config, objective, nn.Linear(1, 1), SHAPE))
    return Parts(config, objective, sampler)
