"""Experiments as data, and the objects they name; what brings data sets and networks is imported when it is used."""

import importlib
from typing import TYPE_CHECKING, Any

from kairostep.experiments.presets import PRESETS as PRESETS
from kairostep.experiments.presets import preset as preset
from kairostep.experiments.settings import Component as Component
from kairostep.experiments.settings import Config as Config

if TYPE_CHECKING:
    from kairostep.experiments.components import DATASETS as DATASETS
    from kairostep.experiments.components import NETWORKS as NETWORKS
    from kairostep.experiments.components import PREDICTIONS as PREDICTIONS
    from kairostep.experiments.components import PROCESSES as PROCESSES
    from kairostep.experiments.components import SAMPLERS as SAMPLERS
    from kairostep.experiments.components import TABLES as TABLES
    from kairostep.experiments.components import WEIGHTINGS as WEIGHTINGS
    from kairostep.experiments.experiment import Experiment as Experiment
    from kairostep.experiments.experiment import build as build

_TABLES = ("DATASETS", "NETWORKS", "PREDICTIONS", "PROCESSES", "SAMPLERS", "TABLES", "WEIGHTINGS")
_LATER = {
    **dict.fromkeys(_TABLES, "components"),
    "Experiment": "experiment",
    "build": "experiment",
}

if not TYPE_CHECKING:  # type checkers would take any name for one that is here

    def __getattr__(name: str) -> Any:
        """Return a name that is imported at its first use."""
        if name == "Trained":
            raise AttributeError(f"{__name__}.Trained has moved: kairostep.runs.Trained")
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
