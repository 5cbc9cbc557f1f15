"""The learning samplers against independent implementations of their formulas."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kairostep as ks
from kairostep.diffusion.process import Process
from kairostep.timesteps.draw_table import DrawTable
from kairostep.timesteps.sampler import Timesteps


def show(sampler: ks.TimestepSampler, t: Tensor, losses: Tensor) -> None:
    with sampler.observe(torch.zeros(len(t), 1), Timesteps(t, torch.ones_like(t)), losses):
        pass


def test_loss_second_moment_follows_the_queues_of_its_last_losses() -> None:
    num_bins, history, floor = 20, 4, 0.01
    sampler = ks.LossSecondMoment(num_bins, history, floor)
    queues: list[list[float]] = [[] for _ in range(num_bins)]
    generator = torch.Generator().manual_seed(0)
    num_warm = 0
    for _ in range(30):
        t = torch.rand(16, generator=generator).square()  # crowds the first bins with more than a queue holds
        losses = torch.randn(16, generator=generator).exp() * (1 + t)
        show(sampler, t, losses)
        for index, loss in zip((t * num_bins).long().tolist(), losses.tolist(), strict=True):
            queues[index] = [*queues[index], loss][-history:]
        expected = np.full(num_bins, 1 / num_bins)
        if all(len(queue) == history for queue in queues):
            num_warm += 1
            root_mean_square = np.sqrt(np.mean(np.square(queues), axis=1))
            expected = (1 - floor) * root_mean_square / root_mean_square.sum() + floor / num_bins
        assert_close(sampler.density(num_bins), torch.tensor(expected, dtype=torch.float32))
    assert 5 < num_warm < 30


def test_loss_second_moment_weights_are_one_over_probability() -> None:
    sampler = ks.LossSecondMoment(10, history=1, floor=0.1)
    t = (torch.arange(10) + 0.5) / 10
    show(sampler, t, 1 + 9 * t)
    drawn = sampler.sample(torch.zeros(256, 1))
    assert_close(drawn.weight, 1 / (10 * sampler.density(10)[drawn.index(10)]))


@pytest.mark.parametrize(
    "process",
    [ks.EDMProcess(), ks.DiscreteProcess.linear(), ks.DiscreteProcess.cosine(), ks.FlowProcess()],
    ids=["edm", "linear", "cosine", "flow"],
)
def test_info_noise_follows_the_gated_entropy_rate(process: Process) -> None:
    """Gaussian data of variance v: the least error of x0 at relative noise s is v s^2 / (v + s^2)."""
    v, num_bins = 0.25, 40
    sampler = ks.InfoNoise(process, torch.ones_like, num_bins=num_bins, warmup=1, refresh=1, floor=0.1)
    t = (torch.arange(num_bins, dtype=torch.float64) + 0.5) / num_bins
    sigma = process.sigma(t) / process.alpha(t)
    error = v * sigma**2 / (v + sigma**2)
    for _ in range(3):
        show(sampler, t.float(), error.float())
    s, e = sigma.numpy(), error.numpy()
    padded = np.log(np.concatenate([e[:1], e, e[-1:]]))
    smooth = np.exp((padded[:-2] + padded[1:-1] + padded[2:]) / 3)
    rate = smooth / s**3  # per sigma
    onset = s[rate >= 0.002 * rate.max()].max()
    gated = rate * s * s**3 / (s**3 + onset**3) * np.gradient(np.log(s))  # in each bin, by its width in log sigma
    expected = 0.9 * gated / gated.sum() + 0.1 / num_bins
    assert_close(sampler.density(num_bins).double(), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_info_noise_reads_the_same_rate_whatever_the_loss_weights() -> None:
    """Density times weight on x0 is the rate itself, up to a constant."""
    process = ks.EDMProcess(sigma_min=0.1, sigma_max=10.0)
    t = (torch.arange(50, dtype=torch.float64) + 0.5) / 50
    products = []
    for objective in (
        ks.Objective(process),
        ks.Objective(process, ks.V),
        ks.Objective(process, ks.X0, ks.min_snr()),
        ks.Objective(process, ks.EPSILON, ks.p2()),
    ):
        sampler = ks.InfoNoise(process, objective.x0_weight, num_bins=50, warmup=1, refresh=1, floor=1e-6)
        weight = objective.x0_weight(t)
        show(sampler, t, weight * (0.01 + t))
        product = (sampler.mass() - 1e-6 / 50) * weight
        products.append(product / product.sum())
    for product in products[1:]:
        assert_close(product, products[0], rtol=1e-4, atol=1e-6)


def test_info_noise_beside_an_infinite_end_has_the_width_of_its_finite_side() -> None:
    process = ks.DiscreteProcess.linear(10, 1e-3, 0.2).with_zero_terminal_snr()
    sampler = ks.InfoNoise(process, torch.ones_like)
    log_sigma = -process.log_snr((torch.arange(10, dtype=torch.float64) + 0.5) / 10) / 2
    assert bool(log_sigma[-1].isinf())
    steps = log_sigma[:-1].diff()
    assert_close(sampler.log_width[-2:].double().exp(), steps[-1:].expand(2), rtol=1e-5, atol=0)
    assert_close(sampler.log_width[1:-2].double().exp(), (steps[1:] + steps[:-1]) / 2, rtol=1e-5, atol=0)


def test_info_noise_refuses_what_has_no_rate() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)log-SNR must be within 20.0 of 0 at two neighbouring bins, got .*process"
    ):
        ks.InfoNoise(ks.EDMProcess(sigma_min=1e-9, sigma_max=1e-6))
    with pytest.raises(ValueError, match="loss_weight must be positive and finite at every bin, got"):
        ks.InfoNoise(ks.EDMProcess(), lambda t: (t > 0.5).to(t.dtype))


def test_a_mass_that_is_not_finite_leaves_the_table_as_it_was() -> None:
    table = DrawTable(2, beta=1.0)
    table.set(torch.tensor([1.0, 3.0]))
    table.set(torch.tensor([float("nan"), 1.0]))
    assert_close(table.mass(), torch.tensor([0.25, 0.75]))


def test_info_noise_averages_by_its_decay_per_loss() -> None:
    sampler = ks.InfoNoise(ks.EDMProcess(), torch.ones_like, num_bins=2, decay=0.9)
    show(sampler, torch.tensor([0.1, 0.2, 0.8]), torch.tensor([1.0, 3.0, 5.0]))
    assert_close(sampler.errors.read(), torch.tensor([2.0, 5.0]))  # the first losses stand alone
    show(sampler, torch.tensor([0.1, 0.2]), torch.tensor([4.0, 6.0]))
    together = (0.81 * 0.19 * 2 + 0.19 * 5) / (1 - 0.81 * 0.81)
    assert_close(sampler.errors.read(), torch.tensor([together, 5.0]))


@pytest.mark.parametrize("rows_per_gradient", [1, 4])
def test_gradient_variance_is_the_trace_of_the_covariance_of_row_gradients(rows_per_gradient: int) -> None:
    """A linear model's row gradients are known; the estimate from pairs of groups has the same expectation."""
    torch.manual_seed(0)
    model, x0 = nn.Linear(3, 1, bias=False), torch.randn(4003, 3)  # the last rows fill no pair
    sampler = ks.GradientVariance(model.parameters(), num_bins=2, every=1, rows_per_gradient=rows_per_gradient)

    def loss_at(rows: Tensor, t: Tensor) -> Tensor:
        return model(x0[rows])[:, 0] * (1 + 2 * t)

    for _ in range(2):
        drawn = sampler.sample(x0)
        with sampler.observe(x0, drawn, torch.zeros(4003), loss_at):
            pass
    used = 4002 if rows_per_gradient == 1 else 4000
    groups = x0[:used].view(-1, 2, rows_per_gradient, 3).mean(2)  # (pairs, 2, 3)
    between = (groups[:, 0] - groups[:, 1]).square().sum(1).mean() * rows_per_gradient / 2
    assert_close(sampler.variance, torch.stack([between * scale**2 for scale in (1.5, 2.5)]), rtol=1e-5, atol=0)
    assert_close(sampler.variance, torch.stack([(x0 * scale).var(0).sum() for scale in (1.5, 2.5)]), rtol=0.1, atol=0)
    assert_close(sampler.density(2), torch.tensor([2.25, 6.25]) / 8.5, rtol=1e-5, atol=0)
    assert int(sampler.diagnostics()["probe_evaluations"]) == 2 * used
    assert model.weight.grad is None


def test_gradient_variance_needs_a_differentiable_loss() -> None:
    model, x0 = nn.Linear(3, 1), torch.randn(8, 3)
    sampler = ks.GradientVariance(model.parameters())
    drawn = sampler.sample(x0)
    with (
        pytest.raises(ValueError, match="differentiable loss_at"),
        sampler.observe(x0, drawn, torch.zeros(8), lambda rows, t: model(x0[rows])[:, 0].detach()),
    ):
        pass


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ks.LossSecondMoment(num_bins=0), "num_bins must be a whole number of at least 1, got 0"),
        (lambda: ks.LossSecondMoment(history=0), "history must be a whole number of at least 1, got 0"),
        (lambda: ks.LossSecondMoment(floor=0.0), r"floor must be a share in \(0, 1\], got 0"),
        (lambda: ks.LossSecondMoment(floor=1.5), r"floor must be a share in \(0, 1\], got 1.5"),
        (lambda: ks.InfoNoise(ks.FlowProcess(), decay=1.0), r"decay must be in \[0, 1\), got 1.0"),
        (lambda: ks.InfoNoise(ks.FlowProcess(), floor=-0.1), "floor must be a share"),
        (lambda: ks.InfoNoise(ks.FlowProcess(), num_bins=1), "num_bins must be a whole number of at least 2, got 1"),
        (lambda: ks.GradientVariance([]), r"pass model\.parameters\(\)"),
        (lambda: ks.GradientVariance(nn.Linear(1, 1).parameters(), every=0), "every must be a whole number"),
        (lambda: ks.Uniform(seed=-1), r"seed must be a whole number in \[0, 2\*\*63\), got -1"),
    ],
)
def test_wrong_arguments_are_refused_with_rule_and_value(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]


def learned_by_losses(num_bins: int) -> ks.TimestepSampler:
    """Return a sampler that has left the uniform density."""
    sampler = ks.LossSecondMoment(num_bins, history=2, floor=0.01, seed=3)
    t = ((torch.arange(2 * num_bins) + 0.5) / (2 * num_bins)).float()
    show(sampler, t, 0.2 + t.square())
    return sampler


def learned_by_gradients(num_bins: int) -> ks.TimestepSampler:
    """Return a sampler that has measured every bin, one of them without any variance."""
    model, x0 = nn.Linear(3, 1, bias=False), torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    sampler = ks.GradientVariance(model.parameters(), num_bins=num_bins, every=1, seed=3)
    for _ in range(num_bins):
        drawn = sampler.sample(x0)
        with sampler.observe(x0, drawn, torch.zeros(64), lambda rows, t: model(x0[rows])[:, 0] * (t > 1 / num_bins)):
            pass
    return sampler


LEARNED = {"loss_second_moment": learned_by_losses, "gradient_variance": learned_by_gradients}


@pytest.mark.parametrize("name", LEARNED)
def test_draws_from_the_table_are_those_of_the_inverse_cdf(name: str) -> None:
    """The table draws what the inverse of the cumulative mass gives in float64, empty bins included."""
    sampler = LEARNED[name](8)
    mass = sampler.learned_mass().double()  # type: ignore[operator]
    u = sampler.draws(torch.zeros(4096, 1))  # type: ignore[operator]
    sampler.draws.step -= 1  # type: ignore[operator]
    drawn = sampler.sample(torch.zeros(4096, 1))
    cdf = np.concatenate([[0.0], mass.cumsum(0).numpy()])
    expected = np.interp(u.double().numpy(), cdf / cdf[-1], np.linspace(0, 1, 9))
    assert_close(drawn.t.double(), torch.tensor(expected), rtol=0, atol=2e-6)
    assert_close(sampler.density(8).double(), mass, rtol=1e-6, atol=1e-8)
    weight = 1 / (8 * mass[drawn.index(8)]) if name == "loss_second_moment" else torch.ones(4096).double()
    assert float(((drawn.weight.double() - weight).abs() < 1e-5 * weight).double().mean()) > 0.999  # but for edges


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a curriculum"])
def test_states_from_before_the_table_go_on_where_they_stood(name: str, nested: bool) -> None:
    def build(own: ks.TimestepSampler) -> ks.TimestepSampler:
        return ks.Curriculum(ks.Uniform(), own, start=0, end=0) if nested else own

    saved = build(LEARNED[name](8))
    state = {key: value for key, value in saved.state_dict().items() if not key.endswith("table.rows")}
    if name == "loss_second_moment":  # which counted no steps
        state = {key: value for key, value in state.items() if not key.endswith("steps._extra_state")}
    parameters = [nn.Parameter(torch.zeros(3))]
    fresh = {
        "loss_second_moment": ks.LossSecondMoment(8, history=2, floor=0.01),
        "gradient_variance": ks.GradientVariance(parameters, num_bins=8, every=1),
    }
    resumed = build(fresh[name])
    num_before = len(state)
    resumed.load_state_dict(state)
    assert len(state) == num_before  # the caller's own
    for step in range(3):
        x0 = torch.zeros(64, 1)
        then, now = saved.sample(x0), resumed.sample(x0)
        assert torch.equal(then.t, now.t), step
        assert torch.equal(then.weight, now.weight), step
    assert float((resumed.density(8) - 1 / 8).abs().max()) > 0.01


def test_a_state_without_what_was_learned_is_refused() -> None:
    state = {key: value for key, value in learned_by_losses(8).state_dict().items() if "losses" not in key}
    del state["table.rows"]
    with pytest.raises(RuntimeError, match="Missing key"):
        ks.LossSecondMoment(8, history=2).load_state_dict(state)


def test_an_empty_bin_is_never_drawn_from() -> None:
    table = DrawTable(4, beta=0.0)
    table.set(torch.tensor([0.0, 1.0, 0.0, 3.0]))
    drawn = table.draw(torch.linspace(2**-25, 1 - 2**-24, 10_001))
    assert_close(table.mass(), torch.tensor([0.0, 0.25, 0.0, 0.75]))
    in_second, in_fourth = ((drawn.t >= low) & (drawn.t <= low + 0.25) for low in (0.25, 0.75))
    assert bool((in_second | in_fourth).all())
    assert_close(drawn.weight, torch.ones(10_001))
