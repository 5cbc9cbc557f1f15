"""Public names that have moved or changed raise with the name to use."""

import importlib

import pytest

MOVED = {
    "kairostep.training.load_trained": "kairostep.runs.load_trained",
    "kairostep.training.Trained": "kairostep.runs.Trained",
    "kairostep.training.Checkpoints": "kairostep.runs.Checkpoints",
    "kairostep.training.CheckpointError": "kairostep.runs.CheckpointError",
    "kairostep.training.warmed_up": "kairostep.training.learning_rate_schedule",
    "kairostep.experiments.Trained": "kairostep.runs.Trained",
    "kairostep.BetaPair": "kairostep.ConstantBeta",
    "kairostep.timesteps.BetaPair": "kairostep.timesteps.ConstantBeta",
    "kairostep.analysis.Ratio": "kairostep.analysis.VarianceRatio",
    "kairostep.reports.RunFiles": "kairostep.runs.RunHistory",
    "kairostep.reports.RunHistory": "kairostep.runs.RunHistory",
}


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_the_old_name_raises_with_the_new_one(old: str, new: str) -> None:
    package, _, name = old.rpartition(".")
    with pytest.raises(AttributeError, match=new):
        getattr(importlib.import_module(package), name)
    package, _, name = new.rpartition(".")
    assert getattr(importlib.import_module(package), name)
