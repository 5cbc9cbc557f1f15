"""Experiments as data, and the objects they name."""

from kairostep.experiments.components import DATASETS as DATASETS
from kairostep.experiments.components import NETWORKS as NETWORKS
from kairostep.experiments.components import PREDICTIONS as PREDICTIONS
from kairostep.experiments.components import PROCESSES as PROCESSES
from kairostep.experiments.components import SAMPLERS as SAMPLERS
from kairostep.experiments.components import TABLES as TABLES
from kairostep.experiments.components import WEIGHTINGS as WEIGHTINGS
from kairostep.experiments.config import Component as Component
from kairostep.experiments.config import Config as Config
from kairostep.experiments.experiment import Experiment as Experiment
from kairostep.experiments.experiment import build as build
from kairostep.experiments.presets import PRESETS as PRESETS
from kairostep.experiments.presets import preset as preset
from kairostep.experiments.trained import Trained as Trained
