"""Mixed precision within a network's forward: what accelerate's own would give, in copies of the network too."""

import copy
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs
from accelerators import forget_accelerators
from torch import Tensor, nn

from kairostep.training.precision import prepare_model

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """A product of matrices, which autocast lowers, and the precision that it had."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.precisions: list[torch.dtype] = []

    def forward(self, x: Tensor, time: Tensor | None = None) -> tuple[Tensor]:
        """Return the product."""
        product = self.linear(x)
        self.precisions.append(product.dtype)
        return (product,)


@pytest.fixture(autouse=True)
def _any_precision() -> Iterator[None]:
    forget_accelerators()
    yield
    forget_accelerators()


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_network_computes_as_accelerate_has_it(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    ours, theirs = prepare_model(Network(), accelerator), accelerator.prepare(Network())
    (found,), (expected,) = ours(X), theirs(X, time=None)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert ours.precisions == theirs.precisions
    (again,) = ours.forward(X)  # as probes call it
    assert torch.equal(again, expected)


def test_a_copy_computes_with_its_own_weights() -> None:
    network = prepare_model(Network(), Accelerator(cpu=True, mixed_precision="bf16"))
    other = copy.deepcopy(network)
    nn.init.zeros_(other.linear.weight)
    nn.init.zeros_(other.linear.bias)
    assert other(X)[0].count_nonzero() == 0
    assert network(X)[0].count_nonzero()


def test_autocast_is_as_the_accelerator_asks() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    network = prepare_model(Network(), accelerator)
    network(X)
    assert network.precisions == [torch.float32]


def test_accelerate_takes_its_wrapper_off_as_ever() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    network = accelerator.unwrap_model(prepare_model(Network(), accelerator), keep_fp32_wrapper=False)
    assert network(X)[0].dtype == torch.float32
    assert network.precisions == [torch.float32]


@pytest.mark.parametrize("by_accelerate", [False, True])
def test_what_was_prepared_before_is_left_as_it_is(by_accelerate: bool) -> None:
    accelerator, network = Accelerator(cpu=True, mixed_precision="bf16"), Network()
    accelerator.prepare(network) if by_accelerate else prepare_model(network, accelerator)
    inner, calls = network.forward, []

    def counted(self: Network, x: Tensor) -> tuple[Tensor]:
        calls.append(self)
        return inner(x)

    network.forward = before = MethodType(counted, network)  # what a user did to it since
    assert prepare_model(network, accelerator) is network
    assert network.forward is before
    network(X)
    assert calls == [network]
    assert network.precisions == [torch.bfloat16]


def test_compiled_code_is_what_it_was_with_accelerates_own() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    calls: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        calls.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    for prepare in (prepare_model, lambda model, accelerator: accelerator.prepare(model)):
        torch._dynamo.reset()
        network = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8))
        prepare(network, accelerator)
        network.compile(backend=keep)
        network(X).sum().backward()
    ours, theirs = calls
    assert ours == theirs
    assert len(ours) > 4


def test_a_forward_that_is_no_method_is_left_to_accelerate() -> None:
    network: Any = Network()
    network.forward = lambda x: Network.forward(network, x)
    assert prepare_model(network, Accelerator(cpu=True, mixed_precision="bf16"))(X)[0].dtype == torch.float32
    assert network.precisions == [torch.bfloat16]
