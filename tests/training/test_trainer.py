"""`Trainer.step` is what one would write by hand, bit by bit."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import train_by_hand
from small_runs import ADAPTIVE, LEARNING, SMALL, assert_same_state, configure, same_bits
from torch import Tensor, nn

import kairostep as ks
from kairostep.data import Batch
from kairostep.experiments import build
from kairostep.timesteps.sampler import UNSHOWN
from kairostep.training import Trainer, seed_step
from kairostep.training.assembly import make_accelerator, make_batches, make_trainer
from kairostep.training.row_noise import RowNoise

NUM_STEPS = 30
LABELS: Mapping[str, Any] = {"label_dropout": 0.2}
ACCUMULATE: Mapping[str, Any] = {"accumulate": 2}
CASES: Mapping[str, Mapping[str, Any]] = {
    "uniform": SMALL,
    "adaptive": ADAPTIVE,
    "infonoise": LEARNING["infonoise"],
    "root_loss": LEARNING["root_loss"],
    "adaptive, labels": {**ADAPTIVE, **LABELS},
    "pairs": {**LEARNING["root_loss"], **LABELS, "pairs": True},
    "stable target": {**SMALL, "pairs": True, "stable_target": 32},
    "labels": {**SMALL, **LABELS},
    "accumulated": {**SMALL, **ACCUMULATE},
    "accumulated root_loss": {**LEARNING["root_loss"], **ACCUMULATE},
    "dropout": {**SMALL, "network.dropout": 0.3},
    "all at once": {**ADAPTIVE, **LABELS, **ACCUMULATE, "network.dropout": 0.3, "sampler.unbiased": True},
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_hand_written_one(case: str) -> None:
    config = configure(Path("unused"), CASES[case])
    by_hand = train_by_hand(config, NUM_STEPS)
    accelerator = make_accelerator(config)
    experiment = build(config, accelerator.device)
    trainer = make_trainer(experiment, accelerator)
    batches = make_batches(experiment, accelerator).from_step()
    for t, losses, weight in by_hand.seen:
        step = trainer.step([next(batches) for _ in range(config.accumulate)])
        assert same_bits(step.drawn.t, t)
        assert same_bits(step.losses, losses)
        assert same_bits(step.drawn.weight, weight)
    state = trainer.state_dict()
    assert state["ema"]["num_updates"] == state["step"] == NUM_STEPS
    found = {**{part: state[part] for part in ("model", "optimizer", "sampler")}, "ema": state["ema"]["model"]}
    assert_same_state(dict(sorted(found.items())), dict(sorted(by_hand.state().items())))


# Without a config: a user's own model, data and optimizer


class Denoiser(nn.Module):
    """A small network for points in the plane, with a part that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 2))
        self.register_buffer("num_calls", torch.tensor(0))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Return a velocity."""
        if self.training:
            self.num_calls += 1
        return self.layers(torch.cat([x, t[:, None]], dim=1))


def points(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    angle = torch.rand(64, generator=generator) * 2 * math.pi
    return Batch(torch.stack([angle.cos(), angle.sin()], dim=1), None)


def make_point_trainer(seed: int = 0, history: int = 3, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    objective = ks.Objective(ks.FlowProcess(), ks.VELOCITY)
    return Trainer(model, objective, ks.LossSecondMoment(10, history=history), optimizer, seed=seed, **options)


def test_a_user_trains_points_without_config() -> None:
    trainer = make_point_trainer(ema_decay=0.9)
    before = held_out_loss(trainer)
    for k in range(300):
        trainer.step([points(k)])
    assert held_out_loss(trainer) < 0.8 * before
    assert trainer.step_number == 300
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1  # no schedule was asked for


@torch.no_grad()
def held_out_loss(trainer: Trainer) -> float:
    x0 = torch.cat([points(1000 + k).x0 for k in range(16)])
    generator = torch.Generator().manual_seed(0)
    noise, t = torch.randn(x0.shape, generator=generator), torch.rand(len(x0), generator=generator)
    return float(trainer.objective(trainer.network, x0, t, noise=noise).mean())


def test_a_users_trainer_is_the_hand_written_loop_too() -> None:
    trainer = make_point_trainer(seed=5)
    torch.manual_seed(0)
    model, sampler = Denoiser(), ks.LossSecondMoment(10, history=3)
    objective = ks.Objective(ks.FlowProcess(), ks.VELOCITY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for k in range(NUM_STEPS):
        trainer.step([points(k)])
        x0 = points(k).x0
        seed_step(torch.device("cpu"), 5, 0, k)
        drawn = sampler.sample(x0)
        noise = RowNoise(5, 0, x0.device)
        losses = objective(model, x0, drawn.t, noise=noise.of_batch(noise.step_key(k, 1), x0))
        (losses * drawn.weight).mean().backward()
        with sampler.observe(x0, drawn, losses.detach(), lambda rows, t, x0=x0: objective(model, x0[rows], t)):
            optimizer.step()
        optimizer.zero_grad()
    assert_same_state(trainer.network.state_dict(), model.state_dict())
    assert_same_state(trainer.sampler.state_dict(), sampler.state_dict())


def test_pairs_train_on_one_x0_and_opposite_noise() -> None:
    seen: list[Tensor] = []
    trainer = make_point_trainer(pairs=True)
    trainer.network.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    step = trainer.step([points(0)])
    t = step.drawn.t
    order = t.argsort()
    first, second = order[0], order[1]
    x0_and_noise = torch.stack([torch.stack([1 - t[k], sign * t[k]]) for k, sign in ((first, 1), (second, -1))])  # x_t
    solved = torch.linalg.solve(
        x0_and_noise, torch.stack([seen[0][first], seen[0][second]])
    )  # x0 and noise of the pair
    apart = (points(0).x0 - solved[0]).norm(dim=1)
    assert float(apart.min()) < 1e-4  # one of the batch: both times have the same x0, and opposite noises
    assert int(apart.argmin()) == int(first)


def test_pairs_are_refused_where_the_image_decides_about_t() -> None:
    model = Denoiser()
    sampler = ks.Adaptive(ks.BetaPolicy.for_input((2,), 8, 1))
    objective = ks.Objective(ks.FlowProcess(), ks.VELOCITY)
    with pytest.raises(ValueError, match="must not draw t by the image, got Adaptive, which does: pass pairs=False"):
        Trainer(model, objective, sampler, torch.optim.SGD(model.parameters(), lr=0.1), pairs=True)


def test_a_trainer_goes_on_from_its_state_bitwise() -> None:
    whole, first, second = (make_point_trainer() for _ in range(3))
    for k in range(20):
        whole.step([points(k)])
    for k in range(8):
        first.step([points(k)])
    second.load_state_dict(first.state_dict())
    for k in range(8, 20):
        second.step([points(k)])
    assert_same_state(second.state_dict(), whole.state_dict())


def test_seeds_of_steps_ranks_and_runs_differ() -> None:
    numbers = set()
    for seed in range(3):
        for rank in range(3):
            for step in range(50):
                seed_step(torch.device("cpu"), seed, rank, step)
                numbers.add(float(torch.rand((), dtype=torch.float64)))
    assert len(numbers) == 3 * 3 * 50


def test_steps_do_not_depend_on_random_numbers_drawn_between_them() -> None:
    quiet, noisy = make_point_trainer(), make_point_trainer()
    for k in range(5):
        quiet.step([points(k)])
        torch.rand(k)
        noisy.step([points(k)])
        torch.manual_seed(k)
    assert_same_state(noisy.state_dict(), quiet.state_dict())


# Clipping


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_clipped_to_the_norm(accumulate: int) -> None:
    moves = {}
    for max_grad_norm in (None, 1e-3, 1e6):
        torch.manual_seed(0)
        model = Denoiser().double()
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # a step is minus the gradient
        trainer = Trainer(
            model, ks.Objective(ks.FlowProcess(), ks.VELOCITY), ks.Uniform(), optimizer, max_grad_norm=max_grad_norm
        )
        trainer.step([Batch(points(k).x0.double(), None) for k in range(accumulate)])
        moves[max_grad_norm] = nn.utils.parameters_to_vector(model.parameters()).detach() - before
    plain, clipped, loose = moves[None], moves[1e-3], moves[1e6]
    assert plain.norm() > 0.1
    torch.testing.assert_close(clipped, plain * 1e-3 / plain.norm(), rtol=1e-5, atol=1e-9)  # torch adds 1e-6 to it
    torch.testing.assert_close(loose, plain, rtol=0, atol=1e-12)


def test_a_step_of_many_batches_does_not_take_the_sampler_for_an_unshown_one() -> None:
    trainer = make_point_trainer()
    trainer.step([points(k) for k in range(UNSHOWN + 1)])  # warnings are errors
    assert trainer.sampler.num_unshown == 0


def test_a_step_of_many_batches_teaches_the_losses_of_all_of_them() -> None:
    trainer, expected = make_point_trainer(history=384), ks.LossSecondMoment(10, history=384)  # all that is drawn
    for k in range(3):
        step = trainer.step([points(2 * k), points(2 * k + 1)])
        assert step.losses.shape == (128,)
        expected.record(step.drawn.t, step.losses)
    assert int(trainer.sampler.num_seen.sum()) == 3 * 128
    assert torch.equal(trainer.sampler.losses, expected.losses)


def test_clipping_is_of_all_parameters_together() -> None:
    trainer = make_point_trainer(max_grad_norm=1e-4)
    before = nn.utils.parameters_to_vector(trainer.network.parameters()).detach().clone()
    trainer.step([points(0)])
    move = nn.utils.parameters_to_vector(trainer.network.parameters()).detach() - before
    assert float(move.norm()) == pytest.approx(0.1 * 1e-4, rel=0.02)  # lr times norm
