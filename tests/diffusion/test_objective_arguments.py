"""What the loss refuses, with the fix, and where it cannot look."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kairostep as ks
from kairostep.diffusion.process import Process

OBJECTIVE = ks.Objective(ks.DiscreteProcess.linear())
X0 = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def network(x: Tensor, time: Tensor) -> Tensor:
    return x / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_times_of_half_precision_stay_within_the_last_step(dtype: torch.dtype) -> None:
    """bfloat16 has no 999, and 0.999 is 1 there."""
    losses = OBJECTIVE(network, X0, torch.tensor([0.0, 0.5, 0.996, 0.999, 0.9999, 1.0], dtype=dtype))
    assert losses.shape == (6,)
    assert losses.isfinite().all()


@pytest.mark.parametrize(
    "t",
    [
        torch.rand(6) * 1000,
        ks.Uniform().sample(X0).index(1000).float(),
        torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, -0.01]),
        torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 1.001], dtype=torch.float64),
        torch.tensor([0.5, torch.nan, 0.5, 0.5, 0.5, 0.5]),
    ],
    ids=["uniform in steps", "steps", "below", "above", "nan"],
)
@pytest.mark.parametrize("process", [ks.DiscreteProcess.linear(), ks.FlowProcess(), ks.EDMProcess()])
def test_times_outside_their_range_are_refused(process: Process, t: Tensor) -> None:
    objective = ks.Objective(process, ks.X0)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"t must be in \[0, 1\], .*, got .* to .*: pass drawn\.t"):
            objective(network, X0, t)
    assert objective(network, X0, torch.tensor([0.0, 1e-9, 0.5, 0.7, 1 - 1e-7, 1.0])).shape == (6,)


def test_what_was_drawn_in_place_of_its_times_is_refused() -> None:
    wrong: Any = ks.Uniform().sample(X0)
    with pytest.raises(ValueError, match=r"t must be a float .*\(6,\), got Timesteps: pass drawn\.t"):
        OBJECTIVE(network, X0, wrong)
    with pytest.raises(ValueError, match=r"got float: pass drawn\.t"):
        OBJECTIVE(network, X0, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x0 must be a tensor, .*got Timesteps: write objective\(model, x0, t\)"):
        OBJECTIVE(network, wrong, wrong.t)


def test_an_empty_batch_has_no_losses() -> None:
    assert OBJECTIVE(network, X0[:0], torch.rand(0)).shape == (0,)


def test_times_without_values_are_let_through() -> None:
    """Under torch's transforms, on the meta device, and compiled without a break of the graph."""
    t = torch.rand(6)
    each = torch.vmap(lambda x, t: OBJECTIVE(network, x[None], t[None]), randomness="different")
    assert each(X0, t).shape == (6, 1)
    slope = torch.func.grad(lambda scale: OBJECTIVE(lambda x, time: scale * x, X0, t).mean())(torch.ones(()))
    assert slope.shape == ()
    flow = ks.Objective(ks.FlowProcess(), ks.VELOCITY)
    with FakeTensorMode():
        assert flow(network, torch.randn(6, 4), torch.rand(6)).shape == (6,)
    assert make_fx(lambda x0, t: flow(network, x0, t), tracing_mode="symbolic")(X0, t) is not None
    assert flow(network, X0.to("meta"), t.to("meta")).shape == (6,)
    compiled = torch.compile(lambda x0, t: flow(network, x0, t), fullgraph=True, backend="eager")
    assert compiled(X0, t).shape == (6,)


@pytest.mark.gpu
def test_on_a_gpu_times_are_read_once() -> None:
    objective, x0 = ks.Objective(ks.FlowProcess(), ks.VELOCITY), X0.cuda()
    with pytest.raises(ValueError, match=r"t must be in \[0, 1\]"):
        objective(network, x0, torch.full((6,), 500.0, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert objective(network, x0, torch.rand(6, device="cuda")).shape == (6,)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    recorded, t = ks.Objective(ks.FlowProcess(), ks.VELOCITY), torch.rand(6, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        recorded(network, x0, t)
