"""Options that have another name today: the old one is refused with the new one, and old runs are read."""

from pathlib import Path

import pytest
import torch
import yaml
from small_runs import LEARNING, assert_same_state, state_of, train_here

import kairostep as ks
from kairostep.experiments.config import load
from kairostep.renamed_options import with_new_names
from kairostep.runs import load_trained
from kairostep.runs.history import RunHistory

SETTINGS = {**LEARNING["loss_second_moment"], "sampler.floor": 0.2}


def use_old_name(directory: Path) -> None:
    """Write config.yaml as version 0.1 did."""
    path = directory / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["sampler"]["uniform_prob"] = config["sampler"].pop("floor")
    path.write_text(yaml.safe_dump(config))


def test_a_run_with_the_old_name_resumes_and_is_read_by_all(tmp_path: Path) -> None:
    old, whole = tmp_path / "old", tmp_path / "whole"
    train_here(old, {**SETTINGS, "steps": 10})
    use_old_name(old)
    assert load(old / "config.yaml").sampler.options["floor"] == 0.2
    assert RunHistory.read(old).config["sampler"]["floor"] == 0.2
    assert load_trained(old).step == 10
    train_here(old, {**SETTINGS, "steps": 16})
    train_here(whole, {**SETTINGS, "steps": 16})
    assert_same_state(state_of(old)["trainer"], state_of(whole)["trainer"])


def test_what_is_not_renamed_stays() -> None:
    config = {"steps": 3, "sampler": {"name": "root_loss", "uniform_prob": 0.1}, "network": "unet", "data": None}
    assert with_new_names(config) == config
    assert with_new_names({"sampler": {"name": "loss_second_moment", "history": 3}}) == {
        "sampler": {"name": "loss_second_moment", "history": 3}
    }


def test_the_old_name_is_refused_with_the_new_one(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"uniform_prob= is now floor=, got uniform_prob=0.1: pass floor=0.1"):
        ks.LossSecondMoment(uniform_prob=0.1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"uniform_prob= of loss_second_moment is now floor=: pass floor=0.1"):
        ks.from_name("loss_second_moment", uniform_prob=0.1)
    settings = {**LEARNING["loss_second_moment"], "sampler.uniform_prob": 0.1}
    with pytest.raises(ValueError, match=r"--sampler.uniform_prob is now --sampler.floor: pass --sampler.floor=0.1"):
        train_here(tmp_path / "run", settings)


def test_a_loss_weight_of_log_snr_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss_weight must be a function of t, got torch\.exp, of log-SNR: leave it"):
        ks.InfoNoise(ks.FlowProcess(), torch.exp)
