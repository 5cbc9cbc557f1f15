"""The adaptive sampler against the paper's formulas and its released code."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from problem import Problem, data
from scipy import special, stats
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

import kairostep as ks
from kairostep.timesteps.policy import MAX_CONCENTRATION
from kairostep.timesteps.reinforce import gather_findings, payment, reward_moments, summarise_rewards


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

    sampler = ks.Adaptive(ks.ConstantBeta(), process.vlb_weight, num_steps=20, probing=ks.Probing(sweep=20))
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
    sampler = ks.Adaptive(ks.ConstantBeta(), num_steps=1000, as_published=True)
    with torch.no_grad():
        drawn = [sampler.sample(torch.zeros(1000, 1)) for _ in range(100)]
    index = torch.cat([d.index(1000) for d in drawn])
    u = torch.cat([sampler.reading.to_u(d.t, 1000) for d in drawn]).double()
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
    sampler = ks.Adaptive(policy, lambda t: 1 + t, num_steps=50, probing=ks.Probing(every=1), as_published=True)
    reference = copy.deepcopy(policy)
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
    u = sampler.reading.to_u(drawn.t, 50)
    a, b = (nn.functional.softplus(reference.out(reference.hidden(x0))) + 1e-5).unbind(1)  # the released map
    distribution = torch.distributions.Beta(a, b)
    adam = torch.optim.Adam(reference.parameters(), lr=1e-2)
    (-(distribution.log_prob(u) * (reward + 1e-2 * distribution.entropy())).mean()).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    adam.step()
    assert_close(sampler.reward[0], reward.mean(), rtol=1e-4, atol=0)
    moved, expected = (parameters_to_vector(p.parameters()) for p in (sampler.policy, reference))
    assert_close(moved, expected, rtol=1e-3, atol=1e-5)


def test_as_published_measures_with_fresh_noise_in_train_mode() -> None:
    problem = Problem()
    sampler = ks.Adaptive(
        ks.ConstantBeta(), probing=ks.Probing(every=1), as_published=True, num_steps=20, model=problem.model
    )
    modes = []
    problem.model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    problem.step(sampler, data(0), skip=True)
    assert all(modes)
    assert float(sampler.reward[1]) > 1e-2  # an update that does nothing earns noise


@pytest.mark.parametrize("build", [ks.ConstantBeta, lambda: ks.BetaPolicy.for_input((4,), hidden=8)])
def test_as_published_has_the_released_map_and_its_start(build: Callable[[], nn.Module]) -> None:
    """FORMULAS: (a, b) = softplus(out) + 1e-5 with a bias of 0.5 at first: 0.97409, and no upper bound."""
    sampler = ks.Adaptive(build(), as_published=True)
    beta = sampler.policy(data(0))
    assert_close(beta.a, torch.full((32,), 0.97409), rtol=0, atol=1e-5)
    assert_close(beta.b, torch.full((32,), 0.97409), rtol=0, atol=1e-5)
    assert_close(build()(data(0)).a, torch.ones(32))  # ours
    with torch.no_grad():
        (sampler.policy.output if isinstance(sampler.policy, ks.ConstantBeta) else sampler.policy.out.bias).add_(200.0)
    assert_close(sampler.policy(data(0)).a, torch.full((32,), 200.5))


def test_an_unbounded_policy_is_an_option_without_the_rest() -> None:
    for policy in (ks.ConstantBeta(bounded=False), ks.BetaPolicy.for_input((4,), 8, bounded=False)):
        sampler = ks.Adaptive(policy)
        assert_close(sampler.policy(data(0)).a, torch.full((32,), 0.97409), rtol=0, atol=1e-5)
        assert not sampler.as_published
        assert sampler.floor == 0.5


def test_a_state_from_before_the_released_map_keeps_the_map_it_was_trained_with() -> None:
    saved = ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(every=1))
    with torch.no_grad():
        saved.policy.output.copy_(torch.tensor([0.7, -0.3]))
    state = {key: value for key, value in saved.state_dict().items() if not key.endswith(("kind", "_extra_state"))}
    state["steps._extra_state"] = saved.state_dict()["steps._extra_state"]  # was there before
    resumed = ks.Adaptive(
        ks.ConstantBeta(), probing=ks.Probing(every=1), as_published=True, num_steps=128
    )  # 128 timesteps in both sweeps
    resumed.load_state_dict(state)
    assert_close(resumed.policy(data(0)).a, saved.policy(data(0)).a)
    again = ks.Adaptive(ks.ConstantBeta(), probing=ks.Probing(every=1))
    again.load_state_dict(ks.Adaptive(ks.ConstantBeta(bounded=False), probing=ks.Probing(every=1)).state_dict())
    assert_close(again.policy(data(0)).a, torch.full((32,), 0.97409), rtol=0, atol=1e-5)


def test_under_the_bound_of_cosine_one_timestep_is_selected_nearly_always() -> None:
    """docs/method.md: c_t of step 999 is 97 % of the weights' sum there, and 0.1 % on linear."""
    times_selected = {}
    for name in ("cosine", "linear"):
        process, problem = getattr(ks.DiscreteProcess, name)(), Problem()
        problem.objective = ks.Objective(process)
        sampler = ks.Adaptive(ks.ConstantBeta(), process.vlb_weight, probing=ks.Probing(every=1), model=problem.model)
        selected = []
        for step in range(40):
            problem.step(sampler, data(step))
            selected.append((sampler.queue.sweep_t[sampler.queue.selected] * 1000).long().tolist())
        times_selected[name] = sum(999 in some for some in selected)
    assert times_selected["cosine"] >= 38  # all but those before the queue has three rows
    assert times_selected["linear"] <= 10
    t = (torch.arange(1000) + 0.5) / 1000
    assert float(ks.DiscreteProcess.cosine().vlb_weight(t)[-1] / ks.DiscreteProcess.cosine().vlb_weight(t).sum()) > 0.97


def test_raw_rewards_are_paid_as_they_are() -> None:
    rewards, valid = torch.tensor([0.3, -0.1, 0.0, 0.5]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    summary = summarise_rewards(reward_moments(rewards, valid)[None])

    def paid(baseline: Tensor | None, *, standardised: bool) -> Tensor:
        scale, shift = payment(summary, baseline, torch.tensor(True), standardised=standardised)
        return scale * rewards + shift * valid

    assert torch.equal(paid(None, standardised=False), rewards)
    assert_close(paid(torch.zeros(2), standardised=False), 0.7 / 3 * valid)
    usual = paid(None, standardised=True)
    assert_close(usual[valid > 0], (rewards[valid > 0] - 0.7 / 3) / rewards[valid > 0].std(correction=0))
    assert float(usual[2]) == 0


@pytest.mark.parametrize(("credit", "as_published"), [("sample", False), ("batch", False), ("sample", True)])
def test_the_policy_moves_by_the_gradient_of_what_its_draws_are_paid(credit: str, as_published: bool) -> None:
    """Equation 13 in one piece: the sampler sums its three gradients only once all ranks have told their rewards."""
    torch.manual_seed(0)
    policy = ks.BetaPolicy.for_input((4,), hidden=8)
    sampler = ks.Adaptive(policy, probing=ks.Probing(credit=credit), entropy=0.3, as_published=as_published)
    sampler.baseline.copy_(torch.tensor([0.1, 0.04]))
    sampler.optimizer.num_updates.fill_(3)
    x0, t, rewards = torch.randn(16, 4), 0.1 + 0.8 * torch.rand(16), torch.randn(16)
    sampler.reward[0] = 0.7  # of the probe before, which rewards are counted from
    slopes = sampler.slopes(x0, t, rewards - 0.7, torch.ones(16))
    found = gather_findings(torch.zeros(0), rewards, torch.ones(16), 0, slopes, torch.zeros(0, 2))

    beta = sampler.distribution(x0)
    u = (t * 1000 - 0.5) / 999 if as_published else t
    log_prob = sampler.log_prob(beta, u)
    if as_published:
        objective = log_prob * (rewards + 0.3 * beta.entropy())
    else:
        advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
        if credit == "batch":
            surprise = rewards.mean() - 0.1
            advantages = (surprise / (0.9 * 0.04 + 0.1 * surprise.square()).sqrt()).expand(16)
        objective = log_prob * advantages + 0.3 * beta.entropy()
    expected = torch.autograd.grad(-objective.mean(), list(policy.parameters()))
    assert_close(sampler.policy_gradient(found), torch.cat([g.flatten() for g in expected]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (3.0, 0.7)])
def test_draws_follow_the_policy_with_its_floor(a: float, b: float) -> None:
    sampler = ks.Adaptive(ks.ConstantBeta(), floor=0.25)
    limit = math.log(MAX_CONCENTRATION)
    logs = torch.tensor([math.log(a), math.log(b)])
    with torch.no_grad():
        sampler.policy.output.copy_(limit * logs / (limit**2 - logs**2).sqrt())
    t = torch.cat([sampler.sample(torch.zeros(128, 1, dtype=torch.float64)).t for _ in range(50)])
    result = stats.kstest(t.numpy(), lambda u: 0.75 * special.betainc(a, b, u) + 0.25 * u)
    assert result.pvalue > 0.01
