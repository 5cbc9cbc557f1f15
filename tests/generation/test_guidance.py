"""Classes and guidance, and random numbers that nobody else sees."""

from typing import Any

import pytest
import torch
from small_network import IMAGES, network, our_noise
from torch import Tensor
from torch.testing import assert_close

from kairostep.diffusion import EPSILON, DiscreteProcess
from kairostep.generation import generate, network_evaluations


@pytest.mark.parametrize("solver", ["ddpm", "ddim", "heun"])
def test_guidance_is_null_plus_so_much_of_the_difference(solver: str) -> None:
    model, labels, process = network(num_classes=3), torch.tensor([0, 2]), DiscreteProcess.linear()
    options: dict[str, Any] = {"solver": solver, "steps": 3, "step_noise": our_noise}

    def by_hand(x: Tensor, time: Tensor) -> Tensor:
        null, conditional = (model(x, time, class_labels=which).sample for which in (torch.full((2,), 3), labels))
        return null + 2.5 * (conditional - null)

    guided = generate(model, process, EPSILON, our_noise(0), labels=labels, guidance=2.5, null_label=3, **options)
    assert_close(guided, generate(by_hand, process, EPSILON, our_noise(0), **options), rtol=1e-3, atol=1e-3)
    plain = generate(model, process, EPSILON, our_noise(0), labels=labels, **options)
    assert not torch.allclose(guided, plain)
    assert (network_evaluations("ddim", 3), network_evaluations("ddim", 3, 2.5)) == (3, 6)


def test_without_guidance_the_batch_is_not_doubled() -> None:
    seen = []

    def model(x: Tensor, time: Tensor, class_labels: Tensor) -> Tensor:
        seen.append((len(x), class_labels.tolist()))
        return torch.zeros_like(x)

    generate(model, DiscreteProcess.linear(), EPSILON, our_noise(0), steps=2, labels=IMAGES, null_label=3)
    assert seen == [(2, [0, 1])] * 2


@pytest.mark.parametrize("solver", ["ddpm", "ddim", "heun"])
def test_the_global_stream_is_left_alone(solver: str) -> None:
    model, before = network(), torch.get_rng_state()
    generate(model, DiscreteProcess.linear(), EPSILON, our_noise(0), solver=solver, steps=3, step_noise=our_noise)
    assert torch.equal(torch.get_rng_state(), before)
