"""Experiments as data, and the objects they name. Importing this package imports no data sets or networks."""

from typing import TYPE_CHECKING

from kairostep.experiments.presets import PRESETS as PRESETS
from kairostep.experiments.presets import preset as preset
from kairostep.experiments.settings import Component as Component
from kairostep.experiments.settings import Config as Config
from kairostep.lazy import import_at_first_use

if TYPE_CHECKING:
    from kairostep.experiments.experiment import Experiment as Experiment
    from kairostep.experiments.experiment import build as build
    from kairostep.experiments.parts import PREDICTIONS as PREDICTIONS

__getattr__ = import_at_first_use(
    __name__,
    {"Experiment": "experiment", "build": "experiment", "PREDICTIONS": "parts"},
    moved={"Trained": "kairostep.runs.Trained"},
)
