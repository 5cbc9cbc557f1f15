"""Our samplers with the matchers of torchcfm.

Its package demands torchdyn and with it torchvision, so it lies beside the environment. Reproduced here by call shape,
from torchcfm 1.0.7: `compute_mu_t`, `compute_sigma_t`, `ot_sampler`. Tests of the real library run where it imports.
"""

import copy
import math
from typing import Any

import pytest
import torch
from real_libraries import import_real
from torch import Tensor, nn

import kairostep as ks
from kairostep.integrations.torchcfm import PathSampler, path_process

T = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)


class Matcher:
    """A matcher on the straight path, with noise `sigma` on top."""

    def __init__(self, sigma: float = 0.0) -> None:
        self.sigma = sigma

    def compute_mu_t(self, x0: Tensor, x1: Tensor, t: Tensor) -> Tensor:
        """Return the mean of x_t."""
        t = t.reshape(-1, *[1] * (x0.ndim - 1))
        return t * x1 + (1 - t) * x0

    def compute_sigma_t(self, t: Tensor) -> float:
        """Return the deviation of x_t."""
        return self.sigma

    def sample_location_and_conditional_flow(
        self, x0: Tensor, x1: Tensor, t: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return t, x_t and the velocity."""
        t = torch.rand(len(x0)) if t is None else t
        return t, self.compute_mu_t(x0, x1, t) + self.sigma * torch.randn_like(x0), x1 - x0


class PairingMatcher(Matcher):
    """A matcher that pairs data with noise by optimal transport."""

    ot_sampler = "a plan"


def matchers() -> list[Any]:
    library = import_real("torchcfm", "torchvision")
    return [
        library.ConditionalFlowMatcher(0.1),
        library.TargetConditionalFlowMatcher(0.05),
        library.VariancePreservingConditionalFlowMatcher(0.0),
        library.ExactOptimalTransportConditionalFlowMatcher(0.0),
        library.SchrodingerBridgeConditionalFlowMatcher(0.5),
    ]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 2))


def losses_at(matcher: Any, model: nn.Module, x1: Tensor, t: Tensor | None) -> Tensor:
    """Return the loss of torchcfm's examples, by sample: (B,)."""
    t, xt, ut = matcher.sample_location_and_conditional_flow(torch.randn_like(x1), x1, t)
    return (model(torch.cat([xt, t[:, None]], 1)) - ut).square().mean(1)


def trained(matcher: Any, sampler: PathSampler, steps: range, model: nn.Module, optimizer: Any) -> None:
    for step in steps:
        torch.manual_seed(step)
        x1 = torch.randn(16, 2) * 0.1 + 1
        drawn = sampler.sample(x1)
        losses = losses_at(matcher, model, x1, drawn.t)
        optimizer.zero_grad()
        (losses * drawn.weight).mean().backward()
        with sampler.observe(x1, drawn, losses):
            optimizer.step()


def check_resume(matcher: Any) -> None:
    runs = []
    for parts in ([range(20)], [range(9), range(9, 20)]):
        sampler, model = PathSampler(ks.RootLoss(num_bins=5, warmup=2, refresh=2, gate=1.0), matcher), network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for part in parts:
            saved = copy.deepcopy([thing.state_dict() for thing in (sampler.sampler, model, optimizer)])
            sampler, model = PathSampler(ks.RootLoss(num_bins=5, warmup=2, refresh=2, gate=1.0), matcher), network()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            for thing, state in zip((sampler.sampler, model, optimizer), saved, strict=True):
                thing.load_state_dict(state)
            trained(matcher, sampler, part, model, optimizer)
        runs.append({**model.state_dict(), "density": sampler.sampler.density(5)})
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)
    assert float(runs[0]["density"].max()) > 0.202


def check_uniform(matcher: Any) -> None:
    """Compare with the library drawing its own t, which is made to be the same."""
    x1 = torch.randn(32, 2) + 1
    same = 1 - ks.Uniform().sample(x1).t
    with pytest.MonkeyPatch.context() as patch:
        model = network()
        patch.setattr(torch, "rand", lambda *shape, **options: same)
        torch.manual_seed(1)
        theirs = losses_at(matcher, model, x1, None)
        theirs.mean().backward()
    expected = [theirs.detach(), *(parameter.grad for parameter in model.parameters())]
    model, drawn = network(), PathSampler(ks.Uniform(), matcher).sample(x1)
    torch.manual_seed(1)
    losses = losses_at(matcher, model, x1, drawn.t)
    (losses * drawn.weight).mean().backward()
    ours = [losses.detach(), *(parameter.grad for parameter in model.parameters())]
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_uniform_gives_a_matchers_losses_and_gradients_on_the_same_numbers() -> None:
    check_uniform(Matcher(0.1))


def test_root_loss_trains_and_resumes_bitwise() -> None:
    check_resume(Matcher(0.1))


def test_the_process_has_the_noise_on_top_in_it() -> None:
    process = path_process(Matcher(0.1))
    torch.testing.assert_close(process.alpha(T), 1 - T)
    torch.testing.assert_close(process.sigma(T), (T.square() + 0.01).sqrt())
    with pytest.raises(ValueError, match="noise on top that its velocity leaves out"):
        _ = process.prediction
    plain, flow = path_process(Matcher()), ks.FlowProcess()
    torch.testing.assert_close(plain.log_snr(T), flow.log_snr(T))
    expected = ks.min_snr()(flow.log_snr(T), ks.VELOCITY)
    torch.testing.assert_close(ks.min_snr()(plain.log_snr(T), plain.prediction), expected)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="pair before"):
        PathSampler(ks.Adaptive(ks.BetaPolicy.for_input((2,))), PairingMatcher())
    with pytest.raises(ValueError, match="independent of the data"):
        path_process(PairingMatcher())

    class Backwards(Matcher):
        """Data at 0."""

        def compute_mu_t(self, x0: Tensor, x1: Tensor, t: Tensor) -> Tensor:
            """Return the mean of x_t."""
            return super().compute_mu_t(x1, x0, t)

    with pytest.raises(ValueError, match="must run from noise at 0 to data at 1"):
        PathSampler(ks.Uniform(), Backwards())


@pytest.mark.parametrize("number", range(5))
def test_the_real_matchers_give_their_own_losses_under_uniform_and_teach_root_loss(number: int) -> None:
    matcher = matchers()[number]
    if not hasattr(matcher, "ot_sampler"):  # a plan draws from numpy
        check_resume(matcher)
        check_uniform(matcher)
    else:
        sampler, model = PathSampler(ks.RootLoss(num_bins=5, warmup=2, refresh=2, gate=1.0), matcher), network()
        trained(matcher, sampler, range(20), model, torch.optim.Adam(model.parameters(), lr=1e-2))
        assert float(sampler.sampler.density(5).max()) > 0.202


def test_the_process_of_the_real_matchers_is_their_path() -> None:
    straight, target, curved, *coupled = matchers()
    torch.testing.assert_close(path_process(straight).sigma(T), (T.square() + 0.01).sqrt())
    torch.testing.assert_close(path_process(target).alpha(T), 1 - T)
    torch.testing.assert_close(path_process(target).sigma(T), 1 - 0.95 * (1 - T))
    torch.testing.assert_close(path_process(curved).alpha(T), (math.pi / 2 * (1 - T)).sin())
    x0, x1 = torch.randn(2, 19, 3, dtype=torch.float64)
    _, _, ut = curved.sample_location_and_conditional_flow(x0, x1, 1 - T)
    process = path_process(curved)
    alpha, sigma = process.alpha(T)[:, None], process.sigma(T)[:, None]
    torch.testing.assert_close(process.prediction.target(x1, x0, alpha, sigma), ut)
    for matcher in coupled:
        with pytest.raises(ValueError, match="couples them"):
            path_process(matcher)
