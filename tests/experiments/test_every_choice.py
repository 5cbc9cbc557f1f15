"""Every sampler, process, prediction, weighting and network is one flag, and every option of a sampler is another."""

import re
from typing import Any

import pytest
import torch
from small_experiments import CPU, NEEDED, built
from torch.testing import assert_close

import kairostep as ks
from kairostep.experiments import PREDICTIONS, Experiment, build, preset
from kairostep.experiments.config import with_overrides
from kairostep.registry import networks, processes, samplers, weightings

QUICK = {"adaptive": ["--sampler.every=2", "--sampler.sweep=4"], "gradient_variance": ["--sampler.every=2"]}
SAMPLERS, WEIGHTINGS = samplers.registered, weightings.registered
LEARNING = [name for name, kind in SAMPLERS.items() if kind.observe is not ks.TimestepSampler.observe]


COUNTS = re.compile(r"^(draws|first\.draws|then\.draws)\.|num_drawn$")


def train(experiment: Experiment, steps: int) -> list[torch.Tensor]:
    """Return the losses of some steps, taken as a hand-written loop would take them."""
    stored, _ = experiment.dataset.read_all()
    optimizer = torch.optim.Adam(experiment.model.parameters(), 1e-3)
    experiment.sampler.set_optimizer(optimizer)  # as the trainer does
    seen = []
    for step in range(steps):
        x0 = experiment.dataset.to_x0(stored[8 * step : 8 * step + 8], None)

        def loss_at(rows: Any, t: torch.Tensor, x0: torch.Tensor = x0) -> torch.Tensor:
            return experiment.objective(experiment.model, x0[rows], t)

        drawn = experiment.sampler.sample(x0)
        losses = loss_at(slice(None), drawn.t)
        optimizer.zero_grad()
        (losses * drawn.weight).mean().backward()
        with experiment.sampler.observe(x0, drawn, losses.detach(), loss_at):
            optimizer.step()
        seen.append(losses.detach())
    return seen


def learned(sampler: ks.TimestepSampler) -> dict[str, torch.Tensor]:
    """Return the state without the count of draws, which every sampler keeps."""
    return {name: value.clone() for name, value in sampler.state_dict().items() if not COUNTS.search(name)}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", ["digits", "digits-flow", "digits-edm"])
def test_every_sampler_trains_under_every_kind_of_process(sampler: str, name: str) -> None:
    settings = [f"--sampler={sampler}", *NEEDED.get(sampler, []), *QUICK.get(sampler, [])]
    experiment = built(*settings, name=name)
    before = learned(experiment.sampler)
    losses = torch.cat(train(experiment, 4))
    assert bool((losses.isfinite() & (losses > 0)).all())
    after = learned(experiment.sampler)
    changed = any(not torch.equal(after[key], before[key]) for key in before)
    assert changed == experiment.sampler.learns
    assert_close(experiment.sampler.density(10).sum(), torch.tensor(1.0))


@pytest.mark.parametrize("sampler", LEARNING)
@pytest.mark.parametrize("prediction", ["v", "velocity", "x0"])
@pytest.mark.parametrize("name", ["digits-flow", "digits-edm"])
def test_learning_samplers_go_with_every_prediction_of_continuous_processes(
    sampler: str, prediction: str, name: str
) -> None:
    settings = [f"--sampler={sampler}", f"--prediction={prediction}", *NEEDED.get(sampler, []), *QUICK.get(sampler, [])]
    experiment = built(*settings, name=name)
    train(experiment, 4)
    assert all(bool(value.isfinite().all()) for value in experiment.sampler.state_dict().values())
    assert all(int(value) == 0 for key, value in experiment.sampler.diagnostics().items() if key.startswith("skipped"))


@pytest.mark.parametrize("process", processes.registered)
@pytest.mark.parametrize("prediction", [*PREDICTIONS, "edm", None])
def test_every_prediction_trains_under_every_process(process: str, prediction: str | None) -> None:
    settings = [f"--process={process}", f"--prediction={prediction or 'null'}"]
    if prediction == "edm" and process != "edm":
        with pytest.raises(
            ValueError, match=r"prediction edm belongs to process edm, got a .*Process: pass --prediction=v"
        ):
            built(*settings)
        return
    experiment = built(*settings)
    losses = torch.cat(train(experiment, 1))
    assert bool((losses.isfinite() & (losses > 0)).all())
    natural = {"flow": "velocity", "edm": "edm"}.get(process, "epsilon")
    assert experiment.config.prediction == (prediction or natural)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("name", ["digits", "digits-flow", "digits-edm"])
def test_every_weighting_is_its_factor_times_the_plain_loss(weighting: str, name: str) -> None:
    plain, weighted = built(name=name), built(f"--weighting={weighting}", name=name)
    x0, t = torch.randn(16, 1, 8, 8).clamp(-1, 1), torch.linspace(0.05, 0.95, 16)
    noise = torch.randn_like(x0)
    with torch.no_grad():
        expected, losses = (e.objective(e.model.eval(), x0, t, noise=noise) for e in (plain, weighted))
    factor = weighted.objective.weighting(weighted.process.log_snr(t), weighted.prediction)
    assert_close(losses, expected * factor)
    assert bool((losses.isfinite() & (losses > 0)).all())
    is_one = weighting == "constant" or (weighting == "edm" and name == "digits-edm")
    assert torch.allclose(factor, torch.ones(16), atol=1e-5) == is_one


@pytest.mark.parametrize("network", networks.registered)
@pytest.mark.parametrize("dropout", ["null", "0.1"])
def test_every_network_trains_with_and_without_classes(network: str, dropout: str) -> None:
    small = ["--network.hidden_size=16", "--network.depth=2", "--network.num_heads=2"]
    settings = [] if network == "unet" else small
    config = with_overrides(
        preset("digits"), [f"--network={network}", *settings, f"--label_dropout={dropout}", "--held_out_images=0"]
    )
    experiment = build(config, CPU)
    assert experiment.num_classes == (0 if dropout == "null" else 10)
    cond = {} if dropout == "null" else {"class_labels": torch.tensor([0, 10])}  # 10: the label is hidden
    losses = experiment.objective(experiment.model, torch.zeros(2, 1, 8, 8), torch.tensor([0.2, 0.8]), **cond)
    assert bool((losses.isfinite() & (losses > 0)).all())
