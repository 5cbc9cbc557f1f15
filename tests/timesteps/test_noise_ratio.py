"""The accounting of gradient noise against its formula, and against gradients themselves (FORMULAS, section 15)."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kairostep as ks
from kairostep.timesteps.gradient_size import scale_gradients, squared_size, trained_parameters

MOMENTS = torch.tensor([4.0, 1.0, 0.25, 9.0], dtype=torch.float64)


def test_the_ratio_is_that_of_the_formula() -> None:
    q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    noise = sum(m / (16 * p) for m, p in zip(MOMENTS.tolist(), q.tolist(), strict=True))
    assert_close(ks.noise_ratio(q, MOMENTS), torch.tensor(noise / float(MOMENTS.mean()), dtype=torch.float64))
    assert_close(ks.noise_ratio(7 * q, 3 * MOMENTS), ks.noise_ratio(q, MOMENTS))  # units do not count
    assert float(ks.noise_ratio(torch.ones(4), MOMENTS)) == pytest.approx(1)


def test_no_density_has_less_noise_than_the_least() -> None:
    least = ks.least_noise_density(MOMENTS)
    assert_close(least.sum(), torch.tensor(1.0, dtype=torch.float64))
    bound = ks.noise_ratio(least, MOMENTS)
    assert_close(bound, MOMENTS.sqrt().mean() ** 2 / MOMENTS.mean())
    generator = torch.Generator().manual_seed(0)
    others = torch.rand(1000, 4, generator=generator, dtype=torch.float64) + 1e-3
    assert all(float(ks.noise_ratio(other, MOMENTS)) >= float(bound) - 1e-12 for other in others)


def test_a_density_of_other_bins_is_rebinned_and_bins_without_gradient_need_no_draws() -> None:
    fine = torch.tensor([1.0, 1.0, 3.0, 3.0])
    assert_close(ks.noise_ratio(fine, MOMENTS[:2]), ks.noise_ratio(torch.tensor([1.0, 3.0]), MOMENTS[:2]))
    assert float(ks.noise_ratio(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))) == pytest.approx(0.5)


@pytest.mark.parametrize("moments", [torch.tensor(1.0), torch.zeros(0), torch.ones(2, 3)])
def test_moments_of_another_shape_are_refused(moments: Tensor) -> None:
    with pytest.raises(ValueError, match="one value per bin"):
        ks.noise_ratio(torch.ones(3), moments)


@pytest.mark.parametrize("values", [[-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0], [0.0, 0.0]])
def test_values_that_no_moment_or_mass_can_have_are_refused(values: list[float]) -> None:
    wrong, right = torch.tensor(values), torch.ones(2)
    with pytest.raises(
        ValueError, match=r"moments must be finite, at least 0 and somewhere above it.*mean of each bin"
    ):
        ks.noise_ratio(right, wrong)
    with pytest.raises(ValueError, match="moments must be finite"):
        ks.least_noise_density(wrong)
    with pytest.raises(ValueError, match=r"density must be finite.*pass sampler.density\(\)"):
        ks.noise_ratio(wrong, right)


def test_what_is_no_tensor_is_refused_and_whole_numbers_are_taken() -> None:
    with pytest.raises(ValueError, match=r"density must be a tensor .* got RootLoss\(.*pass sampler.density\(\)"):
        ks.noise_ratio(ks.RootLoss(), MOMENTS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"moments must be a tensor .* got \[1, 2\]"):
        ks.least_noise_density([1, 2])  # type: ignore[arg-type]
    whole = torch.tensor([1, 2, 3, 4])
    assert_close(ks.noise_ratio(torch.ones(4, dtype=torch.int64), whole), torch.tensor(1.0))
    assert_close(ks.least_noise_density(whole), ks.least_noise_density(whole.float()))


def test_importance_weighted_gradients_have_the_predicted_noise() -> None:
    """Enumerate every draw of a four-bin problem: second moments of weighted gradients follow the formula."""
    gradients = torch.randn(4, 50, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)  # bin, row
    q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    weighted = gradients / (4 * q)[:, None, None]
    second = (q[:, None] / 50 * weighted.square().sum(2)).sum()
    uniform = gradients.square().sum(2).mean()
    assert_close(ks.noise_ratio(q, gradients.square().sum(2).mean(1)), second / uniform)
    mean = (q[:, None, None] / 50 * weighted).sum((0, 1))
    assert_close(mean, gradients.mean((0, 1)))  # the same objective


def problem(make: type[torch.optim.Optimizer], **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "eps": 1e-3}]
    optimizer = make(groups if make is not torch.optim.SGD else list(model.parameters()), lr=1e-2, **options)
    for _ in range(3):
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adams_metric_is_what_adam_divides_by(make: type[torch.optim.Optimizer], amsgrad: bool) -> None:
    model, optimizer = problem(make, amsgrad=amsgrad)
    gradients = torch.autograd.grad(model(torch.ones(1, 3)).sum(), list(model.parameters()))
    expected = {"plain": 0.0, "half": 0.0, "adam": 0.0}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = gradients[[p is parameter for p in model.parameters()].index(True)].double()
            state = optimizer.state[parameter]
            moment = state["max_exp_avg_sq" if amsgrad else "exp_avg_sq"].double()
            divisor = (moment / (1 - group["betas"][1] ** float(state["step"]))).sqrt() + group["eps"]
            expected["plain"] += float(gradient.square().sum())
            expected["half"] += float((gradient.square() / divisor).sum())
            expected["adam"] += float((gradient / divisor).square().sum())
    for metric, value in expected.items():
        assert float(squared_size(gradients, optimizer, metric)) == pytest.approx(value, rel=1e-5)  # type: ignore[arg-type]


def test_an_optimizer_without_second_moments_counts_plainly() -> None:
    model, optimizer = problem(torch.optim.SGD, momentum=0.9)
    gradients = torch.autograd.grad(model(torch.ones(1, 3)).sum(), list(model.parameters()))
    plain = sum(float(g.square().sum()) for g in gradients)
    assert float(squared_size(gradients, optimizer, "adam")) == pytest.approx(plain)
    fresh = torch.optim.Adam(model.parameters())  # has no state before its first step
    assert float(squared_size(gradients, fresh, "adam")) == pytest.approx(plain)


def size_by_hand(gradients: Sequence[Tensor], optimizer: torch.optim.Optimizer, steps: dict[Tensor, int]) -> float:
    """Return the squared size in Adam's metric, from the steps that each parameter took; of scale 1 without any."""
    total = 0.0
    for parameter, gradient in zip(trained_parameters(optimizer), gradients, strict=True):
        scaled = gradient.double()
        if parameter in steps:
            moment = optimizer.state[parameter]["exp_avg_sq"].double() / (1 - 0.999 ** steps[parameter])
            scaled = scaled / (moment.sqrt() + 1e-8)
        total += float(scaled.square().sum())
    return total


def test_a_layer_that_is_not_used_leaves_the_metric_of_the_others() -> None:
    """One parameter has no state yet, and one took fewer steps than the rest of the group."""
    torch.manual_seed(0)
    used, unused, late = nn.Linear(3, 2), nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    parameters = [*used.parameters(), *unused.parameters(), *late.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.randn(8, 3)
        (used(x) + (late(x) if step >= 3 else 0)).square().sum().backward()
        optimizer.step()
    gradients = [torch.ones_like(p) for p in parameters]
    steps = {used.weight: 5, used.bias: 5, late.weight: 2}
    assert float(squared_size(gradients, optimizer)) == pytest.approx(
        size_by_hand(gradients, optimizer, steps), rel=1e-5
    )
    scaled = scale_gradients(gradients, optimizer)
    assert_close(scaled[2], gradients[2])
    assert float(scaled[0].abs().min()) < 0.9


def test_steps_may_be_counted_in_the_group() -> None:
    model, optimizer = problem(torch.optim.Adam)
    gradients = torch.autograd.grad(model(torch.ones(1, 3)).sum(), list(model.parameters()))
    expected = squared_size(gradients, optimizer)
    for group in optimizer.param_groups:
        group["step"] = 3
        for parameter in group["params"]:
            del optimizer.state[parameter]["step"]
    assert_close(squared_size(gradients, optimizer), expected, rtol=0, atol=0)
    for group in optimizer.param_groups:  # without a count, v counts as it is
        del group["step"]
    assert float(squared_size(gradients, optimizer)) > 100 * float(expected)


def test_frozen_parameters_have_no_part() -> None:
    model, _ = problem(torch.optim.Adam)
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    trained = trained_parameters(optimizer)
    assert len(trained) == 3
    gradients = torch.autograd.grad(model(torch.ones(1, 3)).sum(), trained)
    assert [g.shape for g in scale_gradients(gradients, optimizer)] == [p.shape for p in trained]


def test_random_signs_give_the_size_of_single_gradients() -> None:
    gradients = torch.randn(4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    squares = [
        (torch.tensor(signs, dtype=torch.float64) @ gradients).square().sum()
        for signs in itertools.product((-1.0, 1.0), repeat=4)
    ]
    assert_close(torch.stack(squares).mean(), gradients.square().sum())


def test_an_optimizer_that_factors_its_second_moment_has_the_plain_metric() -> None:
    """Adafactor of transformers keeps that of vectors whole and that of matrices by rows and columns."""
    adafactor = pytest.importorskip("transformers.optimization").Adafactor
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = adafactor(model.parameters(), lr=1e-3, relative_step=False)
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    assert any("exp_avg_sq" in state for state in optimizer.state.values())
    gradients = torch.autograd.grad(model(torch.ones(1, 3)).sum(), trained_parameters(optimizer))
    expected = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert float(squared_size(gradients, optimizer)) == pytest.approx(expected, rel=1e-5)


def test_a_sampler_that_was_just_loaded_does_not_know_its_batch() -> None:
    trained, loaded = ks.RootLoss(warmup=0, refresh=1), ks.RootLoss()
    assert loaded.diagnostics()["equivalent_batch"].isnan()
    drawn = trained.sample(torch.zeros(64, 1))
    with trained.observe(torch.zeros(64, 1), drawn, drawn.t):
        pass
    loaded.load_state_dict(trained.state_dict())
    assert loaded.diagnostics()["noise_ratio"] == trained.diagnostics()["noise_ratio"]
    assert loaded.diagnostics()["equivalent_batch"].isnan()
    assert trained.diagnostics()["equivalent_batch"] > 64
