"""Our losses in EDM's and EDM2's training loops.

Those are not on PyPI. Reproduced here by call shape, from NVlabs/edm and NVlabs/edm2 (training/loss.py,
training/training_loop.py, torch_utils/distributed.py): their losses, written again from the papers' equations, the call
`loss_fn(net=, images=, labels=, augment_pipe=)` with `loss.sum().mul(1 / batch_size).backward()`, snapshots that pickle
a deep copy of the loss, and EDM2's checkpoints by `state_dict`.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from edm_like import Loop, Net, augment, constructed
from torch import Tensor

import kairostep as ks
from kairostep.integrations.edm import EDM2Loss, EDMLoss
from kairostep.integrations.k_diffusion import SampleDensity
from kairostep.integrations.noise_levels import LogNormal


def their_loss(net: Net, images: Tensor, labels: Tensor, augment_pipe: Any, sigma: Tensor) -> Tensor:
    """Return EDM's loss at known noise levels (B,)."""
    sigma = sigma.view(-1, 1, 1, 1)
    weight = (sigma**2 + 0.5**2) / (sigma * 0.5) ** 2
    y, augment_labels = augment_pipe(images) if augment_pipe is not None else (images, None)
    noise = torch.randn_like(y) * sigma
    return weight * (net(y + noise, sigma, labels, augment_labels=augment_labels) - y) ** 2


def their_loss_2(net: Net, images: Tensor, labels: Tensor, augment_pipe: None, sigma: Tensor) -> Tensor:
    """Return EDM2's loss at known noise levels (B,)."""
    sigma = sigma.view(-1, 1, 1, 1)
    weight = (sigma**2 + 0.5**2) / (sigma * 0.5) ** 2
    noise = torch.randn_like(images) * sigma
    denoised, logvar = net(images + noise, sigma, labels, return_logvar=True)
    return (weight / logvar.exp()) * ((denoised - images) ** 2) + logvar


def root_loss() -> ks.RootLoss:
    return ks.RootLoss(num_bins=5, warmup=4, refresh=2, gate=1.0)


def adaptive() -> ks.Adaptive:
    return ks.Adaptive(
        ks.BetaPolicy.for_input((1, 4, 4), hidden=8), probing=ks.Probing(every=3, sweep=10, reward_rows=4)
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "augment_pipe"),
    [(EDMLoss, their_loss, None), (EDMLoss, their_loss, augment), (EDM2Loss, their_loss_2, None)],
)
def test_uniform_gives_their_losses_and_gradients_on_the_same_numbers(
    ours: Any, theirs: Any, augment_pipe: Any
) -> None:
    images, labels = torch.rand(8, 1, 4, 4), torch.rand(8, 3)
    loss_fn = ours(sampler="uniform")
    normal = torch.special.ndtri(ks.Uniform().sample(images).t.double())  # what their randn would have given
    sigma = (normal * loss_fn.P_std + loss_fn.P_mean).exp().float()
    extra = {} if ours is EDM2Loss else {"augment_pipe": augment_pipe}
    both = []
    for call in (
        lambda net: loss_fn(net, images, labels, **extra),
        lambda net: theirs(net, images, labels, augment_pipe, sigma),
    ):
        net = Net()
        torch.manual_seed(1)
        loss = call(net)
        loss.sum().backward()
        both.append([loss.detach(), *(parameter.grad for parameter in net.layers.parameters())])
    torch.testing.assert_close(both[0], both[1])
    assert both[0][0].shape == images.shape


@pytest.mark.parametrize("loss", [EDMLoss, EDM2Loss])
def test_uniform_draws_the_log_normal_of_the_paper(loss: Any) -> None:
    loss_fn = loss(sampler="uniform")
    log_sigma = loss_fn.process.sigma(loss_fn.sampler.sample(torch.empty(20_000, 0)).t).log()
    torch.testing.assert_close(log_sigma.mean(), torch.tensor(loss_fn.P_mean), atol=1e-3, rtol=0)
    torch.testing.assert_close(log_sigma.std(), torch.tensor(loss_fn.P_std), atol=2e-3, rtol=0)


@pytest.mark.parametrize("loss", [EDMLoss, EDM2Loss])
def test_root_loss_keeps_the_objective(loss: Any) -> None:
    sampler = root_loss()
    loop = Loop(loss(sampler=sampler))
    for step in range(10):
        loop.step(step)
    assert float(sampler.density(5).max()) > 0.21
    images, net = torch.rand(4000, 1, 4, 4), loop.net
    with torch.no_grad():
        torch.manual_seed(0)
        learned = loop.loss_fn(net, images).mean()
        torch.manual_seed(0)
        uniform = loss(sampler="uniform")(net, images).mean()
    torch.testing.assert_close(learned, uniform, rtol=0.05, atol=0)


@pytest.mark.parametrize("loss", [EDMLoss, EDM2Loss])
@pytest.mark.parametrize("make", [root_loss, adaptive])
def test_a_checkpoint_by_state_dict_resumes_bitwise(loss: Any, make: Any) -> None:
    whole, first, second = (Loop(loss(sampler=make())) for _ in range(3))
    for step in range(12):
        whole.step(step)
    for step in range(7):
        first.step(step)
    data = {name: copy.deepcopy(getattr(first, name).state_dict()) for name in ("net", "loss_fn", "optimizer")}
    for name, state in data.items():
        getattr(second, name).load_state_dict(state)
    for step in range(7, 12):
        second.step(step)
    torch.testing.assert_close(second.net.state_dict(), whole.net.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(second.loss_fn.state_dict(), whole.loss_fn.state_dict(), rtol=0, atol=0)
    assert whole.loss_fn.state_dict()  # there is something to lose


@pytest.mark.parametrize("make", [root_loss, adaptive])
def test_a_pickled_snapshot_keeps_what_was_learned_and_no_optimizer(make: Any) -> None:
    loop = Loop(EDMLoss(sampler=make()))
    for step in range(8):
        loop.step(step)
    snapshot = pickle.loads(pickle.dumps({"loss_fn": copy.deepcopy(loop.loss_fn).eval().requires_grad_(False).cpu()}))
    torch.testing.assert_close(snapshot["loss_fn"].state_dict(), loop.loss_fn.state_dict(), rtol=0, atol=0)
    assert snapshot["loss_fn"]._observer is None
    resumed = EDMLoss(sampler=make())
    resumed.load_state_dict(snapshot["loss_fn"].state_dict())
    torch.testing.assert_close(resumed.sampler.density(5), loop.loss_fn.sampler.density(5))
    images = torch.rand(8, 1, 4, 4)
    torch.testing.assert_close(resumed.sampler.sample(images).t, loop.loss_fn.sampler.sample(images).t)


@pytest.mark.parametrize("name", ["uniform", "laplace", "log_normal_sigma", "speed", "loss_second_moment", "infonoise"])
def test_a_loss_with_a_sampler_by_name_can_be_pickled(name: str) -> None:
    loss_fn = pickle.loads(pickle.dumps(EDM2Loss(sampler=name)))
    assert loss_fn(Net(), torch.rand(8, 1, 4, 4)).shape == (8, 1, 4, 4)


def test_a_loss_is_made_by_dotted_path_from_plain_options() -> None:
    path = "kairostep.integrations.edm.EDMLoss"
    assert isinstance(constructed(path).sampler, ks.RootLoss)
    loss_fn = constructed(path, P_mean=-0.8, sampler="root_loss", sampler_kwargs={"num_bins": 7})
    assert loss_fn.sampler.density(7).shape == (7,)
    assert loss_fn.P_mean == -0.8
    assert isinstance(constructed(path, sampler="laplace").sampler, ks.Laplace)  # takes the process
    infonoise = constructed(path, sampler="infonoise").sampler
    t = torch.linspace(0.05, 0.95, 11)
    sigma = infonoise.process.sigma(t)
    torch.testing.assert_close(infonoise.loss_weight(t), (sigma**2 + 0.25) / (sigma * 0.5) ** 2)
    with pytest.raises(ValueError, match="samplers are adaptive, beta"):
        constructed(path, sampler="rootloss")
    with pytest.raises(ValueError, match="sampler must be a kairostep sampler"):
        constructed(path, sampler="min_snr")
    with pytest.raises(ValueError, match="sampler_kwargs belong to the name"):
        EDMLoss(sampler=ks.Uniform(), sampler_kwargs={"seed": 1})


def test_the_sampler_is_shown_the_loss_before_its_weight() -> None:
    sampler = ks.FixedBeta(2.0, 2.0, unbiased=True)
    shown = []
    sampler.observe = lambda x0, drawn, losses, loss_at=None: shown.append(losses) or torch.no_grad()
    images, net = torch.rand(8, 1, 4, 4), Net()
    loss = EDMLoss(sampler=sampler)(net, images)
    weight = ks.FixedBeta(2.0, 2.0, unbiased=True).sample(images).weight
    torch.testing.assert_close(shown[0] * weight, loss.detach().flatten(1).mean(1))
    with torch.no_grad():
        EDMLoss(sampler=sampler)(net, images)
    assert len(shown) == 1  # an evaluation teaches nothing


def test_a_sampler_that_asks_for_losses_needs_the_optimizer() -> None:
    with pytest.raises(ValueError, match=r"an EDM loss before attach\(optimizer\) cannot evaluate losses"):
        EDMLoss(sampler=adaptive())(Net(), torch.rand(8, 1, 4, 4))
    with pytest.raises(ValueError, match="P_std must be a finite number above 0"):
        EDMLoss(P_std=0.0)


class AtZero(ks.Uniform):
    """Draws t = 0, to which a table's draw may round."""

    def sample(self, x0: Tensor) -> ks.Timesteps:
        """Return the clean end for each row."""
        return ks.Timesteps(torch.zeros(len(x0)), torch.ones(len(x0)))


def test_a_draw_rounded_to_zero_has_a_level_above_zero() -> None:
    density = {"sigma_sample_density": {"type": "loglogistic"}}
    for sigma in (
        SampleDensity.from_config(AtZero(), density)([4]),
        SampleDensity(AtZero(), LogNormal(-1.2, 1.2))([4]),
    ):
        assert (sigma > 0).all()
    assert EDMLoss(sampler=AtZero())(Net(), torch.randn(4, 1, 8, 8)).isfinite().all()
