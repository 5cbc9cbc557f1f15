"""Experiments with a network of a few thousand weights, from a preset and settings."""

import torch

from kairostep.experiments import Experiment, build, preset
from kairostep.experiments.config import with_overrides

CPU = torch.device("cpu")
TINY = ["--network.channels=8", "--network.multipliers=[1,1]", "--network.attention=[]", "--held_out_images=0"]
NEEDED = {
    "beta": ["--sampler.a=2", "--sampler.b=3"],
    "tabulated": ["--sampler.mass=[1,2,1]"],
    "curriculum": ["--sampler.start=1", "--sampler.end=3"],
    "speed": ["--prediction=epsilon"],  # what its weight is meant for
}


def built(*settings: str, name: str = "digits") -> Experiment:
    return build(with_overrides(preset(name), [*TINY, *settings]), CPU)
