"""Draws by the size of single gradients in the optimizer's metric."""

import copy
import warnings

import pytest
import torch
from problem import Problem, data
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import kairostep as ks
from kairostep.timesteps.gradient_size import gradients_of
from kairostep.timesteps.least_noise import SWEEP, probe_number, signed_gradient
from kairostep.timesteps.sampler import draw

NUM_WEIGHTS = 48  # gradients of different rows are nearly orthogonal, as those of networks are


class ScaledRegression:
    """Losses scale(t) r**2 of one parameter vector that stays where it is: gradients go with scale(t)**2 r**2."""

    def __init__(self, num_rows: int = 64) -> None:
        self.weights = torch.zeros(NUM_WEIGHTS, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weights], lr=0.0)
        self.generator = torch.Generator().manual_seed(0)
        self.num_rows, self.num_asked = num_rows, 0

    def train(self, sampler: ks.TimestepSampler, num_steps: int) -> None:
        """Take steps that change nothing."""
        for _ in range(num_steps):
            x = torch.randn(self.num_rows, NUM_WEIGHTS + 1, generator=self.generator)
            drawn = sampler.sample(x)

            def loss_at(rows: Tensor, t: Tensor, x: Tensor = x) -> Tensor:
                self.num_asked += len(rows)
                return self.scale(t) * (x[rows, :-1] @ self.weights - x[rows, -1]).square()

            with sampler.observe(x, drawn, loss_at(torch.arange(len(x)), drawn.t).detach(), loss_at):
                self.optimizer.step()

    def scale(self, t: Tensor) -> Tensor:
        """Return the factor of the loss."""
        return 0.2 + 3 * t.square()

    def least(self, num_bins: int = 20) -> Tensor:
        """Return the density of least noise."""
        t = (torch.arange(100 * num_bins) + 0.5) / (100 * num_bins)
        return ks.least_noise_density(self.scale(t).square().view(num_bins, 100).mean(1))


def test_the_density_approaches_the_one_of_least_noise() -> None:
    problem = ScaledRegression()
    sampler, root_loss = (make() for make in (lambda: ks.LeastNoise(problem.optimizer), ks.RootLoss))
    problem.train(sampler, 3000)
    ScaledRegression().train(root_loss, 3000)
    moments = problem.least().square()
    noise = {name: float(ks.noise_ratio(s.density(20), moments)) for name, s in (("own", sampler), ("root", root_loss))}
    least = float(ks.noise_ratio(problem.least(), moments))
    assert noise["own"] < least + 0.3 * (noise["root"] - least), (noise, least)
    assert float(sampler.diagnostics()["noise_ratio"]) == pytest.approx(noise["own"], abs=0.05)


def test_without_probes_it_draws_as_root_loss_does() -> None:
    problem, other = ScaledRegression(), ScaledRegression()
    sampler, root_loss = ks.LeastNoise(problem.optimizer, gate=0.95), ks.RootLoss()
    problem.train(sampler, 40)  # probes begin after the warm-up
    other.train(root_loss, 40)
    assert_close(sampler.density(), root_loss.density())


def test_it_asks_for_few_losses() -> None:
    due = [step for step in range(100_000) if probe_number(step, 40) is not None]
    assert due[: 3 * SWEEP] == [*range(160, 170), *range(1600, 1610), *range(3200, 3210)]
    assert [probe_number(step, 40) for step in due] == list(range(len(due)))
    cost = 0.38  # of a training step, measured: results/learning_cost
    assert all(cost * (number + 1) <= 0.005 * (step + 1) for number, step in enumerate(due[SWEEP:], SWEEP))
    assert cost * SWEEP <= 0.005 * 1000
    bins = [ks.LeastNoise().probed_bin(number) for number in range(2 * SWEEP)]
    assert sorted(bins) == list(range(20))  # two sweeps have every bin
    problem = ScaledRegression()
    sampler = ks.LeastNoise(problem.optimizer)
    problem.train(sampler, 200)
    assert problem.num_asked - 200 * 64 == int(sampler.diagnostics()["probe_evaluations"]) == 16 * 10


def test_probes_leave_training_as_it_is() -> None:
    """Two runs, one probing and one not, with the density held uniform: the same weights to the last bit."""
    problems = [Problem(), Problem()]
    samplers = [
        ks.LeastNoise(problems[0].optimizer, gate=0.0, warmup=10),
        ks.LeastNoise(problems[1].optimizer, gate=0.0, warmup=90),
    ]
    for problem, sampler in zip(problems, samplers, strict=True):
        torch.manual_seed(0)
        for step in range(80):
            problem.step(sampler, torch.randn(16, 4, generator=torch.Generator().manual_seed(step)))
    assert problems[0].num_rows > problems[1].num_rows
    for one, other in zip(problems[0].model.parameters(), problems[1].model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_resumed_in_the_middle_of_a_sweep_continues_bitwise() -> None:
    """Weights, optimizer and sampler from step 23 on, of a sweep from step 16 to 25, in Adam's metric."""

    def train(problem: Problem, sampler: ks.TimestepSampler, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            problem.step(sampler, data(step))

    problem, resumed = Problem(), Problem(seed=1)
    made = [
        ks.LeastNoise(own.optimizer, warmup=4, refresh=2, gate=1.0, seed=seed)
        for seed, own in enumerate((problem, resumed))
    ]
    train(problem, made[0], range(23))
    assert int(made[0].num_probes) == 7 * 16
    states = [copy.deepcopy(own.state_dict()) for own in (problem.model, problem.optimizer, made[0])]
    for own, state in zip((resumed.model, resumed.optimizer, made[1]), states, strict=True):
        own.load_state_dict(state)
    for own, sampler in zip((problem, resumed), made, strict=True):
        train(own, sampler, range(23, 45))
        assert int(sampler.num_probes) == 10 * 16
    assert float((made[0].correction() - 1).abs().max()) > 0.01
    for one, other in ((problem.model, resumed.model), (made[0], made[1])):
        state, other_state = one.state_dict(), other.state_dict()
        assert all(torch.equal(state[key], other_state[key]) for key in state)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e38, 1.5e19])
def test_a_probe_that_is_not_finite_is_skipped_and_counted(bad: float) -> None:
    problem = ScaledRegression()
    sampler = ks.LeastNoise(problem.optimizer)
    problem.train(sampler, 200)
    before = sampler.correction()
    probed = sampler.probe(torch.zeros(8, 1), lambda rows, t: problem.weights.sum() * torch.full_like(t, bad), 3)
    sampler.record_probe(3, probed)
    assert int(sampler.diagnostics()["skipped_probes"]) == 1
    assert bool(sampler.correction().isfinite().all())
    assert_close(sampler.correction(), before, rtol=0.5, atol=0)


def test_the_optimizer_has_to_be_named_also_to_a_copy() -> None:
    problem = ScaledRegression()
    with pytest.raises(ValueError, match="must know the optimizer, got none"):
        problem.train(ks.LeastNoise(warmup=10), 100)
    sampler = ks.LeastNoise(problem.optimizer, warmup=10)
    problem.train(sampler, 30)
    copied = copy.deepcopy(sampler)
    with pytest.raises(ValueError, match="also on a copy"):
        problem.train(copied, 60)
    copied.set_optimizer(problem.optimizer)
    problem.train(copied, 60)


def test_losses_without_a_graph_are_refused() -> None:
    problem = ScaledRegression()
    sampler = ks.LeastNoise(problem.optimizer)
    with pytest.raises(ValueError, match="differentiable loss_at"):
        sampler.probe(torch.zeros(4, 1), lambda rows, t: t, 1)


@pytest.mark.parametrize("layer_before", [True, False])  # without it, torch gives the layer inside no gradient
@pytest.mark.parametrize("probe", ["least_noise", "its gradient on several ranks", "gradient_variance"])
def test_a_probe_needs_gradient_checkpointing_without_reentry(probe: str, layer_before: bool) -> None:
    before = torch.nn.Linear(4, 4) if layer_before else torch.nn.Identity()
    inside, after = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(before, inside, after)
    optimizer, x0 = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16, 4)

    def run(*, use_reentrant: bool) -> None:
        def loss_at(rows: Tensor, t: Tensor) -> Tensor:
            hidden = checkpoint(inside, before(x0[rows].requires_grad_()), use_reentrant=use_reentrant)
            predicted: Tensor = after(hidden)
            return predicted.square().mean(1)

        if probe == "least_noise":
            ks.LeastNoise(optimizer).probe(x0, loss_at, 0)
        elif probe == "gradient_variance":
            ks.GradientVariance(model.parameters(), rows_per_gradient=4).measure(0, x0, loss_at)
        else:
            signed_gradient(loss_at, optimizer, torch.arange(4), torch.rand(4), torch.ones(4))

    run(use_reentrant=False)
    with pytest.raises(ValueError, match=r"needs gradient checkpointing with use_reentrant=False, got True: pass"):
        run(use_reentrant=True)


def test_other_errors_of_autograd_are_shown_as_they_are() -> None:
    parameter, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    loss = parameter.square().sum()
    assert_close(gradients_of(loss, [parameter, unused]), (torch.full((2,), 2.0), torch.zeros(3)))
    with pytest.raises(RuntimeError, match="second time"):
        gradients_of(loss, [parameter])


def test_root_loss_tells_what_it_saves() -> None:
    sampler = ks.RootLoss(num_bins=4, warmup=2, refresh=1, floor=0.1)
    x = torch.zeros(8, 1)
    t = (torch.arange(8) + 0.5) / 8
    losses = torch.tensor([16.0, 16.0, 4.0, 4.0, 1.0, 1.0, 1.0, 1.0])
    with sampler.observe(x, ks.Timesteps(t, torch.ones(8)), losses):
        pass
    told = sampler.diagnostics()
    assert float(told["noise_ratio"]) == pytest.approx(1)
    assert float(told["equivalent_batch"]) == pytest.approx(8)
    assert float(told["gate"]) == 0
    for _ in range(3):
        with sampler.observe(x, ks.Timesteps(t, torch.ones(8)), losses):
            pass
    told = sampler.diagnostics()
    q = 0.9 * torch.tensor([4.0, 2.0, 1.0, 1.0]) / 8 + 0.1 / 4
    expected = float((torch.tensor([16.0, 4.0, 1.0, 1.0]) / q).sum() / (4 * 22))
    assert float(told["noise_ratio"]) == pytest.approx(expected, rel=1e-5)
    assert float(told["equivalent_batch"]) == pytest.approx(8 / expected, rel=1e-5)
    assert float(told["gate"]) == 1


@pytest.mark.parametrize("wrong", ["adam", torch.nn.Linear(2, 2), 3])
def test_what_is_no_optimizer_is_refused_at_once(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"optimizer must be a torch.optim.Optimizer, got .*LeastNoise\(optimizer\)"):
        ks.LeastNoise(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"optimizer must be a torch.optim.Optimizer"):
        ks.LeastNoise().set_optimizer(wrong)  # type: ignore[arg-type]


def test_draws_by_what_it_learned_keep_every_mean() -> None:
    """Enumerate what it can draw, the bins of its table, each with its mass and weight: sums are those of uniform."""
    problem = ScaledRegression()
    sampler = ks.LeastNoise(problem.optimizer)
    problem.train(sampler, 400)
    mass = sampler.mass().double()
    assert float(mass.max() / mass.min()) > 2
    quantiles = torch.cat([torch.zeros(1, dtype=torch.float64), mass.cumsum(0)])
    middle = ((quantiles[:-1] + quantiles[1:]) / 2).float()  # of each bin's share of the draws
    drawn = draw(sampler.mass(), middle, unbiased=True)
    assert drawn.index(20).tolist() == list(range(20))
    for function in (torch.ones_like, torch.square, torch.exp):
        found = (mass * drawn.weight.double() * function(drawn.t).double()).sum()
        assert_close(found, function(drawn.t).double().mean(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("within", [False, True])
def test_a_missing_optimizer_shows_at_the_first_step(within: bool) -> None:
    problem = ScaledRegression()
    own = ks.LeastNoise()
    sampler = ks.Curriculum(ks.Uniform(), own, start=0, end=0) if within else own
    with pytest.raises(ValueError, match=r"must know the optimizer, got none: .*ks\.LeastNoise\(optimizer\)"):
        problem.train(sampler, 1)
    sampler.set_optimizer(problem.optimizer)  # to the sampler inside too
    problem.train(sampler, 2)
    with pytest.raises(ValueError, match="also on a copy"):
        problem.train(copy.deepcopy(sampler), 1)


def test_the_optimizer_of_another_model_is_noticed() -> None:
    """The first probe knows, on any device; the end of the first sweep says that nothing was learned."""
    problem, other = ScaledRegression(), torch.nn.Linear(3, 3)
    sampler = ks.LeastNoise(torch.optim.SGD(other.parameters(), lr=0.1), warmup=2)
    problem.train(sampler, 8)
    with pytest.warns(UserWarning, match=r"depend on none of the 2 parameters .*pass the optimizer, or the parameters"):
        problem.train(sampler, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")  # once for each place
        problem.train(sampler, 9)
    assert len(told) == 2
    assert "none of the first 10 probes" in str(told[1].message)
    assert int(sampler.diagnostics()["skipped_probes"]) == 10


def test_a_sweep_of_losses_that_are_not_finite_is_noticed_once() -> None:
    class Infinite(ScaledRegression):
        def scale(self, t: Tensor) -> Tensor:
            return torch.full_like(t, torch.inf)

    problem = Infinite()
    sampler = ks.LeastNoise(problem.optimizer, warmup=1)
    problem.train(sampler, 13)
    with pytest.warns(UserWarning, match="none of the first 10 probes found a gradient that is finite and above 0"):
        problem.train(sampler, 1)
    problem.train(sampler, 60)  # more sweeps
