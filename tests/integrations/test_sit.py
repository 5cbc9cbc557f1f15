"""Our samplers in SiT, which draws its times inside `transport.training_losses`. It is no package: see `sit_like`."""

import copy
from typing import Any

import pytest
import torch
from sit_like import GVPCPlan, ICPlan, ModelType, Transport, VPCPlan, WeightType
from torch import Tensor, nn
from torch.testing import assert_close

import kairostep as ks
from kairostep.integrations.flow_matching import PathSampler, path_process
from kairostep.integrations.sit import SampledTransport, process_of, time_of

PATHS = [ICPlan, GVPCPlan, VPCPlan]


class Network(nn.Module):
    """A network called as SiT's, `model(x, t, y=...)`, with its dropout of labels in train mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4))
        self.times: list[Tensor] = []

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        """Return a prediction."""
        self.times.append(t)
        level = t if y is None else t + y
        return self.layers(torch.cat([x, level[:, None]], 1))


class Loop:
    """The part of SiT's train.py that has to do with the loss, in its order."""

    def __init__(self, transport: Transport, sampler: ks.TimestepSampler | None) -> None:
        self.model, self.transport, self.sampler = Network(), transport, sampler
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0)
        self.sampled = None if sampler is None else SampledTransport(transport, sampler, self.opt)

    def step(self, step: int) -> Tensor:
        """Train on one batch and return its losses."""
        torch.manual_seed(100 + step)
        x, y = torch.randn(16, 4), torch.rand(16)
        loss_dict = self.transport.training_losses(self.model, x, {"y": y})
        loss = loss_dict["loss"].mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss_dict["loss"].detach()


def root_loss() -> ks.RootLoss:
    return ks.RootLoss(num_bins=5, warmup=4, refresh=2, gate=1.0)


def adaptive() -> ks.Adaptive:
    return ks.Adaptive(ks.BetaPolicy.for_input((4,), hidden=8), probing=ks.Probing(every=3, sweep=10, reward_rows=4))


@pytest.mark.parametrize("path", PATHS)
def test_uniform_gives_their_losses_and_gradients_at_the_same_times(path: Any) -> None:
    ours = Loop(Transport(path(), train_eps=1e-3), ks.Uniform())
    theirs, copied = Loop(Transport(path(), train_eps=1e-3), None), ks.Uniform()
    sample = theirs.transport.sample

    def sample_at_ours(x1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, x0, x1 = sample(x1)
        return time_of(theirs.transport, copied.sample(x1).t), x0, x1

    theirs.transport.sample = sample_at_ours
    for step in range(4):
        assert_close(ours.step(step), theirs.step(step), rtol=0, atol=0)
    assert_close(ours.model.state_dict(), theirs.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model_type", ModelType)
def test_times_are_those_that_they_would_draw_with_data_at_1(path: Any, model_type: ModelType) -> None:
    transport = Transport(path(), model_type, train_eps=0.01)
    first, last = transport.check_interval(0.01, 0.005)
    for near_data, sampler in ((True, ks.FixedBeta(1.0, 20.0)), (False, ks.FixedBeta(20.0, 1.0)), (None, ks.Uniform())):
        loop = Loop(copy.deepcopy(transport), sampler)
        loop.transport.training_losses(loop.model, torch.randn(4000, 4), {"y": torch.rand(4000)})
        (times,) = loop.model.times
        assert first <= float(times.min()) <= float(times.max()) <= last
        assert float(times.max()) < 1  # as torch.rand
        if near_data is None:
            assert_close(times.sort().values, torch.linspace(first, last, 4000), rtol=0, atol=5e-4)
        else:
            assert float(times.mean() > 0.9) == near_data


def test_train_eps_bounds_the_losses_near_the_data() -> None:
    transport = Transport(ICPlan(), ModelType.NOISE, WeightType.LIKELIHOOD, train_eps=0.01)
    at_data = Loop(transport, ks.Tabulated(torch.tensor([1.0] + [0.0] * 9999)))
    bound = 1 / 0.01 + 1 / 0.99  # of the weight, at the last time that is trained at
    error = float(at_data.step(0).max()) / bound
    assert error < 5
    transport.train_eps = 0.0  # what an override that drops it would do
    assert float(at_data.step(0).max()) > 50 * bound


@pytest.mark.parametrize("make", [root_loss, adaptive])
@pytest.mark.parametrize("path", [ICPlan, VPCPlan])
def test_a_learning_sampler_trains_and_resumes_bitwise(make: Any, path: Any) -> None:
    whole, first, second = (Loop(Transport(path(), ModelType.NOISE, train_eps=1e-3), make()) for _ in range(3))
    for step in range(12):
        whole.step(step)
    for step in range(7):
        first.step(step)
    for name in ("model", "opt", "sampler"):
        getattr(second, name).load_state_dict(copy.deepcopy(getattr(first, name).state_dict()))
    for step in range(7, 12):
        second.step(step)
    assert_close(second.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert_close(second.sampler.state_dict(), whole.sampler.state_dict(), rtol=0, atol=0)
    assert float(whole.sampler.density(5).max()) > 0.201
    assert whole.sampled.observer.num_unseen == 0


def test_conditions_go_with_their_rows() -> None:
    transport, sampler, asked = Transport(), adaptive(), []
    sampler.observe = lambda x0, drawn, losses, loss_at: (
        asked.append((losses, loss_at(torch.arange(16).flip(0), drawn.t.flip(0)))) or torch.no_grad()
    )
    model = Network()
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    SampledTransport(transport, sampler, opt)
    x, y, noise = torch.randn(16, 4), torch.rand(16), torch.randn(16, 4)
    calls = iter([noise, noise.flip(0)])
    sample = transport.sample
    transport.sample = lambda x1: (sample(x1)[0], next(calls), x1)
    transport.training_losses(model, x, {"y": y})["loss"].mean().backward()
    opt.step()
    ((losses, reversed_losses),) = asked
    assert_close(reversed_losses.flip(0), losses)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", WeightType)
@pytest.mark.parametrize("model_type", ModelType)
def test_root_loss_is_told_the_weight_on_what_the_network_predicts(
    path: Any, kind: WeightType, model_type: ModelType
) -> None:
    transport, sampler = Transport(path(), model_type, kind, train_eps=0.05), ks.RootLoss()
    SampledTransport(transport, sampler, torch.optim.SGD(Network().parameters()))
    t = torch.linspace(0.1, 0.9, 9)
    weight = torch.ones(9) if sampler.loss_weight is None else sampler.loss_weight(t)
    time, noise, data = time_of(transport, t), torch.randn(9, 4), torch.randn(9, 4)
    transport.sample = lambda x1: (time, noise, x1)
    slopes = []
    for off in (0.0, 1.0):  # an error of 1 in each element of the output

        def model(x: Tensor, t: Tensor, off: float = off) -> Tensor:
            sigma = transport.path_sampler.compute_sigma_t(t)[0][:, None]
            velocity = transport.path_sampler.plan(t, noise, data)[2]
            right = {ModelType.NOISE: noise, ModelType.SCORE: -noise / sigma, ModelType.VELOCITY: velocity}[model_type]
            return right + off

        with torch.no_grad():
            slopes.append(transport.training_losses(model, data)["loss"])
    assert_close(slopes[0], torch.zeros(9), rtol=0, atol=1e-6)
    assert_close(slopes[1], weight, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_the_process_is_read_from_the_transport(path: Any) -> None:
    transport = Transport(path(), train_eps=1e-3)
    process, t = process_of(transport), torch.tensor([0.1, 0.5, 0.9])
    time = time_of(transport, t)
    assert_close(process.time(t), time)
    assert_close(process.alpha(t), transport.path_sampler.compute_alpha_t(time)[0])
    assert_close(process.sigma(t), transport.path_sampler.compute_sigma_t(time)[0])
    ks.LogNormalSigma(process)
    x0, noise = torch.randn(3, 4), torch.randn(3, 4)
    if path is not VPCPlan:  # which keeps off an end, so that our time runs a little slower than SiT's
        at = process.at(t)
        ours = process.prediction.target(x0, noise, at.alpha[:, None], at.sigma[:, None])
        assert_close(ours, transport.path_sampler.plan(time, noise, x0)[2], rtol=1e-3, atol=1e-3)


def test_without_gradients_and_once_removed_all_is_as_it_was() -> None:
    loop, plain = Loop(Transport(), root_loss()), Loop(Transport(), None)
    x = torch.randn(16, 4)

    def loss(of: Loop) -> Tensor:
        torch.manual_seed(7)
        return of.transport.training_losses(of.model, x, {"y": torch.zeros(16)})["loss"].detach()

    with torch.no_grad():
        assert_close(loss(loop), loss(plain), rtol=0, atol=0)
    assert int(loop.sampler.draws.step) == 0
    loop.sampled.remove()
    assert_close(loss(loop), loss(plain), rtol=0, atol=0)
    assert loop.transport.training_losses(loop.model, x)["loss"].shape == (16,)


def test_accumulated_batches_all_teach() -> None:
    loop = Loop(Transport(), root_loss())
    for step in range(3):
        for _ in range(2):
            loop.transport.training_losses(loop.model, torch.randn(16, 4), {"y": torch.rand(16)})[
                "loss"
            ].sum().backward()
        loop.opt.step()
        loop.opt.zero_grad()
        assert int(loop.sampler.squares.num_seen.sum()) == 32 * (step + 1)


def test_what_is_not_sits_is_refused() -> None:
    model = Network()
    opt = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="transport must be SiT's, got a ICPlan without sample"):
        SampledTransport(ICPlan(), ks.Uniform(), opt)
    transport = Transport()
    SampledTransport(transport, ks.Uniform(), opt)
    with pytest.raises(ValueError, match=r"call its remove\(\) first"):
        SampledTransport(transport, ks.Uniform(), opt)
    turned = Transport()
    turned.path_sampler.compute_alpha_t = lambda t: (1 - t, -1)
    with pytest.raises(ValueError, match="must run from noise at 0 to data at 1, got shares of data"):
        SampledTransport(turned, ks.Uniform(), opt)


@pytest.mark.parametrize("given", [ICPlan(), GVPCPlan(), Transport()], ids=lambda given: type(given).__name__)
def test_a_path_sampler_sends_sits_paths_to_their_own_adapter(given: Any) -> None:
    for use in (lambda: PathSampler(ks.Uniform(), given), lambda: path_process(given)):
        with pytest.raises(ValueError, match=r"called as SiT's: use kairostep.integrations.sit.SampledTransport"):
            use()
