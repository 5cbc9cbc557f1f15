"""The beta policies: distributions against scipy, shapes, bounds, and Adam against torch's own."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

import kairostep as ks
from kairostep.timesteps.policy import MAX_CONCENTRATION, Beta, concentrations
from kairostep.timesteps.reinforce import PolicyOptimizer

PAIRS = [(1.0, 1.0), (0.5, 0.5), (2.0, 5.0), (50.0, 50.0), (0.3, 3.0), (1.0, 50.0), (0.02, 0.02), (50.0, 0.02)]
every_pair = pytest.mark.parametrize(("a", "b"), PAIRS)


def beta(a: float, b: float, num_rows: int) -> Beta:
    return Beta(torch.full((num_rows,), a), torch.full((num_rows,), b))


@every_pair
def test_log_prob_and_entropy_are_those_of_the_beta_distribution(a: float, b: float) -> None:
    u = torch.linspace(0.01, 0.99, 50)
    assert_close(
        beta(a, b, 50).log_prob(u).double(),
        torch.tensor(stats.beta.logpdf(u.double().numpy(), a, b)),
        rtol=1e-4,
        atol=1e-4,
    )
    assert_close(beta(a, b, 1).entropy()[0].double(), torch.tensor(stats.beta.entropy(a, b)), rtol=1e-4, atol=1e-4)


@every_pair
def test_quantile_inverts_the_cdf(a: float, b: float) -> None:
    v = torch.linspace(0.001, 0.999, 999)
    u = beta(a, b, 999).quantile(v).double().numpy()
    inside = (u > 1e-6) & (u < 1 - 1e-6)  # beyond, float32 has no more numbers
    error = np.abs(stats.beta.cdf(u, a, b) - v.numpy())[inside]
    assert error.max(initial=0) < (2e-4 if min(a, b) >= 0.3 else 5e-3)


@every_pair
def test_cdf_is_that_of_the_beta_distribution(a: float, b: float) -> None:
    u = torch.linspace(0.01, 0.99, 99)
    expected = torch.tensor(stats.beta.cdf(u.double().numpy(), a, b))
    assert_close(beta(a, b, 1).cdf(u)[0].double(), expected, rtol=0, atol=2e-4 if min(a, b) >= 0.3 else 5e-3)


@pytest.mark.parametrize(
    "shape", [(4,), (1,), (3, 16), (2, 100), (3, 32, 32), (1, 8, 8), (4, 64, 48), (3, 5, 7), (2, 4, 8, 8)]
)
def test_a_policy_is_uniform_at_first_for_x0_of_any_shape(shape: tuple[int, ...]) -> None:
    policy = ks.BetaPolicy.for_input(shape)
    x0 = torch.randn(5, *shape)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        distribution = policy(x0.to(dtype))
        assert_close(distribution.a, torch.ones(5))
        assert_close(distribution.b, torch.ones(5))
    nn.init.normal_(policy.out.weight)
    assert float(policy(x0).a.detach().std()) > 0


def test_the_network_is_that_of_the_paper_for_cifar() -> None:
    policy = ks.BetaPolicy.for_input((3, 32, 32), hidden=128, depth=2)
    widths = [layer.out_features for layer in policy.modules() if isinstance(layer, nn.Linear)]
    channels = [layer.out_channels for layer in policy.modules() if isinstance(layer, nn.Conv2d)]
    assert widths == [128, 128, 2]
    assert channels == [32, 64, 128]
    assert policy.hidden[0].in_features == 2048


def test_a_rate_per_input_moves_the_output_of_a_layer_by_about_the_rate() -> None:
    policy = ks.BetaPolicy.for_input((3, 32, 32))
    optimizer = PolicyOptimizer(policy, 1e-2, per_input=True)
    x0 = torch.randn(64, 3, 32, 32)
    before = policy.features(x0).detach()
    optimizer.step(policy, torch.randn(len(optimizer.rates)), torch.tensor(True))
    assert float((policy.features(x0) - before).detach().abs().mean()) < 0.05
    assert float(policy(x0).a.detach().log().abs().max()) < 0.05


def test_building_a_policy_leaves_every_generator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset_all_devices(seed: int) -> None:
        raise AssertionError("torch.manual_seed resets the generators of all devices")

    monkeypatch.setattr(torch, "manual_seed", reset_all_devices)
    state = torch.get_rng_state()
    ks.BetaPolicy.for_input((3, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_depend_on_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first = parameters_to_vector(ks.BetaPolicy.for_input((3, 8, 8)).parameters())
    torch.manual_seed(99)
    assert torch.equal(first, parameters_to_vector(ks.BetaPolicy.for_input((3, 8, 8)).parameters()))
    assert not torch.equal(first, parameters_to_vector(ks.BetaPolicy.for_input((3, 8, 8), seed=1).parameters()))
    torch.set_rng_state(state)


def test_autocast_leaves_the_policy_in_full_precision() -> None:
    policy = ks.BetaPolicy.for_input((4,))
    with torch.autocast("cpu", torch.bfloat16):
        assert policy(torch.randn(3, 4)).a.dtype == torch.float32


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ks.BetaPolicy.for_input(()), r"shape must be \(D,\)"),
        (lambda: ks.BetaPolicy.for_input((3, 0)), r"got \(3, 0\)"),
        (lambda: ks.BetaPolicy.for_input((3,), hidden=0), "hidden must be a whole number"),
        (
            lambda: ks.BetaPolicy.for_input((3, 8, 8))(torch.zeros(2, 3, 16, 16)),
            r"\(B, 3, 8, 8\), got \(2, 3, 16, 16\): build it with BetaPolicy.for_input\(\(3, 16, 16\)\)",
        ),
    ],
)
def test_shapes_that_disagree_are_refused(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]


def test_concentrations_are_bounded_and_keep_a_slope() -> None:
    output = torch.tensor([[-1e6, 1e6], [0.0, 0.0], [-100.0, 100.0]], requires_grad=True)
    distribution = concentrations(output)
    for values in (distribution.a, distribution.b):
        assert float(values.detach().max()) <= MAX_CONCENTRATION * 1.001
        assert float(values.detach().min()) >= 0.999 / MAX_CONCENTRATION
    distribution.a.log()[2].backward()
    assert float(output.grad[2, 0]) > 1e-6  # type: ignore[index]


def test_the_optimizer_is_adam_with_clipping() -> None:
    ours, theirs = (ks.BetaPolicy.for_input((4,), hidden=8) for _ in range(2))
    optimizer = PolicyOptimizer(ours, 1e-2, per_input=False)
    adam = torch.optim.Adam(theirs.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        gradients = [torch.randn(p.shape, generator=generator) * 10 ** (step % 3 - 2) for p in theirs.parameters()]
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adam.step()
        stepped = optimizer.step(ours, torch.cat([g.flatten() for g in gradients]), torch.tensor(True))
        assert bool(stepped)
    assert_close(
        parameters_to_vector(ours.parameters()), parameters_to_vector(theirs.parameters()), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_optimizer_skips_a_gradient_that_is_not_finite(bad: float) -> None:
    policy = ks.ConstantBeta()
    optimizer = PolicyOptimizer(policy, 1e-2, per_input=False)
    optimizer.step(policy, torch.ones(2), torch.tensor(True))
    before, state = policy.output.detach().clone(), {k: v.clone() for k, v in optimizer.state_dict().items()}
    assert not bool(optimizer.step(policy, torch.tensor([1.0, bad]), torch.tensor(True)))
    assert torch.equal(policy.output, before)
    assert all(torch.equal(state[key], value) for key, value in optimizer.state_dict().items())
