"""Our samplers in lucidrains' denoising-diffusion-pytorch.

Its package demands torchvision, so it lies beside the environment. Reproduced in `lucidrains_like`, from 2.3.4: a
GaussianDiffusion with its buffers, `objective`, `forward(img, *args, times=None, loss_reduction="mean", **kwargs)`,
`random_times`, `p_losses` and self-conditioning by Python's coin. The real GaussianDiffusion goes through the same
tests, and the real Unet, GaussianDiffusion1D and Trainer through those of `test_lucidrains_trainer`.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lucidrains_like import STAND_INS, GaussianDiffusion, Network, T
from real_libraries import import_real
from torch import Tensor

import kairostep as ks
from kairostep.integrations.lucidrains import (
    SampledDiffusion,
    has_min_snr,
    objective_of,
    prediction_of,
    process_of,
)

Make = Callable[..., Any]


@pytest.fixture(params=["call shape", "real library"])
def make(request: pytest.FixtureRequest) -> Make:
    """Return the maker of a diffusion around a small network."""
    diffusion = GaussianDiffusion
    if request.param == "real library":
        diffusion = import_real("denoising_diffusion_pytorch", *STAND_INS).GaussianDiffusion

    def made(*, self_condition: bool = False, **options: Any) -> Any:
        network = Network(self_condition=self_condition)
        return diffusion(network, image_size=4, **{"timesteps": T, **options})

    return made


class Loop:
    """Their Trainer's step: `loss = model(data); backward; opt.step(); opt.zero_grad()`."""

    def __init__(self, diffusion: Any, sampler: ks.TimestepSampler | None) -> None:
        self.model, self.sampler = diffusion, sampler
        self.opt = torch.optim.Adam(diffusion.parameters(), lr=1e-2)
        self.sampled = None if sampler is None else SampledDiffusion(diffusion, sampler, self.opt)

    def step(self, step: int, rounds: int = 2) -> None:
        """Train on two micro-batches."""
        torch.manual_seed(step)
        random.seed(step)
        self.model.train()
        for _ in range(rounds):
            loss = self.model(torch.rand(8, 1, 4, 4)) / rounds
            loss.backward()
        self.opt.step()
        self.opt.zero_grad()


def root_loss() -> ks.RootLoss:
    return ks.RootLoss(num_bins=5, warmup=4, refresh=2, gate=1.0)


def adaptive() -> ks.Adaptive:
    policy = ks.BetaPolicy.for_input((1, 4, 4), hidden=8)
    return ks.Adaptive(policy, num_steps=T, probing=ks.Probing(every=3, sweep=10, reward_rows=4))


@pytest.mark.parametrize("objective", ["pred_noise", "pred_x0", "pred_v"])
def test_uniform_gives_their_losses_and_gradients_on_the_same_numbers(make: Make, objective: str) -> None:
    images = torch.rand(8, 1, 4, 4)
    times = ks.Uniform().sample(images).index(T)
    ours, theirs = (make(objective=objective, min_snr_loss_weight=True) for _ in range(2))
    SampledDiffusion(ours, ks.Uniform(), torch.optim.SGD(ours.parameters()))
    theirs.random_times = lambda batch_size: times
    both = []
    for diffusion in (ours, theirs):
        torch.manual_seed(3)
        loss = diffusion(images)
        loss.backward()
        both.append([loss.detach(), *(parameter.grad for parameter in diffusion.parameters())])
    torch.testing.assert_close(both[0], both[1], rtol=0, atol=0)


def test_losses_are_weighted_and_reduced_as_the_caller_asks(make: Make) -> None:
    images = torch.rand(8, 1, 4, 4)
    drawn = ks.LogitNormal(unbiased=True).sample(images)
    losses = []
    for reduction in ("none", "mean"):
        diffusion = make()
        torch.manual_seed(3)
        plain = diffusion(images, times=drawn.index(T), loss_reduction="none")
        sampled = SampledDiffusion(diffusion, ks.LogitNormal(unbiased=True), torch.optim.SGD(diffusion.parameters()))
        torch.manual_seed(3)
        losses.append(diffusion(images, loss_reduction=reduction))
        torch.manual_seed(3)
        torch.testing.assert_close(diffusion(images, times=drawn.index(T), loss_reduction="none"), plain)
        sampled.remove()
    torch.testing.assert_close(losses[0], plain * drawn.weight)
    torch.testing.assert_close(losses[1], (plain * drawn.weight).mean())


def test_in_eval_mode_without_gradients_and_once_removed_all_is_as_it_was(make: Make) -> None:
    diffusion, untouched, images = make(), make(), torch.rand(8, 1, 4, 4)
    sampler = root_loss()
    sampled = SampledDiffusion(diffusion, sampler, torch.optim.SGD(diffusion.parameters()))

    def loss(of: Any) -> Tensor:
        torch.manual_seed(4)
        return of(images)

    diffusion.eval()
    torch.testing.assert_close(loss(diffusion), loss(untouched), rtol=0, atol=0)
    diffusion.train()
    with torch.no_grad():
        torch.testing.assert_close(loss(diffusion), loss(untouched), rtol=0, atol=0)
    sampled.remove()
    torch.testing.assert_close(loss(diffusion), loss(untouched), rtol=0, atol=0)
    assert int(sampler.squares.num_seen.sum()) == 0


@pytest.mark.parametrize("kind", [root_loss, adaptive])
@pytest.mark.parametrize("self_condition", [False, True])
def test_a_learning_sampler_trains_and_resumes_bitwise(make: Make, kind: Any, self_condition: bool) -> None:
    whole, first, second = (Loop(make(self_condition=self_condition), kind()) for _ in range(3))
    for step in range(14):
        whole.step(step)
    for step in range(8):
        first.step(step)
    for name in ("model", "opt", "sampler"):
        getattr(second, name).load_state_dict(copy.deepcopy(getattr(first, name).state_dict()))
    for step in range(8, 14):
        second.step(step)
    torch.testing.assert_close(second.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(second.sampler.state_dict(), whole.sampler.state_dict(), rtol=0, atol=0)
    assert float(whole.sampler.density(5).max()) > 0.201


@pytest.mark.parametrize("self_condition", [False, True])
def test_probes_leave_training_as_it_is(make: Make, self_condition: bool) -> None:
    still = ks.Adaptive(
        ks.ConstantBeta(),
        num_steps=T,
        probing=ks.Probing(every=2, sweep=10, reward_rows=4),
        learning_rate=0.0,
        floor=0.5,
    )
    never = ks.Adaptive(
        ks.ConstantBeta(),
        num_steps=T,
        probing=ks.Probing(every=10**6, sweep=10, reward_rows=4),
        learning_rate=0.0,
        floor=0.5,
    )
    never.steps.advance()  # past the first step, which would be probed
    loops = [Loop(make(self_condition=self_condition), sampler) for sampler in (still, never)]
    for step in range(6):
        for loop in loops:
            loop.step(step)
    torch.testing.assert_close(loops[0].model.state_dict(), loops[1].model.state_dict(), rtol=0, atol=0)
    assert int(still.num_probes) > 0
    assert int(never.num_probes) == 0


def test_conditions_go_with_their_rows(make: Make) -> None:
    diffusion, images, noise = make(), torch.rand(8, 1, 4, 4), torch.randn(8, 1, 4, 4)
    sampler = adaptive()
    asked = []
    sampler.observe = lambda x0, drawn, losses, loss_at: (
        asked.append((losses, loss_at(torch.arange(8).flip(0), drawn.t.flip(0)))) or torch.no_grad()
    )
    optimizer = torch.optim.SGD(diffusion.parameters(), lr=0.0)
    SampledDiffusion(diffusion, sampler, optimizer)
    for given in (((images, noise), {}), ((images,), {"noise": noise})):
        diffusion(*given[0], **given[1]).backward()
        optimizer.step()
    for losses, reversed_losses in asked:
        torch.testing.assert_close(reversed_losses.flip(0), losses)


@pytest.mark.parametrize("min_snr", [False, True])
@pytest.mark.parametrize(
    ("objective", "prediction"), [("pred_noise", ks.EPSILON), ("pred_x0", ks.X0), ("pred_v", ks.V)]
)
def test_prediction_process_and_weight_are_read_from_the_library(
    make: Make, objective: str, prediction: Any, min_snr: bool
) -> None:
    diffusion = make(objective=objective, min_snr_loss_weight=min_snr)
    assert prediction_of(diffusion) is prediction
    assert has_min_snr(diffusion) is min_snr
    process, read = process_of(diffusion), objective_of(diffusion)
    torch.testing.assert_close(process.alphas_cumprod.float(), diffusion.alphas_cumprod)
    t = (torch.arange(T, dtype=torch.float64) + 0.5) / T
    torch.testing.assert_close(read.weight(t).float(), diffusion.loss_weight)
    log_snr = process.log_snr(t)
    on_x0 = log_snr.exp().clamp(max=5) if min_snr else log_snr.exp()  # for every prediction alike
    torch.testing.assert_close(read.x0_weight(t), on_x0, rtol=1e-3, atol=1e-6)
    if min_snr:
        torch.testing.assert_close(read.weight(t), ks.min_snr()(log_snr, prediction), rtol=1e-3, atol=1e-6)
    images = torch.rand(T, 1, 4, 4)
    torch.manual_seed(1)
    theirs = diffusion(images, times=torch.arange(T), loss_reduction="none")
    torch.manual_seed(1)
    ours = read(lambda xt, time: diffusion.model(xt, time, None), images * 2 - 1, t.float())
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("objective", "min_snr"), [("pred_v", False), ("pred_x0", False), ("pred_noise", True), ("pred_noise", False)]
)
def test_root_loss_follows_the_weight_times_the_root_of_the_bare_loss(
    make: Make, objective: str, min_snr: bool
) -> None:
    diffusion, sampler = make(objective=objective, min_snr_loss_weight=min_snr), root_loss()
    optimizer = torch.optim.SGD(diffusion.parameters(), lr=0.0)
    SampledDiffusion(diffusion, sampler, optimizer)
    expected = ks.RootLoss(num_bins=5)
    for step in range(4):
        torch.manual_seed(step)
        images = torch.rand(8, 1, 4, 4)
        drawn = copy.deepcopy(sampler).sample(images)
        state = torch.get_rng_state()
        with torch.no_grad():
            weighted = diffusion(images, times=drawn.index(T), loss_reduction="none")
        weight = diffusion.loss_weight[drawn.index(T)]
        expected.record(drawn.t, (weight * (weighted / weight).sqrt()).square())
        torch.set_rng_state(state)
        diffusion(images).backward()
        optimizer.step()
    torch.testing.assert_close(sampler.squares.read(), expected.squares.read(), rtol=1e-4, atol=0)
    assert (sampler.loss_weight is None) == (objective == "pred_noise" and not min_snr)
    own = ks.RootLoss(loss_weight=torch.ones_like)
    SampledDiffusion(diffusion, own, optimizer)
    assert own.loss_weight is torch.ones_like  # as it was made


def test_what_cannot_work_is_refused(make: Make) -> None:
    clipped = make(min_snr_loss_weight=True)
    optimizer = torch.optim.SGD(clipped.parameters())
    with pytest.raises(ValueError, match="weighted once, got Speed"):
        SampledDiffusion(clipped, ks.Speed(process_of(clipped)), optimizer)
    SampledDiffusion(make(), ks.Speed(process_of(clipped)), optimizer).remove()
    for option in ({"offset_noise_strength": 0.1}, {"immiscible": True}):
        with pytest.raises(ValueError, match=f"independent unit noise, got {next(iter(option))}"):
            process_of(make(**option))
    with pytest.raises(ValueError, match=r"must be lucidrains' GaussianDiffusion.*without num_timesteps"):
        SampledDiffusion(Network(), ks.Uniform(), optimizer)
    with pytest.raises(ValueError, match="has it for one alone"):
        objective_of(clipped).weighting(torch.zeros(1), ks.EPSILON)
    sampled = SampledDiffusion(clipped, ks.Uniform(), optimizer)
    with pytest.raises(ValueError, match="return_reduced_loss=False"):
        clipped(torch.rand(8, 1, 4, 4), return_reduced_loss=False)
    sampled.remove()
