"""The average against its closed form, the learning rate against its values."""

import math
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kairostep.training import EMA, learning_rate_schedule


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.9999])
def test_average_is_the_closed_form(decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 3).double()
    history = [[p.detach().clone() for p in model.parameters()]]
    ema = EMA(model, decay)
    num_updates = 40
    for _ in range(num_updates):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        history.append([p.detach().clone() for p in model.parameters()])
        ema.update()
    decays = [min(decay, (1 + n) / (10 + n)) for n in range(num_updates)]
    # weights k, reached by update k: (1 - d_k) times all later decays; the initial weights count as if d were 0
    coefficients = [math.prod(decays)] + [(1 - d) * math.prod(decays[k + 1 :]) for k, d in enumerate(decays)]
    assert sum(coefficients) == pytest.approx(1)
    for position, averaged in enumerate(ema.model.parameters()):
        expected = sum(c * weights[position] for c, weights in zip(coefficients, history, strict=True))
        assert_close(averaged, expected, rtol=1e-12, atol=1e-14)


def test_average_leaves_the_model_alone_and_needs_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    before = deepcopy(model.state_dict())
    ema = EMA(model, 0.9)
    ema.update()
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert not ema.model.training
    assert not any(p.requires_grad for p in ema.model.parameters())


def test_buffers_follow_the_model() -> None:
    model = nn.BatchNorm1d(3).double()
    ema = EMA(model, 0.9)
    for k in range(3):
        model(torch.randn(8, 3, dtype=torch.float64) + k)
        ema.update()
    assert int(ema.model.num_batches_tracked) == 3
    assert_close(ema.model.running_mean, model.running_mean, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_averaged_as_exactly_as_others(dtype: torch.dtype) -> None:
    model, whole = (nn.Linear(8, 8).to(kind) for kind in (dtype, torch.float32))
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(8, 8, generator=generator).to(dtype) for _ in range(2)]
    averages = []
    for each in (model, whole):
        each.requires_grad_(False)
        each.weight.copy_(weights[0])
        each.bias.zero_()
        ema = EMA(each, 0.999)
        ema.num_updates = 10**6  # a long training: each step moves the average by a thousandth
        each.weight.copy_(weights[1])
        for _ in range(200):
            ema.update()
        averages.append(ema)
    half, full = averages
    assert half.model.weight.dtype == dtype
    assert_close(half.model.weight, full.model.weight.to(dtype), rtol=0, atol=0)
    again = EMA(model, 0.999)
    again.load_state_dict(deepcopy(half.state_dict()))
    for each in (half, full, again):
        each.update()
    assert_close(again.state_dict(), half.state_dict(), rtol=0, atol=0)
    assert_close(half.model.weight, full.model.weight.to(dtype), rtol=0, atol=0)


def test_average_goes_on_from_its_state() -> None:
    model = nn.Linear(2, 2)
    whole, first = EMA(model, 0.99), EMA(model, 0.99)
    for k in range(6):
        with torch.no_grad():
            model.weight.fill_(k)
        whole.update()
        if k == 3:
            second = EMA(model, 0.99)
            second.load_state_dict(deepcopy(first.state_dict()))
            first = second
        first.update()
    assert first.num_updates == whole.num_updates == 6
    assert_close(first.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_rate_rises_to_its_value_and_stays() -> None:
    rate = learning_rate_schedule(0.5, warmup_steps=4)
    assert [rate(step) for step in range(6)] == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    assert rate(10**6) == 0.5
    assert [learning_rate_schedule(0.5)(step) for step in (0, 1, 99)] == [0.5, 0.5, 0.5]


def test_rate_falls_as_a_cosine() -> None:
    rate = learning_rate_schedule(2.0, warmup_steps=10, cosine_steps=110)
    assert [rate(step) for step in (0, 9, 10)] == [0.2, 2.0, 2.0]
    for step in range(10, 111):
        assert rate(step) == pytest.approx(1 + math.cos(math.pi * (step - 10) / 100), abs=1e-12)
    assert rate(60) == pytest.approx(1.0)
    assert rate(110) == rate(1000) == 0.0
    assert learning_rate_schedule(2.0, warmup_steps=5, cosine_steps=5)(5) == 2.0  # nothing left to fall over
