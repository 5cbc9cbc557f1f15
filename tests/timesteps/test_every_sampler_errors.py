"""What every sampler refuses or warns of, with the fix, and that a refusal teaches it nothing."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from samplers import LEARNING, batch, build, build_model, build_taught, every_sampler, losses_of

from kairostep.timesteps.sampler import UNSHOWN


@every_sampler
def test_losses_of_the_wrong_shape_are_refused(name: str) -> None:
    sampler = build(name, build_model())
    drawn = sampler.sample(batch(0))
    with (
        pytest.raises(ValueError, match=r"one value per sample, \(64,\), got \(64, 4\)"),
        sampler.observe(batch(0), drawn, torch.zeros(64, 4), losses_of(build_model(), batch(0))),
    ):
        pass


@every_sampler
@pytest.mark.parametrize("loss", [torch.tensor(0.5), 0.5], ids=["tensor", "float"])
def test_a_scalar_loss_is_refused_with_the_fix(name: str, loss: Any) -> None:
    sampler = build(name, build_model())
    drawn = sampler.sample(batch(0))
    with (
        pytest.raises(ValueError, match=r'one value per sample, \(64,\), got (\(\)|0.5) .*reduction="none"'),
        sampler.observe(batch(0), drawn, loss, losses_of(build_model(), batch(0))),
    ):
        pass


@every_sampler
def test_a_batch_size_in_place_of_the_batch_is_refused_with_the_fix(name: str) -> None:
    with pytest.raises(ValueError, match=r"x0 must be a tensor, got 8: pass the clean batch \(B, ...\) itself"):
        build(name, build_model()).sample(8)  # type: ignore[arg-type]


@every_sampler
@pytest.mark.parametrize("other", ["uniform", "logit_normal", "root_loss", "curriculum"])
def test_the_state_of_another_sampler_is_refused_before_anything_is_loaded(name: str, other: str) -> None:
    saved, sampler = build_taught(other), build_taught(name)
    if type(saved) is type(sampler):
        return
    before = {key: value.clone() for key, value in sampler.state_dict().items()}
    own, others = type(sampler).__name__, type(saved).__name__
    with pytest.raises(ValueError, match=f"of its own kind, got that of {others} for {own}: make a {others} with"):
        sampler.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=f"got that of {others} for {own}"):
        torch.nn.ModuleList([sampler]).load_state_dict(torch.nn.ModuleList([saved]).state_dict())
    assert all(torch.equal(before[key], value) for key, value in sampler.state_dict().items())


@every_sampler
def test_a_batch_on_another_device_is_refused_with_the_fix(name: str) -> None:
    with pytest.raises(ValueError, match=r"sampler\.to\('meta'\)"):
        build(name, build_model()).sample(torch.zeros(8, 4, device="meta"))


@every_sampler
def test_a_sampler_that_asks_for_losses_says_so_where_it_gets_none(name: str) -> None:
    sampler = build(name, build_model())
    x0 = batch(0)
    drawn = sampler.sample(x0)
    kind = type(sampler).__name__
    if sampler.uses_loss_at:
        with pytest.raises(ValueError, match=rf"{kind} asks for losses at other times: .*losses, loss_at\): optimizer"):
            sampler.observe(x0, drawn, torch.rand(64))  # at the call, not at the step
    else:
        with sampler.observe(x0, drawn, torch.rand(64)):
            pass


@every_sampler
def test_a_learner_that_is_shown_nothing_says_so_once(name: str) -> None:
    sampler, shown = build(name, build_model()), build_taught(name)
    with torch.no_grad():  # an evaluation
        for _ in range(UNSHOWN + 1):
            sampler.sample(batch(0, num_rows=2))
    with (
        pytest.warns(UserWarning, match=r"learns nothing: write `with sampler\.observe")
        if sampler.learns
        else nullcontext()
    ):
        for _ in range(UNSHOWN):
            sampler.sample(batch(0, num_rows=2))
    for _ in range(UNSHOWN):
        sampler.sample(batch(0, num_rows=2))  # once is enough
    assert shown.num_unshown == 0


@pytest.mark.parametrize("name", LEARNING)
def test_a_step_that_raises_teaches_nothing(name: str) -> None:
    model = build_model()
    sampler = build_taught(name, model=model)
    before = {key: value.clone() for key, value in sampler.state_dict().items() if "steps" not in key}
    x0 = batch(0)
    with torch.no_grad():
        drawn = sampler.sample(x0)
    with (
        pytest.raises(OSError, match="out of power"),
        sampler.observe(x0, drawn, torch.full((64,), 9.0), losses_of(model, x0)),
    ):
        raise OSError("out of power")
    after = sampler.state_dict()
    for key, value in before.items():  # but for what was drawn, and what was spent on a probe
        if not key.endswith(("draws.step", "num_drawn", "num_evaluations", "num_probes")):
            assert torch.equal(after[key], value), key
