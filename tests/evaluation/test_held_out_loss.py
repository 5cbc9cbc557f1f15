"""The held-out loss: a function of its arguments, and the right number with the right error where both are known."""

import math
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kairostep.diffusion import (
    EPSILON,
    VELOCITY,
    X0,
    DiscreteProcess,
    EDMProcess,
    FlowProcess,
    Objective,
    Prediction,
    V,
    Weighting,
    constant,
    debias,
    edm,
    min_snr,
    vlb,
)
from kairostep.diffusion.prediction import VPrediction
from kairostep.diffusion.process import Process
from kairostep.evaluation import held_out_loss

STD = 0.6
LINEAR, FLOW, EDM = DiscreteProcess.linear(), FlowProcess(), EDMProcess()


def rows(num: int, dims: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return STD * torch.randn(num, dims, dtype=torch.float64, generator=generator)


class Linear(torch.nn.Module):
    """Some network, called as all are; it has a label to add, and remembers what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[Tensor, Tensor]] = []

    def forward(self, xt: Tensor, time: Tensor, class_labels: Tensor | None = None) -> Tensor:
        """Return half of x_t."""
        self.shown.append((xt, time))
        return xt / 2 + (0 if class_labels is None else class_labels[:, None])


def exact_epsilon(process: Process) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the best prediction of the noise for data from N(0, STD**2): sigma x_t / (alpha**2 STD**2 + sigma**2)."""

    def model(seen: Tensor, time: Tensor) -> Tensor:
        if isinstance(process, EDMProcess):
            alpha, sigma = torch.ones_like(time), (4 * time).exp()
            seen = seen * (sigma**2 + process.sigma_data**2).sqrt()[:, None]
        else:
            t = (time + 0.5) / 1000 if isinstance(process, DiscreteProcess) else time
            alpha, sigma = process.alpha(t.double()), process.sigma(t.double())
        return seen * (sigma / (alpha**2 * STD**2 + sigma**2))[:, None]

    return model


def test_equal_arguments_give_equal_numbers_and_leave_the_global_stream_alone() -> None:
    objective, x0 = Objective(LINEAR, EPSILON), rows(50)
    before = torch.get_rng_state()
    one = held_out_loss(Linear(), objective, x0, seed=3)
    torch.randn(5)
    two = held_out_loss(Linear(), objective, x0, seed=3)
    torch.set_rng_state(before)
    held_out_loss(Linear(), objective, x0, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert astuple(one) == astuple(two)
    assert one.loss != held_out_loss(Linear(), objective, x0, seed=4).loss
    assert one.num_evaluations == 50


@pytest.mark.parametrize("batch_size", [1, 7, 50, 256])
def test_the_size_of_batches_does_not_matter(batch_size: int) -> None:
    objective, x0, labels = Objective(LINEAR, V), rows(50).float(), torch.arange(50) % 3
    expected = held_out_loss(Linear(), objective, x0, labels=labels, batch_size=50)
    found = held_out_loss(Linear(), objective, x0, labels=labels, batch_size=batch_size)
    for one, other in zip(astuple(found), astuple(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("weighting", [min_snr(), debias(), vlb(LINEAR)])
def test_the_weighting_that_was_trained_with_does_not_matter_to_the_unweighted_loss(weighting: Any) -> None:
    plain, weighted = (
        held_out_loss(Linear(), Objective(LINEAR, EPSILON, w), rows(50)) for w in (constant(), weighting)
    )
    own = {"weighted_loss": plain.weighted_loss, "weighted_loss_error": plain.weighted_loss_error}
    assert replace(weighted, **own) == plain
    assert weighted.weighted_loss != plain.weighted_loss


@pytest.mark.parametrize("process", [LINEAR, FLOW, EDM])
def test_runs_pair_and_times_are_spread_evenly(process: Process) -> None:
    one, other = Linear(), Linear()
    held_out_loss(one, Objective(process, EPSILON), rows(40), batch_size=7)
    held_out_loss(other, Objective(process, X0, min_snr()), rows(40), batch_size=7)
    for shown, shown_other in zip(one.shown, other.shown, strict=True):
        for mine, theirs in zip(shown, shown_other, strict=True):
            assert torch.equal(mine, theirs)
    time = torch.cat([time for _, time in one.shown]).double()
    first, last = (process.time(torch.tensor([t], dtype=torch.float64)).double() for t in (0.0, 1.0))
    parts = ((time - first) / (last - first) * 40).floor()
    if isinstance(process, DiscreteProcess):
        parts = (time / 1000 * 40).floor()
    assert sorted(parts.tolist()) == list(range(40))
    assert parts.tolist() != list(range(40))


def test_every_row_keeps_its_label() -> None:
    labels = torch.arange(50) % 7
    x0 = labels.double()[:, None].expand(50, 2)

    def model(xt: Tensor, time: Tensor, class_labels: Tensor) -> Tensor:
        return class_labels.double()[:, None].expand_as(xt)

    result = held_out_loss(model, Objective(LINEAR, X0), x0, labels=labels, batch_size=7)
    assert (result.loss, result.vlb) == (0, 0)
    assert held_out_loss(model, Objective(LINEAR, X0), x0, labels=labels.flip(0)).loss > 1


# Known values: what remains of the noise once x_t is seen is r(t) = alpha**2 STD**2 / (alpha**2 STD**2 + sigma**2)


def remaining(alpha: Tensor, sigma: Tensor) -> Tensor:
    return alpha**2 * STD**2 / (alpha**2 * STD**2 + sigma**2)


def expected_losses(process: Process) -> tuple[float, float | None]:
    """Return the loss and the bound of an exact network, by hand; the bound of a flow has no finite variance."""
    t = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    if isinstance(process, FlowProcess):
        return float(remaining(1 - t, t).mean()), None
    if isinstance(process, EDMProcess):
        r = remaining(torch.ones_like(t), 0.002 * (80 / 0.002) ** t)
        return float(r.mean()), float(r.mean()) * math.log(80 / 0.002)
    beta = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    alpha_bar = (1 - beta).cumprod(0)
    r = remaining(alpha_bar.sqrt(), (1 - alpha_bar).sqrt())
    variance = beta.clone()
    variance[0] = beta[1] * (1 - alpha_bar[0]) / (1 - alpha_bar[1])
    factor = beta**2 / (2 * variance * (1 - beta) * (1 - alpha_bar))
    return float(r.mean()), float((r * factor).mean())


@pytest.mark.parametrize("process", [LINEAR, FLOW, EDM])
def test_an_exact_network_has_the_loss_that_theory_gives(process: Process) -> None:
    loss, bound = expected_losses(process)
    result = held_out_loss(exact_epsilon(process), Objective(process, EPSILON), rows(20_000), batch_size=5000)
    assert 0 < result.loss_error < 0.02 * result.loss
    assert abs(result.loss - loss) < 4 * result.loss_error
    if bound is not None:
        assert 0 < result.vlb_error < 0.1 * result.vlb
        assert abs(result.vlb - bound) < 4 * result.vlb_error


@pytest.mark.parametrize("weighting", [min_snr(), debias(), vlb(LINEAR)])
@pytest.mark.parametrize("prediction", [EPSILON, V])
def test_the_weighted_loss_is_that_of_the_objective(weighting: Weighting, prediction: Prediction) -> None:
    objective, x0, seen = Objective(LINEAR, prediction, weighting), rows(300), []

    def model(xt: Tensor, time: Tensor) -> Tensor:
        seen.append((xt, time))
        return torch.zeros_like(xt)

    result = held_out_loss(model, objective, x0, batch_size=300)
    ((xt, time),) = seen
    t = (time.double() + 0.5) / 1000
    alpha, sigma = LINEAR.alpha(t)[:, None], LINEAR.sigma(t)[:, None]
    noise = ((xt - alpha * x0) / sigma).to(x0)
    losses = objective(lambda xt, time: torch.zeros_like(xt), x0, t.to(x0), noise=noise)
    assert_close(result.weighted_loss, float(losses.mean()), rtol=1e-4, atol=0)
    assert_close(result.weighted_loss_error, float(losses.std() / 300**0.5), rtol=1e-4, atol=0)
    assert result.weighted_loss != pytest.approx(result.loss, rel=0.01)


@pytest.mark.parametrize("process", [LINEAR, FLOW, EDM])
def test_without_a_weighting_both_losses_are_one(process: Process) -> None:
    objective = Objective(process, EPSILON)
    result = held_out_loss(exact_epsilon(process), objective, rows(300))
    assert not objective.is_weighted()
    assert (result.weighted_loss, result.weighted_loss_error) == (result.loss, result.loss_error)


def test_a_weighting_that_is_1_on_what_is_predicted_is_none() -> None:
    assert not Objective(EDM, VPrediction(0.5), edm(0.5)).is_weighted()
    assert Objective(EDM, X0, edm(0.5)).is_weighted()
    assert Objective(LINEAR, EPSILON, min_snr()).is_weighted()


@pytest.mark.parametrize("prediction", [X0, V, VELOCITY])
def test_the_bound_is_the_same_whatever_is_predicted(prediction: Prediction) -> None:
    exact = exact_epsilon(LINEAR)

    def model(xt: Tensor, time: Tensor) -> Tensor:
        t = (time.double() + 0.5) / 1000
        alpha, sigma = LINEAR.alpha(t)[:, None], LINEAR.sigma(t)[:, None]
        noise = exact(xt, time)
        return prediction.target((xt - sigma * noise) / alpha, noise, alpha, sigma)

    expected = held_out_loss(exact, Objective(LINEAR, EPSILON), rows(500))
    found = held_out_loss(model, Objective(LINEAR, prediction), rows(500))
    assert_close([found.vlb, found.vlb_error], [expected.vlb, expected.vlb_error], rtol=1e-5, atol=0)
    assert found.loss != pytest.approx(expected.loss, rel=0.01)


# Error bars: how much the result moves from seed to seed

NUM_SEEDS, NUM_ROWS = 400, 256


def spread_and_error(model: Callable[..., Any], name: str) -> tuple[float, float, float]:
    """Return the standard deviation of the result over seeds, the error that was stated, and four sigma of their ratio.

    Errors are averaged as variances: the bound lies in rare rows, and those that have none of them state too little.
    """
    objective, x0 = Objective(LINEAR, EPSILON), rows(NUM_ROWS)
    results = [held_out_loss(model, objective, x0, seed=seed) for seed in range(NUM_SEEDS)]
    values, errors = (torch.tensor([getattr(r, key) for r in results]) for key in (name, f"{name}_error"))
    kurtosis = float(((values - values.mean()) / values.std()).pow(4).mean())
    slack = 4 * math.sqrt((kurtosis - 1) / (4 * NUM_SEEDS))  # of a standard deviation that is itself estimated
    return float(values.std()), float(errors.square().mean().sqrt()), slack


def test_the_error_is_the_spread_where_all_times_are_alike() -> None:
    def model(xt: Tensor, time: Tensor) -> Tensor:
        return torch.zeros_like(xt)  # the loss is the square of the noise at every time

    spread, error, slack = spread_and_error(model, "loss")
    assert slack < 0.2
    assert abs(spread / error - 1) < slack
    assert error == pytest.approx(math.sqrt(2 / 3 / NUM_ROWS), rel=0.05)


@pytest.mark.parametrize("name", ["loss", "vlb"])
def test_the_error_is_not_below_the_spread_where_times_differ(name: str) -> None:
    spread, error, slack = spread_and_error(exact_epsilon(LINEAR), name)
    assert slack < 0.6
    assert spread < error * (1 + slack)


def test_one_row_has_a_loss_but_no_error() -> None:
    result = held_out_loss(Linear(), Objective(LINEAR, EPSILON), rows(1))
    assert math.isfinite(result.loss)
    assert math.isnan(result.loss_error)
