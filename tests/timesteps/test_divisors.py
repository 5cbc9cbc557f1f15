"""What is read of an optimizer's state against the steps that it takes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from problem import Problem, data
from torch import Tensor
from torch.testing import assert_close

import kairostep as ks
from kairostep.timesteps.divisors import READ_BY, can_be_read
from kairostep.timesteps.gradient_size import scale_gradients, squared_size

RATE = 1e-3
optim = torch.optim
Make = Callable[[list[Tensor]], optim.Optimizer]

READ: dict[str, Make] = {  # without momentum, a step is rate * gradient / divisor
    "adam": partial(optim.Adam, lr=RATE, betas=(0.0, 0.9), eps=0.01),
    "amsgrad": partial(optim.Adam, lr=RATE, betas=(0.0, 0.9), eps=0.01, amsgrad=True),
    "adamw": partial(optim.AdamW, lr=RATE, betas=(0.0, 0.9), eps=0.01, weight_decay=0.0),
    "nadam": partial(optim.NAdam, lr=RATE, betas=(0.0, 0.9), eps=0.01),
    "rmsprop": partial(optim.RMSprop, lr=RATE, alpha=0.9, eps=0.01),
    "centered": partial(optim.RMSprop, lr=RATE, alpha=0.9, eps=0.01, centered=True),
    "adagrad": partial(optim.Adagrad, lr=RATE, eps=0.01),
    "adadelta": partial(optim.Adadelta, lr=RATE, rho=0.9, eps=0.01),
    "adamax": partial(optim.Adamax, lr=RATE, betas=(0.0, 0.9), eps=0.01),
}
NOT_READ: dict[str, Make] = {
    "Adafactor": partial(optim.Adafactor, lr=RATE),
    "Rprop": partial(optim.Rprop, lr=RATE),
}
NOTHING: dict[str, Make] = {
    "sgd": partial(optim.SGD, lr=RATE),
    "momentum": partial(optim.SGD, lr=RATE, momentum=0.9),
    "asgd": partial(optim.ASGD, lr=RATE),
}


def train(make: Make, num_steps: int = 8) -> tuple[optim.Optimizer, list[Tensor], list[Tensor]]:
    """Return an optimizer after steps, and the gradients of the last step and how far it went, over the rate."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in [(3, 4), (5,), ()]]
    optimizer = make(parameters)
    for step in range(num_steps):
        before = [p.detach().clone() for p in parameters]
        for parameter in parameters:
            size = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if step == num_steps - 1 and "rho" in optimizer.param_groups[0]:
            optimizer.param_groups[0]["rho"] = 1.0  # Adadelta multiplies by what it kept before the step
        optimizer.step()
    moved = [(b - p.detach()) / RATE for b, p in zip(before, parameters, strict=True)]
    return optimizer, [p.grad for p in parameters if p.grad is not None], moved


@pytest.mark.parametrize("name", READ)
def test_a_scaled_gradient_is_the_step_that_it_leads_to(name: str) -> None:
    optimizer, gradients, moved = train(READ[name])
    assert can_be_read(optimizer)
    scaled = scale_gradients(gradients, optimizer)
    assert_close([s.double() for s in scaled], moved, rtol=1e-5, atol=1e-7)
    half = [h.double().square() for h in scale_gradients(gradients, optimizer, "half")]
    assert_close(half, [g * m for g, m in zip(gradients, moved, strict=True)], rtol=1e-5, atol=1e-7)
    plain = [p.double() for p in scale_gradients(gradients, optimizer, "plain")]
    assert_close(plain, gradients, rtol=1e-6, atol=0)


def test_radams_metric_is_that_of_its_step_but_for_one_factor() -> None:
    optimizer, gradients, moved = train(partial(optim.RAdam, lr=RATE, betas=(0.0, 0.9)), num_steps=20)
    factors = [m / s for m, s in zip(moved, scale_gradients(gradients, optimizer), strict=True)]
    found = torch.cat([factor.flatten() for factor in factors])
    assert_close(found, found[:1].expand_as(found), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", READ)
def test_state_is_read_where_it_lives_and_never_waited_for(name: str) -> None:
    """A replayed graph reads the same tensors after each step, and a tensor without data can give no number."""
    parameters = [torch.zeros(3, 4, device="meta", requires_grad=True)]
    optimizer = READ[name](parameters)
    kept = []
    for _ in range(2):
        parameters[0].grad = torch.zeros_like(parameters[0])
        optimizer.step()
        state = optimizer.state[parameters[0]]
        kept.append({key: id(state[key]) for key in (*READ_BY, "grad_avg", "max_exp_avg_sq") if key in state})
    assert kept[0] == kept[1] != {}
    assert scale_gradients([torch.zeros_like(parameters[0])], optimizer)[0].device.type == "meta"


def test_adagrad_divides_by_nothing_before_its_first_gradient() -> None:
    parameters = [torch.zeros(3, requires_grad=True)]
    optimizer = optim.Adagrad(parameters, lr=RATE)
    gradients = [torch.ones(3)]
    assert_close(scale_gradients(gradients, optimizer), gradients)
    parameters[0].grad = torch.tensor([2.0, 0.0, 0.0])  # rows of an embedding, of which one was used
    optimizer.step()
    assert_close(scale_gradients(gradients, optimizer), [torch.tensor([0.5, 1.0, 1.0])])


def unusual(**state: Any) -> Make:
    """Return an optimizer that keeps other things than torch's, for its last parameter."""

    def make(parameters: list[Tensor]) -> optim.Optimizer:
        optimizer = optim.Adam(parameters, lr=RATE)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.state[parameters[-1]] = {"step": torch.tensor(1.0), **state}
        return optimizer

    return make


class Quantised(Tensor):
    """Codes that say they are floats, as those of torchao."""


def last(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(5, dtype=dtype)


@pytest.mark.parametrize(
    "state",
    [
        {"state1": last(torch.uint8), "state2": last(torch.uint8)},  # bitsandbytes
        {"exp_avg_sq": last(torch.uint8)},
        {"exp_avg_sq": last().as_subclass(Quantised)},
        {"exp_avg_sq": torch.ones(2)},  # of low rank
        {"exp_avg_sq": torch.ones(5, device="meta")},  # offloaded
        {"exp_avg_sq_row": last(), "exp_avg_sq_col": last()},
        {"row_var": last(), "col_var": last()},
    ],
    ids=lambda state: "-".join(state),
)
def test_if_one_divisor_cannot_be_read_the_norm_is_plain_for_all(state: dict[str, Tensor]) -> None:
    parameters = [torch.zeros(3, requires_grad=True), torch.zeros(5, requires_grad=True)]
    optimizer = unusual(**state)(parameters)
    assert not can_be_read(optimizer)
    assert float(squared_size([torch.full((3,), 2.0), torch.full((5,), 3.0)], optimizer)) == pytest.approx(12 + 45)


def test_momentum_beside_adam_counts_plainly_and_is_known() -> None:
    parameters = [torch.zeros(3, requires_grad=True), torch.zeros(5, requires_grad=True)]
    optimizer = unusual(momentum_buffer=last())(parameters)
    assert can_be_read(optimizer)
    scaled = scale_gradients([torch.full((3,), 2.0), torch.full((5,), 3.0)], optimizer)
    assert_close(scaled, [torch.full((3,), 2.0), torch.full((5,), 3.0)], rtol=1e-4, atol=0)  # Adam's v is 1


def probe_with(make: Make) -> None:
    problem = Problem()
    problem.optimizer = make(list(problem.model.parameters()))
    sampler = ks.LeastNoise(problem.optimizer, warmup=1, refresh=2)
    for step in range(12):
        problem.step(sampler, data(step))
    assert int(sampler.num_probes) == 8 * 16


@pytest.mark.parametrize("name", NOT_READ)
def test_it_warns_once_of_an_optimizer_that_it_cannot_read(name: str) -> None:
    with pytest.warns(UserWarning, match=f"what {name} divides gradients by cannot be read.*plain norm") as told:
        probe_with(NOT_READ[name])
    assert len(told) == 1


@pytest.mark.parametrize("make", [*NOTHING.values(), *READ.values()], ids=[*NOTHING, *READ])
def test_it_does_not_warn_of_others(make: Make) -> None:
    probe_with(make)  # pytest makes errors of warnings


def test_an_optimizer_without_any_state_is_known_if_it_needs_none() -> None:
    parameters = [torch.zeros(3, requires_grad=True)]
    assert can_be_read(optim.SGD(parameters, lr=RATE))
    elsewhere = optim.Adam(parameters, lr=RATE)  # as ZeroRedundancyOptimizer, which keeps that of its own inside
    assert not can_be_read(elsewhere)
    assert_close(scale_gradients([torch.ones(3)], elsewhere), [torch.ones(3)])
