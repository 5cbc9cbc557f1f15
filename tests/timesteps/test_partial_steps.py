"""Micro-batches that are drawn for and not shown: a sampler learns from a part of each step, and says so."""

import warnings

import pytest
import torch
from samplers import batch, build, build_model, losses_of
from torch import nn

import kairostep as ks
from kairostep.integrations.optimizer_hooks import StepObserver
from kairostep.timesteps.sampler import UNSHOWN


def train(
    sampler: ks.TimestepSampler, model: nn.Module, num_steps: int, *, accumulate: int = 4, shows: bool = False
) -> None:
    """Take steps of several micro-batches, and observe the last alone or show the others too."""
    for step in range(num_steps):
        for number in range(accumulate):
            x0 = batch(accumulate * step + number, num_rows=16)
            drawn, loss_at = sampler.sample(x0), losses_of(model, x0)
            losses = loss_at(torch.arange(16), drawn.t).detach()
            if shows and number < accumulate - 1:
                sampler.show(x0, drawn, losses)
        with sampler.observe(x0, drawn, losses, loss_at):
            pass


@pytest.mark.parametrize("name", ["root_loss", "infonoise", "loss_second_moment", "least_noise", "curriculum"])
def test_a_learner_that_sees_a_quarter_of_its_draws_says_so_once(name: str) -> None:
    model = build_model()
    sampler = build(name, model)
    train(sampler, model, UNSHOWN - 1)
    with pytest.warns(UserWarning, match=r"drew for 4 times as many rows as it saw .*sampler\.show\(x0, drawn") as told:
        train(sampler, model, 1)
    assert len(told) == 1
    train(sampler, model, 2 * UNSHOWN)  # once is enough


@pytest.mark.parametrize("name", ["root_loss", "least_noise", "curriculum"])
def test_a_learner_that_sees_all_its_draws_says_nothing(name: str) -> None:
    for options in ({"shows": True}, {"accumulate": 1}):
        model = build_model()
        train(build(name, model), model, UNSHOWN + 1, **options)


@pytest.mark.parametrize("name", ["adaptive", "gradient_variance", "uniform"])
def test_a_sampler_that_learns_nothing_from_the_others_says_nothing(name: str) -> None:
    model = build_model()
    train(build(name, model), model, UNSHOWN + 1)


def test_draws_of_evaluations_and_draws_observed_together_do_not_count() -> None:
    sampler, x0 = ks.RootLoss(), batch(0)
    for _ in range(UNSHOWN + 1):
        with torch.no_grad():
            sampler.sample(x0)
        one, other = sampler.sample(x0), sampler.sample(x0)
        drawn = ks.Timesteps(torch.cat([one.t, other.t]), torch.cat([one.weight, other.weight]))
        with sampler.observe(torch.cat([x0, x0]), drawn, torch.rand(128)):
            pass


def test_a_closure_that_draws_at_each_call_is_no_partial_step() -> None:
    """The optimizer calls it several times a step, of which the first counts."""
    sampler, model = ks.RootLoss(), build_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=4)
    observer = StepObserver(sampler, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        x0 = batch(0, num_rows=16)
        drawn = sampler.sample(x0)
        losses = losses_of(model, x0)(torch.arange(16), drawn.t)
        observer.show(x0, drawn, losses.detach())
        losses.mean().backward()
        return losses.mean()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(UNSHOWN + 1):
            optimizer.step(closure)
    assert sampler.steps.num_steps == UNSHOWN + 1


def test_a_single_step_that_sees_all_ends_the_row() -> None:
    sampler, model = ks.RootLoss(), build_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            train(sampler, model, UNSHOWN - 1)
            train(sampler, model, 1, shows=True)
