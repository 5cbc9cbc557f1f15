"""What the adaptive sampler refuses, skips and survives."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from problem import Problem, data
from torch import Tensor
from torch.testing import assert_close

import kairostep as ks
from kairostep.timesteps.policy import MAX_CONCENTRATION, Beta
from kairostep.timesteps.reinforce import gather_findings


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ks.Adaptive(ks.ConstantBeta(), num_steps=2), "got 3, 2 and 2: select fewer timesteps"),
        (lambda: ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(sweep=2000)), "got 3, 2000 and 1000"),
        (
            lambda: ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(queue_size=2)),
            "queue_size must be a whole number of at least 3, got 2",
        ),
        (
            lambda: ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(every=0)),
            "every must be a whole number of at least 1, got 0",
        ),
        (
            lambda: ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(credit="both")),
            "credit must be one of 'sample', 'batch', got 'both'",
        ),
        (lambda: ks.Adaptive(ks.ConstantBeta(), floor=1.0), r"floor must be in \[0, 1\), got 1.0"),
        (lambda: ks.Adaptive(ks.ConstantBeta(), floor=0.1, as_published=True), "as_published fixes floor"),
        (lambda: ks.Adaptive(ks.DiscreteProcess.linear().vlb_weight), "policy must be a Module"),
        (lambda: ks.Adaptive(ks.ConstantBeta(), probing={"every": 2}), "probing must be a Probing, got {'every': 2}"),
        (lambda: ks.Adaptive(ks.ConstantBeta(), ks.vlb(ks.DiscreteProcess.linear())), r"objective.reweighting"),
        (lambda: ks.Adaptive(ks.ConstantBeta(), lambda t: t / 0), "reward_weight must be finite"),
        (
            lambda: ks.Adaptive(ks.ConstantBeta(), ks.DiscreteProcess.linear().with_zero_terminal_snr().vlb_weight),
            "zero terminal SNR",
        ),
        (
            lambda: ks.Adaptive(ks.ConstantBeta(), learning_rate=-1.0),
            "learning_rate must be a finite number of at least 0",
        ),
        (
            lambda: ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(credit="batch"), stratified=True),
            "leave `stratified` out",
        ),
        (lambda: ks.Adaptive(ks.BetaPolicy.for_input((3,))).sample(torch.zeros(2, 4)), r"for_input\(\(4,\)\)"),
    ],
)
def test_wrong_arguments_are_refused_with_rule_and_value(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "option",
    [
        {"every": 2},
        {"sweep": 8},
        {"sweep_x0": 1},
        {"reward_rows": 8},
        {"num_selected": 1},
        {"queue_size": 5},
        {"rule": ks.f_statistic},
        {"credit": "batch"},
        {"standardised": False},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_that_moved_to_the_probe_are_refused_with_their_new_place(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(TypeError, match=rf"{name} is an option of Probing.*probing=ks.Probing\({name}="):
        ks.Adaptive(ks.ConstantBeta(), **option)
    assert getattr(ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(**option)).probing, name) == option[name]


def test_a_keyword_that_never_was_is_refused_as_python_does() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'"):
        ks.Adaptive(ks.ConstantBeta(), evry=2)  # type: ignore[arg-type]


def test_options_of_the_probe_never_change() -> None:
    probing = ks.Probing(every=3)
    with pytest.raises(FrozenInstanceError):
        probing.every = 4  # type: ignore[misc]
    assert replace(probing, every=4) == ks.Probing(every=4)


def test_a_sweep_of_more_x0_than_timesteps_leaves_some_out() -> None:
    sampler, x0 = ks.Adaptive(ks.ConstantBeta(), num_steps=4, probing=ks.Probing(sweep_x0=6)), data(0)
    probe = sampler.plan(x0, 0)
    assert sorted(probe.swept.tolist()) == [0, 1, 2, 3]
    assert len(probe.rows) == 4 + 3 * 32


def test_an_observation_that_is_never_entered_is_an_error() -> None:
    problem, sampler = Problem(), ks.Adaptive(ks.ConstantBeta())
    x0 = data(0)
    drawn = sampler.sample(x0)
    sampler.observe(x0, drawn, torch.zeros(32), problem.loss_at(x0))
    with pytest.raises(RuntimeError, match=r"write `with sampler.observe\(...\): optimizer.step\(\)`"):
        sampler.observe(x0, drawn, torch.zeros(32), problem.loss_at(x0))
    with sampler.observe(x0, drawn, torch.zeros(32), problem.loss_at(x0)):
        pass


def test_a_loss_of_the_wrong_shape_is_an_error() -> None:
    sampler, x0 = ks.Adaptive(ks.ConstantBeta()), data(0)
    drawn = sampler.sample(x0)
    with (
        pytest.raises(ValueError, match=r"one loss per row asked for, \(128,\), got \(\)"),
        sampler.observe(x0, drawn, torch.zeros(32), lambda rows, t: t.mean()),
    ):
        pass


def test_a_scalar_loss_of_probes_is_an_error_for_gradient_variance_too() -> None:
    model = torch.nn.Linear(4, 4)
    sampler, x0 = ks.GradientVariance(model.parameters(), every=1), data(0)
    with (
        pytest.raises(ValueError, match=r"one loss per row asked for, \(8,\), got \(\): .*flatten\(1\)"),
        sampler.observe(x0, sampler.sample(x0), torch.zeros(32), lambda rows, t: model(x0[rows]).square().mean()),
    ):
        pass


def test_rows_whose_loss_is_nan_are_left_out_and_counted() -> None:
    sampler, x0 = ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(every=1)), data(0)
    scale = torch.ones(())

    def loss_at(rows: Tensor, t: Tensor) -> Tensor:
        return torch.where(rows == 5, torch.nan, (1 + rows) * scale)

    drawn = sampler.sample(x0)
    with sampler.observe(x0, drawn, torch.zeros(32), loss_at):
        scale.fill_(0.5)
    rewards = torch.tensor([(1 + row) / 2 for row in range(32) if row != 5])
    assert_close(sampler.reward, torch.stack([rewards.mean(), rewards.std(correction=0)]))
    assert int(sampler.num_skipped) == 1 + int(
        int(sampler.plan(x0, 0).rows[0]) == 5
    )  # and the sweep, if it took that row
    assert bool(sampler.policy.output.isfinite().all())


@pytest.mark.parametrize("credit", ["sample", "batch"])
def test_the_policy_stays_bounded_under_ten_thousand_adversarial_rewards(credit: str) -> None:
    sampler = ks.Adaptive(
        ks.ConstantBeta(), entropy=0.0, floor=0.0, probing=ks.Probing(credit=credit), learning_rate=0.1
    )
    x0, valid = torch.zeros(4, 1), torch.ones(4)
    times = torch.rand(10_000, 4, generator=torch.Generator().manual_seed(0))
    for step, t in enumerate(times):
        greed = (t if step < 6000 else 1 - t) * 10.0 ** (step % 35 - 20)  # for one end, then for the other
        slopes = sampler.slopes(x0, t, greed - sampler.reward[0], valid)
        found = gather_findings(torch.zeros(0), greed, valid, 0, slopes, torch.zeros(0, 2))
        gradient = sampler.policy_gradient(found)
        sampler.optimizer.step(sampler.policy, gradient, torch.tensor(True))
    distribution: Beta = sampler.policy(x0)
    for values in (distribution.a.detach(), distribution.b.detach()):
        assert 0.99 / MAX_CONCENTRATION <= float(values.min()) <= float(values.max()) <= 1.01 * MAX_CONCENTRATION
    assert all(bool(value.isfinite().all()) for value in sampler.state_dict().values())
    assert bool(sampler.sample(x0).t.isfinite().all())


def test_gradient_variance_measures_what_is_still_trained() -> None:
    problem = Problem()
    sampler = ks.GradientVariance(problem.model.parameters(), num_bins=2, every=1, rows_per_gradient=4)
    problem.step(sampler, data(0))
    problem.model[0].requires_grad_(False)  # fine-tuning goes on with the last layer
    problem.step(sampler, data(1))
    assert sampler.num_measured.tolist() == [1, 1]
    assert bool((sampler.variance > 0).all())
