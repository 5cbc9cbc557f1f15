"""The objective and the sampler of a config, without its network and data."""

from dataclasses import dataclass

import torch
from torch import nn

from kairostep.analysis.preview import NUM_DRAWS, Preview, preview_of
from kairostep.diffusion import Objective
from kairostep.experiments import SAMPLERS, Config
from kairostep.experiments.components import make
from kairostep.experiments.experiment import make_objective
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
    """Return the objective and a new sampler of a config. A tiny network replaces the real one."""
    config, objective = make_objective(config)
    model = nn.Linear(1, 1)
    sampler: TimestepSampler = make(
        "sampler",
        SAMPLERS,
        config.sampler,
        process=objective.process,
        objective=objective,
        model=model,
        parameters=model.parameters(),
        shape=SHAPE,
        accumulate=config.accumulate,
        seed=config.seed,
    )
    return Parts(config, objective, sampler)
