"""Our samplers on the paths of facebookresearch's flow_matching, the real library."""

import copy

import pytest
import torch
from flow_matching.path import AffineProbPath, CondOTProbPath, MixtureDiscreteProbPath
from flow_matching.path.scheduler import (
    CondOTScheduler,
    CosineScheduler,
    LinearVPScheduler,
    PolynomialConvexScheduler,
    Scheduler,
    SchedulerOutput,
    VPScheduler,
)
from torch import Tensor, nn

import kairostep as ks
from kairostep.integrations.flow_matching import PathSampler, path_process, to_path_time

SCHEDULERS = [CondOTScheduler(), CosineScheduler(), LinearVPScheduler(), PolynomialConvexScheduler(2.0), VPScheduler()]
T = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)


def name(value: object) -> str:
    return type(value).__name__


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 2))


def losses_at(path: AffineProbPath, model: nn.Module, x_1: Tensor, t: Tensor) -> Tensor:
    """Return the library's loss, by sample: (B,)."""
    sample = path.sample(x_0=torch.randn_like(x_1), x_1=x_1, t=t)
    return (model(torch.cat([sample.x_t, sample.t[:, None]], 1)) - sample.dx_t).square().mean(1)


class Loop:
    """The library's training loop with a sampler."""

    def __init__(self, kind: str, path: AffineProbPath) -> None:
        self.path, self.model = path, network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        own: ks.TimestepSampler = ks.RootLoss(num_bins=5, warmup=4, refresh=2, gate=1.0)
        if kind == "adaptive":
            policy = ks.BetaPolicy.for_input((2,), hidden=8)
            own = ks.Adaptive(policy, probing=ks.Probing(every=3, sweep=10, reward_rows=4), model=self.model)
        self.sampler = PathSampler(own, path)

    def step(self, step: int) -> float:
        """Train on one batch and return its mean loss."""
        torch.manual_seed(step)
        x_1 = torch.randn(16, 2) * 0.1 + 1
        drawn = self.sampler.sample(x_1)
        losses = losses_at(self.path, self.model, x_1, drawn.t)
        self.optimizer.zero_grad()
        (losses * drawn.weight).mean().backward()
        with self.sampler.observe(x_1, drawn, losses, lambda rows, t: losses_at(self.path, self.model, x_1[rows], t)):
            self.optimizer.step()
        return float(losses.detach().mean())


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=name)
def test_uniform_gives_the_librarys_losses_and_gradients_on_the_same_numbers(scheduler: Scheduler) -> None:
    path, x_1 = AffineProbPath(scheduler), torch.randn(32, 2)
    drawn = PathSampler(ks.Uniform(), path).sample(x_1)
    same = ks.Uniform().sample(x_1).t
    gradients = []
    for t, weight in ((drawn.t, drawn.weight), (1 - same, torch.ones(32))):
        model = network()
        torch.manual_seed(1)
        losses = losses_at(path, model, x_1, t)
        (losses * weight).mean().backward()
        gradients.append([losses.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=name)
def test_time_runs_from_noise_to_data(scheduler: Scheduler) -> None:
    path = AffineProbPath(scheduler)
    near_data = PathSampler(ks.FixedBeta(1.0, 50.0), path).sample(torch.zeros(64, 2)).t
    near_noise = PathSampler(ks.FixedBeta(50.0, 1.0), path).sample(torch.zeros(64, 2)).t
    x_0, x_1 = torch.full((64, 2), -1.0), torch.ones(64, 2)
    at_data, at_noise = path.sample(x_0=x_0, x_1=x_1, t=near_data), path.sample(x_0=x_0, x_1=x_1, t=near_noise)
    assert at_data.x_t.mean() > at_noise.x_t.mean() + 1
    assert bool((near_data < 1).all())
    assert bool(to_path_time(torch.tensor([0.0, 1.0])).isfinite().all())
    assert float(to_path_time(torch.tensor(2**-25))) < 1


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=name)
def test_the_process_is_that_of_the_scheduler(scheduler: Scheduler) -> None:
    process, at = path_process(AffineProbPath(scheduler)), scheduler(1 - T)
    torch.testing.assert_close(process.alpha(T), at.alpha_t)
    torch.testing.assert_close(process.sigma(T), at.sigma_t)
    torch.testing.assert_close(process.time(T), 1 - T)
    torch.testing.assert_close(process.t_at(process.log_snr(T)), T)
    torch.testing.assert_close(1 - scheduler.snr_inverse((process.log_snr(T) / 2).exp()), T)
    slope = at.d_alpha_t / at.alpha_t - at.d_sigma_t / at.sigma_t  # of log(alpha / sigma), by the path's time
    torch.testing.assert_close(process.vlb_weight(T), slope)


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=name)
def test_the_prediction_is_the_librarys_velocity(scheduler: Scheduler) -> None:
    path = AffineProbPath(scheduler)
    process = path_process(path)
    x_0, x_1 = torch.randn(2, 19, 3, dtype=torch.float64)
    sample = path.sample(x_0=x_0, x_1=x_1, t=1 - T)
    alpha, sigma = process.alpha(T)[:, None], process.sigma(T)[:, None]
    torch.testing.assert_close(process.prediction.target(x_1, x_0, alpha, sigma), sample.dx_t)
    torch.testing.assert_close(process.prediction.to_x0(sample.dx_t, sample.x_t, alpha, sigma), x_1)
    error = path.velocity_to_target(sample.dx_t + 1, sample.x_t, (1 - T)[:, None]) - x_1  # of an error of 1
    torch.testing.assert_close(process.prediction.log_x0_error(process.log_snr(T)), error[:, 0].square().log())


def test_weights_on_the_straight_path_are_those_of_the_flow_process() -> None:
    process, flow = path_process(CondOTProbPath()), ks.FlowProcess()
    for weighting in (ks.min_snr(), ks.soft_min_snr(), ks.vlb(flow), ks.debias()):
        expected = weighting(flow.log_snr(T), ks.VELOCITY)
        torch.testing.assert_close(weighting(process.log_snr(T), process.prediction), expected)
    torch.testing.assert_close(process.vlb_weight(T), flow.vlb_weight(T))
    laplace = [ks.Laplace(of).density(50) for of in (process, flow)]
    torch.testing.assert_close(*laplace)


def test_our_objective_trains_the_librarys_loss() -> None:
    path, model, x_1 = AffineProbPath(CosineScheduler()), network(), torch.randn(19, 2)
    t = T.float()
    torch.manual_seed(2)
    expected = losses_at(path, model, x_1, 1 - t)
    torch.manual_seed(2)
    objective = ks.Objective(path_process(path), path_process(path).prediction)
    losses = objective(lambda xt, time: model(torch.cat([xt, time[:, None]], 1)), x_1, t)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["root_loss", "adaptive"])
@pytest.mark.parametrize("path", [CondOTProbPath(), AffineProbPath(CosineScheduler())], ids=["straight", "cosine"])
def test_a_learning_sampler_trains_and_resumes_bitwise(kind: str, path: AffineProbPath) -> None:
    whole, first, second = (Loop(kind, path) for _ in range(3))
    means = [whole.step(step) for step in range(60)]
    assert sum(means[-10:]) < 0.8 * sum(means[:10])
    for step in range(31):
        first.step(step)
    for get in (lambda loop: loop.model, lambda loop: loop.optimizer, lambda loop: loop.sampler.sampler):
        get(second).load_state_dict(copy.deepcopy(get(first).state_dict()))
    for step in range(31, 60):
        second.step(step)
    torch.testing.assert_close(second.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    density = whole.sampler.sampler.density(5)
    torch.testing.assert_close(second.sampler.sampler.density(5), density, rtol=0, atol=0)
    assert float(density.max()) > 0.202


def test_losses_are_recorded_at_the_samplers_own_time() -> None:
    own = ks.RootLoss(num_bins=2, warmup=0, refresh=1, gate=1.0)
    sampler, x_1 = PathSampler(own, CondOTProbPath()), torch.zeros(64, 2)
    drawn = sampler.sample(x_1)
    with sampler.observe(x_1, drawn, 10 * drawn.t):  # large where the path's t is, near the data
        pass
    assert float(own.density(2)[0]) > 0.55  # kairostep's t near 0 is near the data


def test_what_cannot_work_is_refused() -> None:
    class Backwards(Scheduler):
        """Data at 0."""

        def __call__(self, t: Tensor) -> SchedulerOutput:
            return SchedulerOutput(1 - t, t, -torch.ones_like(t), torch.ones_like(t))

        def snr_inverse(self, snr: Tensor) -> Tensor:
            """Return t."""
            return 1 / (1 + snr)

    with pytest.raises(ValueError, match="must run from noise at 0 to data at 1"):
        PathSampler(ks.Uniform(), AffineProbPath(Backwards()))
    with pytest.raises(ValueError, match="path must be a flow_matching path"):
        PathSampler(ks.Uniform(), ks.FlowProcess())
    with pytest.raises(ValueError, match="read from an AffineProbPath"):
        path_process(MixtureDiscreteProbPath(PolynomialConvexScheduler(2.0)))  # tokens have no SNR
    adaptive = PathSampler(ks.Adaptive(ks.ConstantBeta()), CondOTProbPath())
    with pytest.raises(ValueError, match=r"asks for losses at other times: .*loss_at\(rows, t\)"):
        adaptive.observe(torch.zeros(2, 2), adaptive.sample(torch.zeros(2, 2)), torch.zeros(2))
    with pytest.raises(ValueError, match="sampler must be a kairostep sampler"):
        PathSampler("uniform", CondOTProbPath())


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=name)
def test_weights_at_the_very_ends_are_numbers(scheduler: Scheduler) -> None:
    """Rounding puts the end of a cosine below 0, where a logarithm is NaN."""
    process = path_process(AffineProbPath(scheduler))
    ends = torch.tensor([0.0, 2**-25, 1 - 2**-24, 1.0])
    assert not process.log_snr(ends).isnan().any()
    assert not ks.min_snr()(process.log_snr(ends), process.prediction).isnan().any()


def test_it_moves_and_is_saved_as_a_sampler() -> None:
    sampler = PathSampler(ks.RootLoss(), CondOTProbPath())
    assert sampler.to("meta").sample(torch.empty(4, 2, device="meta")).t.device.type == "meta"
    restored = PathSampler(ks.RootLoss(seed=1), CondOTProbPath())
    restored.load_state_dict(PathSampler(ks.RootLoss(), CondOTProbPath()).state_dict())
    rows = torch.empty(4, 0)
    assert torch.equal(restored.sample(rows).t, PathSampler(ks.RootLoss(), CondOTProbPath()).sample(rows).t)


def test_what_was_not_drawn_by_the_path_sampler_is_refused() -> None:
    sampler, x_1, losses = PathSampler(ks.RootLoss(), CondOTProbPath()), torch.zeros(8, 2), torch.zeros(8)
    drawn = sampler.sample(x_1)
    for wrong in (drawn.t, drawn.drawn):
        for show in (sampler.observe, sampler.show):
            with pytest.raises(ValueError, match=r"`sample` of the PathSampler returned, got .*not drawn\.t"):
                show(x_1, wrong, losses)  # type: ignore[operator]
