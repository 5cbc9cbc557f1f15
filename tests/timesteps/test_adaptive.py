"""The adaptive sampler: cost, signal, fidelity to the paper and to its released code, and what it refuses."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from scipy import special, stats
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

import kairostep as ks
from kairostep.timesteps.policy import MAX_CONCENTRATION, Beta


class Problem:
    """A network with dropout on 4-d data: one row of losses per call, noise from the global generator."""

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.objective = ks.Objective(ks.FlowProcess(), ks.VELOCITY)
        self.num_rows = 0

    def loss_at(self, x0: Tensor) -> ks.LossAt:
        """Return the loss of this batch."""

        def loss_at(rows: Tensor, t: Tensor) -> Tensor:
            self.num_rows += len(t)
            return self.objective(lambda xt, time: self.model(torch.cat([xt, time[:, None]], 1)), x0[rows], t)

        return loss_at

    def step(self, sampler: ks.TimestepSampler, x0: Tensor, *, skip: bool = False) -> None:
        """Train by one step, or compute it and leave it out."""
        loss_at = self.loss_at(x0)
        drawn = sampler.sample(x0)
        losses = loss_at(torch.arange(len(x0)), drawn.t)
        self.optimizer.zero_grad()
        (losses * drawn.weight).mean().backward()
        with sampler.observe(x0, drawn, losses.detach(), loss_at):
            if not skip:
                self.optimizer.step()


def data(step: int, num_rows: int = 32) -> Tensor:
    return torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(step))


# Cost


def test_an_update_costs_five_forward_passes_of_the_batch() -> None:
    """At B = 128, T = 1000, |S| = 3, every 40 steps: the defaults."""
    problem = Problem()
    sampler = ks.Adaptive(ks.BetaPolicy.for_input((4,)), model=problem.model)
    for step in range(81):
        problem.num_rows = 0
        problem.step(sampler, data(step, 128))
        probed = problem.num_rows - 128
        assert probed == (0 if step % 40 else 2 * (3 * 64 + 128))
        assert probed <= 5 * 128
    assert int(sampler.diagnostics()["probe_evaluations"]) == 3 * 2 * (3 * 64 + 128)


# Signal


def train_rows(sampler: ks.Adaptive, seed: int, num_updates: int, *, permuted: bool) -> float:
    """Return the mass above 0.7 after training one parameter per row of data, which only t > 0.7 teaches anything."""
    generator = torch.Generator().manual_seed(seed)
    images, target = torch.randn(1024, 1, 8, 8, generator=generator), torch.randn(1024, generator=generator)
    learned = torch.zeros(1024)
    pay = sampler.advantages
    if permuted:
        sampler.advantages = lambda r, valid: pay(r, valid)[torch.randperm(len(r), generator=generator)]  # type: ignore[method-assign]
    for _ in range(num_updates):
        row = torch.randint(1024, (128,), generator=generator)

        def loss_at(rows: Tensor, t: Tensor, row: Tensor = row) -> Tensor:
            noise = 0.1 * torch.randn(len(t))
            return torch.where(t > 0.7, (learned[row[rows]] - target[row[rows]] + noise).square(), 0.5 + noise)

        x0 = images[row]
        drawn = sampler.sample(x0)
        with sampler.observe(x0, drawn, torch.zeros(128), loss_at):
            taught = row[drawn.t > 0.7]
            learned.index_add_(0, taught, 0.05 * (target - learned)[taught])
    return float(sampler.density(10)[7:].sum())


@pytest.mark.parametrize("build", [ks.BetaPair, lambda: ks.BetaPolicy.for_input((1, 8, 8))], ids=["pair", "network"])
@pytest.mark.parametrize("seed", range(5))
def test_density_moves_to_where_there_is_something_left_to_learn(seed: int, build: Callable[[], nn.Module]) -> None:
    """200 updates double the mass there from 0.3, of 0.65 that the floor allows; with permuted rewards they do not."""
    torch.manual_seed(seed)
    paid, control = (
        train_rows(ks.Adaptive(build(), every=1, seed=seed), seed, 200, permuted=permuted) for permuted in (False, True)
    )
    assert paid > 0.6
    assert control < 0.45


def test_batch_credit_learns_where_rows_have_nothing_of_their_own() -> None:
    """Ten parameters, one per tenth of t, shared by all rows: per-row credit is blind here by construction."""

    def train(credit: str, seed: int) -> float:
        sampler = ks.Adaptive(ks.BetaPair(), num_steps=20, every=1, credit=credit, floor=0.0, seed=seed)
        learned = torch.zeros(10)

        def loss_at(rows: Tensor, t: Tensor) -> Tensor:
            return torch.where(t > 0.7, (1 - learned[(t * 10).long()]).square(), 0.5)

        for _ in range(200):
            x0 = torch.zeros(64, 1)
            drawn = sampler.sample(x0)
            with sampler.observe(x0, drawn, torch.zeros(64), loss_at):
                learned += 2e-4 * torch.bincount(drawn.index(10), minlength=10) * (1 - learned)
        return float(sampler.density(10)[7:].sum())

    batch, sample = ([train(credit, seed) for seed in range(3)] for credit in ("batch", "sample"))
    assert min(batch) > 0.4, batch
    assert abs(sum(sample) / 3 - 0.3) < 0.1, sample


def test_an_update_that_does_nothing_earns_exactly_zero() -> None:
    problem = Problem()
    sampler = ks.Adaptive(ks.BetaPair(), every=1)
    for step in range(4):
        problem.step(sampler, data(step), skip=True)
        assert sampler.reward.tolist() == [0.0, 0.0]
        assert not bool(sampler.queue.drops.any())
    assert torch.equal(sampler.policy.output, torch.zeros(2))


def test_a_step_that_a_grad_scaler_skips_earns_exactly_zero() -> None:
    problem = Problem()
    sampler = ks.Adaptive(ks.BetaPair(), every=1, model=problem.model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = parameters_to_vector(problem.model.parameters()).detach().clone()
    for step, poison in ((0, math.inf), (1, 1.0)):
        x0 = data(step)
        loss_at = problem.loss_at(x0)
        drawn = sampler.sample(x0)
        losses = loss_at(torch.arange(len(x0)), drawn.t)
        problem.optimizer.zero_grad()
        scaler.scale(losses.mean() * poison).backward()  # type: ignore[no-untyped-call]
        with sampler.observe(x0, drawn, losses.detach(), loss_at):
            scaler.step(problem.optimizer)
            scaler.update()
        skipped = torch.equal(parameters_to_vector(problem.model.parameters()), before)
        assert skipped == (poison == math.inf)
        assert (sampler.reward.tolist() == [0.0, 0.0]) == skipped


def test_learning_rate_zero_leaves_training_bitwise_unchanged() -> None:
    weights = []
    for every in (1, 10**9):
        torch.manual_seed(0)
        problem = Problem()
        sampler = ks.Adaptive(ks.BetaPolicy.for_input((4,), 16), every=every, learning_rate=0.0)
        for step in range(1, 12):
            problem.step(sampler, data(step))
        weights.append(parameters_to_vector(problem.model.parameters()))
        assert every > 1 or int(sampler.num_probes) > 0
    assert torch.equal(*weights)


def test_common_random_numbers_and_eval_mode_make_the_difference_exact() -> None:
    """A change of the last bias alone moves every loss by a known amount, dropout and noise notwithstanding."""
    problem = Problem()
    sampler = ks.Adaptive(ks.BetaPair(), every=1, model=problem.model)
    modes = []
    problem.model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    problem.model[0].eval()
    x0 = data(0)
    drawn = sampler.sample(x0)
    with sampler.observe(x0, drawn, torch.zeros(32), problem.loss_at(x0)), torch.no_grad():
        problem.model[3].bias += 1e-3
    assert not any(modes)
    assert problem.model.training
    assert not problem.model[0].training  # frozen by the user, and left so
    assert 0 < float(sampler.reward.abs().max()) < 1e-2  # fresh noise would give about 0.1


# Fidelity


def test_the_vlb_drop_is_the_drop_of_the_gaussian_kl() -> None:
    """FORMULAS: KL(q(x_{t-1} | x_t, x0) || p_theta), fixed-large variance, mean over dimensions, in float64."""
    torch.manual_seed(0)
    process, x0 = ks.DiscreteProcess.linear(20), torch.randn(6, 4, dtype=torch.float64)
    noise = torch.randn(6, 4, dtype=torch.float64)
    model = nn.Linear(4, 4).double()
    objective = ks.Objective(process)

    def loss_at(rows: Tensor, t: Tensor) -> Tensor:
        return objective(lambda xt, time: model(xt), x0[rows], t, noise=noise[rows])

    def kl(row: int, step: int) -> Tensor:
        beta, alpha_bar = process.betas[step], process.alphas_cumprod
        before = alpha_bar[step - 1] if step else torch.tensor(1.0, dtype=torch.float64)
        posterior = process.betas * (1 - torch.cat([torch.ones(1), alpha_bar[:-1]])) / (1 - alpha_bar)
        xt = alpha_bar[step].sqrt() * x0[row] + (1 - alpha_bar[step]).sqrt() * noise[row]
        a = 1 - beta
        mean = (before.sqrt() * beta * x0[row] + a.sqrt() * (1 - before) * xt) / (1 - alpha_bar[step])
        model_mean = (xt - beta / (1 - alpha_bar[step]).sqrt() * model(xt)) / a.sqrt()
        variance, model_variance = posterior[step or 1], beta if step else posterior[1]
        ratio = variance / model_variance
        return 0.5 * (ratio - 1 - ratio.log() + (mean - model_mean).square() / model_variance).mean()

    sampler = ks.Adaptive(ks.BetaPair(), process.vlb_weight, num_steps=20, sweep=20)
    probe = sampler.plan(x0, 0)
    cells = list(zip(probe.rows.tolist(), (probe.t * 20).long().tolist(), strict=True))
    weight = process.vlb_weight(probe.t)
    with torch.no_grad():
        before, kl_before = sampler.evaluate(probe, loss_at, 6, noise=0), torch.stack([kl(*cell) for cell in cells])
        model.weight += 0.1 * torch.randn(4, 4, dtype=torch.float64)
        after, kl_after = sampler.evaluate(probe, loss_at, 6, noise=0), torch.stack([kl(*cell) for cell in cells])
    assert before.dtype == torch.float64
    assert_close(weight * (before - after), kl_before - kl_after, rtol=1e-5, atol=1e-9)  # t itself is float32


def test_as_published_draws_round_u_times_t_minus_1() -> None:
    sampler = ks.Adaptive(ks.BetaPair(), num_steps=1000, as_published=True)
    drawn = [sampler.sample(torch.zeros(1000, 1)) for _ in range(100)]
    index = torch.cat([d.index(1000) for d in drawn])
    u = torch.cat([sampler.to_u(d.t) for d in drawn]).double()
    assert float(u.min()) > -1e-5
    assert float(u.max()) < 1 + 1e-5
    assert float((index == (u * 999).round().long()).float().mean()) > 0.9995  # but for ties in float32
    counts = torch.bincount(index, minlength=1000)
    assert float(counts[[0, 999]].float().mean()) / 100 == pytest.approx(0.5, abs=0.15)  # half-width bins at both ends
    assert float(counts[1:-1].float().mean()) / 100 == pytest.approx(1.0, abs=0.01)


def test_as_published_pays_the_sum_over_s_in_bits_with_undetached_entropy() -> None:
    """One update against the released formula: -mean(log Beta(u) (r + kappa H)), clipped, Adam 1e-2."""
    torch.manual_seed(0)
    model, x0 = nn.Linear(4, 4), data(0)
    policy = ks.BetaPolicy.for_input((4,), 8)
    nn.init.normal_(policy.out.weight, std=0.3)
    reference = copy.deepcopy(policy)
    sampler = ks.Adaptive(policy, lambda t: 1 + t, num_steps=50, every=1, as_published=True)
    assert sampler.queue.selected.tolist() == [0, 1, 2]
    assert len(sampler.queue.sweep_t) == 50

    def loss_at(rows: Tensor, t: Tensor) -> Tensor:
        return (model(x0[rows])).square().mean(1) * (2 - t)

    drawn = sampler.sample(x0)
    t_selected = (torch.arange(3) + 0.5) / 50
    with torch.no_grad():
        losses = [model(x0).square().mean(1)]
        with sampler.observe(x0, drawn, torch.zeros(32), loss_at):
            model.weight.mul_(0.9)
        losses.append(model(x0).square().mean(1))
    scale = ((1 + t_selected) * (2 - t_selected)).sum()
    reward = (losses[0] - losses[1]) * scale / math.log(2)
    beta: Beta = reference(x0)
    u = sampler.to_u(drawn.t)
    distribution = torch.distributions.Beta(beta.a, beta.b)
    adam = torch.optim.Adam(reference.parameters(), lr=1e-2)
    (-(distribution.log_prob(u) * (reward + 1e-2 * distribution.entropy())).mean()).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    adam.step()
    assert_close(sampler.reward[0], reward.mean(), rtol=1e-4, atol=0)
    moved, expected = (parameters_to_vector(p.parameters()) for p in (sampler.policy, reference))
    assert_close(moved, expected, rtol=1e-3, atol=1e-5)


def test_as_published_measures_with_fresh_noise_in_train_mode() -> None:
    problem = Problem()
    sampler = ks.Adaptive(ks.BetaPair(), every=1, as_published=True, num_steps=20, model=problem.model)
    modes = []
    problem.model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    problem.step(sampler, data(0), skip=True)
    assert all(modes)
    assert float(sampler.reward[1]) > 1e-2  # an update that does nothing earns noise


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (3.0, 0.7)])
def test_draws_follow_the_policy_with_its_floor(a: float, b: float) -> None:
    sampler = ks.Adaptive(ks.BetaPair(), floor=0.25)
    limit = math.log(MAX_CONCENTRATION)
    logs = torch.tensor([math.log(a), math.log(b)])
    with torch.no_grad():
        sampler.policy.output.copy_(limit * logs / (limit**2 - logs**2).sqrt())
    t = torch.cat([sampler.sample(torch.zeros(128, 1, dtype=torch.float64)).t for _ in range(50)])
    result = stats.kstest(t.numpy(), lambda u: 0.75 * special.betainc(a, b, u) + 0.25 * u)
    assert result.pvalue > 0.01


# Equivalence, resume, and the loops it has to live in


def test_saved_killed_and_resumed_in_mid_queue_is_never_stopped() -> None:
    def train(problem: Problem, sampler: ks.Adaptive, steps: range) -> None:
        for step in steps:
            problem.step(sampler, data(step))

    def build() -> tuple[Problem, ks.Adaptive]:
        problem = Problem()
        return problem, ks.Adaptive(ks.BetaPolicy.for_input((4,), 16), every=3, queue_size=5, model=problem.model)

    torch.manual_seed(1)
    problem, sampler = build()
    train(problem, sampler, range(25))  # 9 rows pushed into a queue of 5, between two probes
    saved = copy.deepcopy(
        (problem.model.state_dict(), problem.optimizer.state_dict(), sampler.state_dict(), torch.get_rng_state())
    )
    train(problem, sampler, range(25, 60))
    resumed_problem, resumed = build()
    resumed_problem.model.load_state_dict(saved[0])
    resumed_problem.optimizer.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    torch.set_rng_state(saved[3])
    train(resumed_problem, resumed, range(25, 60))
    for one, other in ((problem.model, resumed_problem.model), (sampler, resumed)):
        for key, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[key]), key


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_are_probed_in_eval_mode_and_left_in_train_mode() -> None:
    torch.compiler.reset()
    problem = Problem()
    problem.model = torch.compile(problem.model, backend="aot_eager")  # type: ignore[assignment]
    sampler = ks.Adaptive(ks.BetaPair(), every=2, model=problem.model)
    for step in range(4):
        problem.step(sampler, data(step))
    assert problem.model.training
    assert float(sampler.reward.abs().max()) > 0
    problem.step(sampler, data(4), skip=True)
    assert sampler.reward.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_inside_the_loss_and_gradient_accumulation(dtype: torch.dtype) -> None:
    problem = Problem()
    sampler = ks.Adaptive(ks.BetaPolicy.for_input((4,), 16), every=2, model=problem.model)
    for step in range(6):
        problem.optimizer.zero_grad()
        for micro_batch in range(2):
            x0 = data(2 * step + micro_batch)
            plain = problem.loss_at(x0)

            def loss_at(rows: Tensor, t: Tensor, plain: ks.LossAt = plain) -> Tensor:
                with torch.autocast("cpu", dtype):
                    return plain(rows, t)

            drawn = sampler.sample(x0)
            losses = loss_at(torch.arange(len(x0)), drawn.t)
            ((losses * drawn.weight).mean() / 2).backward()
        with sampler.observe(x0, drawn, losses.detach(), loss_at):
            problem.optimizer.step()
    assert float(sampler.reward.abs().max()) > 0
    assert int(sampler.num_skipped) == 0


@pytest.mark.parametrize("weighting", [ks.constant(), ks.min_snr()])
def test_it_combines_with_any_weighting(weighting: ks.Weighting) -> None:
    problem, process = Problem(), ks.DiscreteProcess.cosine()
    problem.objective = ks.Objective(process, ks.V, weighting)
    reward_weight = problem.objective.reweighting(ks.vlb(process))
    sampler = ks.Adaptive(ks.BetaPolicy.for_input((4,), 16), reward_weight, every=1, model=problem.model)
    for step in range(12):
        problem.step(sampler, data(step))
    diagnostics = {key: float(value.detach()) for key, value in sampler.diagnostics().items()}
    assert all(math.isfinite(value) for value in diagnostics.values())
    assert diagnostics["a_std"] > 0
    assert 0 <= diagnostics["selected_t_0"] < diagnostics["selected_t_1"] < diagnostics["selected_t_2"] < 1
    assert "probe_seconds" not in diagnostics


def test_seconds_are_measured_on_request() -> None:
    problem = Problem()
    sampler = ks.Adaptive(ks.BetaPair(), every=1)
    sampler.time_probes = True
    problem.step(sampler, data(0))
    assert 0 < float(sampler.diagnostics()["probe_seconds"]) < 60


# Bad input


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ks.Adaptive(ks.BetaPair(), num_steps=2), "got 3, 2 and 2: select fewer timesteps"),
        (lambda: ks.Adaptive(ks.BetaPair(), sweep=2000), "got 3, 2000 and 1000"),
        (lambda: ks.Adaptive(ks.BetaPair(), queue_size=2), "queue_size must be a whole number of at least 3, got 2"),
        (lambda: ks.Adaptive(ks.BetaPair(), every=0), "every must be a whole number of at least 1, got 0"),
        (lambda: ks.Adaptive(ks.BetaPair(), credit="both"), "credit must be one of 'sample', 'batch', got 'both'"),
        (lambda: ks.Adaptive(ks.BetaPair(), floor=1.0), r"floor must be in \[0, 1\), got 1.0"),
        (lambda: ks.Adaptive(ks.BetaPair(), floor=0.1, as_published=True), "as_published fixes floor"),
        (lambda: ks.Adaptive(ks.DiscreteProcess.linear().vlb_weight), "policy must be a Module"),
        (lambda: ks.Adaptive(ks.BetaPair(), ks.vlb(ks.DiscreteProcess.linear())), r"objective.reweighting"),
        (lambda: ks.Adaptive(ks.BetaPair(), lambda t: t / 0), "reward_weight must be finite"),
        (
            lambda: ks.Adaptive(ks.BetaPair(), ks.DiscreteProcess.linear().with_zero_terminal_snr().vlb_weight),
            "zero terminal SNR",
        ),
        (lambda: ks.Adaptive(ks.BetaPair(), learning_rate=-1.0), "learning_rate must be a finite number of at least 0"),
        (lambda: ks.Adaptive(ks.BetaPair(), credit="batch", stratified=True), "leave `stratified` out"),
        (lambda: ks.Adaptive(ks.BetaPolicy.for_input((3,))).sample(torch.zeros(2, 4)), r"for_input\(\(4,\)\)"),
    ],
)
def test_wrong_arguments_are_refused_with_rule_and_value(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_an_observation_that_is_never_entered_is_an_error() -> None:
    problem, sampler = Problem(), ks.Adaptive(ks.BetaPair())
    x0 = data(0)
    drawn = sampler.sample(x0)
    sampler.observe(x0, drawn, torch.zeros(32), problem.loss_at(x0))
    with pytest.raises(RuntimeError, match=r"write `with sampler.observe\(...\): optimizer.step\(\)`"):
        sampler.observe(x0, drawn, torch.zeros(32), problem.loss_at(x0))
    with sampler.observe(x0, drawn, torch.zeros(32), problem.loss_at(x0)):
        pass


def test_a_loss_of_the_wrong_shape_is_an_error() -> None:
    sampler, x0 = ks.Adaptive(ks.BetaPair()), data(0)
    drawn = sampler.sample(x0)
    with (
        pytest.raises(ValueError, match=r"one loss per row asked for, \(128,\), got \(\)"),
        sampler.observe(x0, drawn, torch.zeros(32), lambda rows, t: t.mean()),
    ):
        pass


def test_rows_whose_loss_is_nan_are_left_out_and_counted() -> None:
    sampler, x0 = ks.Adaptive(ks.BetaPair(), every=1), data(0)
    scale = torch.ones(())

    def loss_at(rows: Tensor, t: Tensor) -> Tensor:
        return torch.where(rows == 5, torch.nan, (1 + rows) * scale)

    drawn = sampler.sample(x0)
    with sampler.observe(x0, drawn, torch.zeros(32), loss_at):
        scale.fill_(0.5)
    rewards = torch.tensor([(1 + row) / 2 for row in range(32) if row != 5])
    assert_close(sampler.reward, torch.stack([rewards.mean(), rewards.std(correction=0)]))
    assert int(sampler.num_skipped) == 1 + int(
        int(sampler.plan(x0, 0).rows[0]) == 5
    )  # and the sweep, if it took that row
    assert bool(sampler.policy.output.isfinite().all())


@pytest.mark.parametrize("credit", ["sample", "batch"])
def test_the_policy_stays_bounded_under_ten_thousand_adversarial_rewards(credit: str) -> None:
    sampler = ks.Adaptive(ks.BetaPair(), entropy=0.0, floor=0.0, credit=credit, learning_rate=0.1)
    x0, valid = torch.zeros(4, 1), torch.ones(4)
    times = torch.rand(10_000, 4, generator=torch.Generator().manual_seed(0))
    for step, t in enumerate(times):
        greed = (t if step < 6000 else 1 - t) * 10.0 ** (step % 35 - 20)  # for one end, then for the other
        gradient = sampler.policy_gradient(x0, t, sampler.advantages(greed, valid))
        sampler.optimizer.step(sampler.policy, gradient, torch.tensor(True))
    distribution: Beta = sampler.policy(x0)
    for values in (distribution.a.detach(), distribution.b.detach()):
        assert 0.99 / MAX_CONCENTRATION <= float(values.min()) <= float(values.max()) <= 1.01 * MAX_CONCENTRATION
    assert all(bool(value.isfinite().all()) for value in sampler.state_dict().values())
    assert bool(sampler.sample(x0).t.isfinite().all())
