"""No sampler depends on torch's default dtype, and no policy on a cast."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from samplers import SAMPLERS, batch, build, build_model, train_step
from torch import Tensor
from torch.testing import assert_close

import kairostep as ks
from kairostep.timesteps.policy import Beta


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def everything(name: str, dtype: torch.dtype) -> list[Tensor]:
    """Return all that a sampler says while it is made, drawn from, taught and asked under a default dtype."""
    model = build_model()  # its own dtype is the user's affair
    batches = [batch(step) for step in range(12)]
    with default_dtype(dtype):
        sampler = build(name, model)
        drawn = [train_step(sampler, model, x0) for x0 in batches]
        with torch.no_grad():
            drawn += [sampler.sample(batches[0].double())]
        said = [value for d in drawn for value in (d.t, d.weight)]
        return [*said, sampler.density(10), *sampler.state_dict().values(), *sampler.diagnostics().values()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SAMPLERS)
def test_all_numbers_are_those_under_float32(name: str, dtype: torch.dtype) -> None:
    assert_close(everything(name, dtype), everything(name, torch.float32), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("build_policy", [ks.ConstantBeta, lambda: ks.BetaPolicy.for_input((4,), 16)])
def test_a_policy_cast_to_half_precision_computes_and_learns_in_float32(build_policy, dtype) -> None:  # type: ignore[no-untyped-def]
    model, other_model = build_model(), build_model()
    usual = ks.Adaptive(build_policy(), probing=ks.Probing(every=1))
    cast = ks.Adaptive(build_policy().to(dtype), probing=ks.Probing(every=1))
    cast.to(dtype)
    torch.nn.ModuleList([cast]).to(dtype)  # as part of a model that is cast
    assert {p.dtype for p in cast.policy.parameters()} == {torch.float32}
    for step in range(4):
        expected, drawn = train_step(usual, model, batch(step)), train_step(cast, other_model, batch(step))
        assert torch.equal(expected.t, drawn.t)
    assert all(torch.equal(value, cast.state_dict()[key]) for key, value in usual.state_dict().items())


def test_a_policy_may_be_cast_to_float64() -> None:
    assert ks.BetaPolicy.for_input((4,)).double().out.weight.dtype == torch.float64


class Halved(torch.nn.Module):
    """A policy of the user's own that computes in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.output = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))

    def forward(self, x0: Tensor) -> Beta:
        """Return Beta(1, 1) for every row."""
        return Beta(*self.output.expand(len(x0), 2).unbind(1))


def test_draws_and_log_densities_of_a_policy_in_half_precision_are_float32() -> None:
    sampler = ks.Adaptive(Halved(), floor=0.0)
    drawn = sampler.sample(torch.zeros(1024, 4))
    assert drawn.t.dtype == torch.float32
    assert_close(torch.histc(drawn.t, 64, 0, 1), torch.full((64,), 16.0), rtol=0, atol=1.01)  # 8 bits would show
