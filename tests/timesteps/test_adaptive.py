"""The adaptive sampler: what it costs, what it learns, and the loops it has to live in."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from problem import Problem, data
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import kairostep as ks

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
    images, target = torch.randn(1024, 1, 4, 4, generator=generator), torch.randn(1024, generator=generator)
    learned = torch.zeros(1024)
    reward = sampler.reading.reward
    if permuted:
        sampler.reading.reward = lambda drops: reward(drops)[torch.randperm(drops.shape[1], generator=generator)]  # type: ignore[method-assign]
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


@pytest.mark.parametrize(
    "build", [ks.ConstantBeta, lambda: ks.BetaPolicy.for_input((1, 4, 4))], ids=["pair", "network"]
)
@pytest.mark.parametrize("seed", range(5))
def test_density_moves_to_where_there_is_something_left_to_learn(seed: int, build: Callable[[], nn.Module]) -> None:
    """200 updates double the mass there from 0.3, of 0.65 that the floor allows; with permuted rewards they do not."""
    torch.manual_seed(seed)
    paid, control = (
        train_rows(ks.Adaptive(build(), probing=ks.Probing(every=1), seed=seed), seed, 200, permuted=permuted)
        for permuted in (False, True)
    )
    assert paid > 0.6
    assert abs(control - 0.3) < 0.1


def test_batch_credit_learns_where_rows_have_nothing_of_their_own() -> None:
    """Ten parameters, one per tenth of t, shared by all rows: per-row credit is blind here by construction."""

    def train(credit: str, seed: int) -> float:
        sampler = ks.Adaptive(
            ks.ConstantBeta(), num_steps=20, probing=ks.Probing(every=1, credit=credit), floor=0.0, seed=seed
        )
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
    sampler = ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(every=1))
    for step in range(4):
        problem.step(sampler, data(step), skip=True)
        assert sampler.reward.tolist() == [0.0, 0.0]
        assert not bool(sampler.queue.drops.any())
    assert torch.equal(sampler.policy.output, torch.zeros(2))


def test_a_step_that_a_grad_scaler_skips_earns_exactly_zero() -> None:
    problem = Problem()
    sampler = ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(every=1), model=problem.model)
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
        sampler = ks.Adaptive(ks.BetaPolicy.for_input((4,), 16), probing=ks.Probing(every=every), learning_rate=0.0)
        for step in range(1, 12):
            problem.step(sampler, data(step))
        weights.append(parameters_to_vector(problem.model.parameters()))
        assert every > 1 or int(sampler.num_probes) > 0
    assert torch.equal(*weights)


def test_common_random_numbers_and_eval_mode_make_the_difference_exact() -> None:
    """A change of the last bias alone moves every loss by a known amount, dropout and noise notwithstanding."""
    problem = Problem()
    sampler = ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(every=1), model=problem.model)
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


# The loops it has to live in


def test_saved_killed_and_resumed_in_mid_queue_is_never_stopped() -> None:
    def train(problem: Problem, sampler: ks.Adaptive, steps: range) -> None:
        for step in steps:
            problem.step(sampler, data(step))

    def build() -> tuple[Problem, ks.Adaptive]:
        problem = Problem()
        return problem, ks.Adaptive(
            ks.BetaPolicy.for_input((4,), 16), probing=ks.Probing(every=3, queue_size=5), model=problem.model
        )

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
    sampler = ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(every=2), model=problem.model)
    for step in range(4):
        problem.step(sampler, data(step))
    assert problem.model.training
    assert float(sampler.reward.abs().max()) > 0
    problem.step(sampler, data(4), skip=True)
    assert sampler.reward.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_inside_the_loss_and_gradient_accumulation(dtype: torch.dtype) -> None:
    problem = Problem()
    sampler = ks.Adaptive(ks.BetaPolicy.for_input((4,), 16), probing=ks.Probing(every=2), model=problem.model)
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
    sampler = ks.Adaptive(
        ks.BetaPolicy.for_input((4,), 16), reward_weight, probing=ks.Probing(every=1), model=problem.model
    )
    for step in range(12):
        problem.step(sampler, data(step))
    diagnostics = {key: float(value.detach()) for key, value in sampler.diagnostics().items()}
    assert all(math.isfinite(value) for value in diagnostics.values())
    assert diagnostics["a_std"] > 0
    assert 0 <= diagnostics["selected_t_0"] < diagnostics["selected_t_1"] < diagnostics["selected_t_2"] < 1
    assert "probe_seconds" not in diagnostics


def test_seconds_are_measured_on_request() -> None:
    problem = Problem()
    sampler = ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(every=1))
    sampler.time_probes = True
    problem.step(sampler, data(0))
    assert 0 < float(sampler.diagnostics()["probe_seconds"]) < 60
