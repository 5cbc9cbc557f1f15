"""Wrong arguments are refused where they are passed, with the fix."""

from typing import Any

import numpy as np
import pytest
import torch
from samplers import batch, build, build_model, losses_of
from torch import Tensor

import kairostep as ks

X0 = torch.zeros(8, 4)
LOSSES = torch.rand(8)


@pytest.mark.parametrize("name", ["root_loss", "uniform", "least_noise", "adaptive"])
@pytest.mark.parametrize("call", ["observe", "show"])
def test_what_was_not_drawn_is_refused_with_the_order_of_arguments(name: str, call: str) -> None:
    model = build_model()
    sampler: Any = build(name, model)
    drawn = sampler.sample(X0)
    show = getattr(sampler, call)
    with pytest.raises(ValueError, match=r"drawn must be what `sample` returned, got Tensor: .*not drawn\.t"):
        show(X0, drawn.t, LOSSES)
    with pytest.raises(ValueError, match=r"x0 must be a tensor, .*got Timesteps: write observe\(x0, drawn, losses\)"):
        show(drawn, X0, LOSSES)


@pytest.mark.parametrize("call", ["observe", "show"])
def test_losses_in_numpy_are_refused(call: str) -> None:
    sampler = ks.RootLoss()
    drawn = sampler.sample(X0)
    losses: Any = np.zeros(8, dtype=np.float32)
    with pytest.raises(ValueError, match=r"losses must be a tensor .*\(8,\), got ndarray .*pass the tensor"):
        getattr(sampler, call)(X0, drawn, losses)


def test_a_batch_of_no_dimension_is_refused() -> None:
    sampler = ks.RootLoss()
    with pytest.raises(ValueError, match="got \\(8,\\) for 0 rows of x0"):
        sampler.observe(torch.tensor(0.0), sampler.sample(X0), LOSSES)


OBJECTIVE = ks.Objective(ks.FlowProcess(), ks.VELOCITY, ks.min_snr())


@pytest.mark.parametrize(
    "make", [ks.RootLoss, ks.LeastNoise, lambda **options: ks.InfoNoise(OBJECTIVE.process, **options)]
)
@pytest.mark.parametrize("wrong", [ks.min_snr(), ks.constant(), OBJECTIVE, 2.0, lambda log_snr, prediction: log_snr])
def test_a_weighting_or_an_objective_is_no_loss_weight(make: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"loss_weight must be a function of t alone, got .*pass.*=objective\.(x0_)?w"):
        make(loss_weight=wrong)
    make(loss_weight=OBJECTIVE.weight)
    make(loss_weight=lambda t, power=2: 1 + t**power)


@pytest.mark.parametrize("wrong", [lambda t: t, lambda rows, t, noise: t, "loss", 3])
@pytest.mark.parametrize("name", ["least_noise", "adaptive", "gradient_variance"])
def test_a_loss_at_of_other_arguments_is_refused_at_the_first_step(name: str, wrong: Any) -> None:
    model = build_model()
    sampler = build(name, model)
    x0 = batch(0)
    drawn = sampler.sample(x0)
    with pytest.raises(ValueError, match=r"loss_at must be a function that can be called as loss_at\(rows, t\), got"):
        sampler.observe(x0, drawn, torch.rand(64), wrong)
    with sampler.observe(x0, drawn, torch.rand(64), losses_of(model, x0)):
        pass


def test_shown_losses_leave_their_graph_behind() -> None:
    sampler, scale = ks.RootLoss(), torch.ones((), requires_grad=True)
    for _ in range(2):
        sampler.show(X0, sampler.sample(X0), scale * LOSSES)
    kept: list[Tensor] = [losses for _, _, losses in sampler._micro_batches]
    assert len(kept) == 2
    assert not any(losses.requires_grad for losses in kept)
    with sampler.observe(X0, sampler.sample(X0), LOSSES):
        pass


def test_pairs_need_process_batch_and_draws_in_this_order() -> None:
    process: Any = ks.FlowProcess()
    drawn: Any = ks.Uniform().sample(X0)
    order = r"write antithetic_pairs\(process, x0, drawn\)"
    with pytest.raises(ValueError, match=rf"process must be one such as .*, got Tensor: {order}"):
        ks.antithetic_pairs(X0, process, drawn)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"x0 must be a tensor, .*got Timesteps: {order}"):
        ks.antithetic_pairs(process, drawn, X0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"drawn must be what `sample` returned, got Tensor: {order}"):
        ks.antithetic_pairs(process, X0, drawn.t)
