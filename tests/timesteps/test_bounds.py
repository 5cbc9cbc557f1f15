"""No loss, however hostile, takes a learning sampler out of its bounds: density within floor and cap, sound weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import kairostep as ks

K = 20
NAN = float("nan")
PROCESSES = {
    "linear": (ks.DiscreteProcess.linear(), ks.EPSILON),
    "zero_terminal": (ks.DiscreteProcess.linear().with_zero_terminal_snr(), ks.V),
    "flow": (ks.FlowProcess(), ks.VELOCITY),
    "edm": (ks.EDMProcess(), ks.EDMProcess().prediction),
}


def bin_of(t: Tensor) -> Tensor:
    return (t * K).long().clamp(max=K - 1)


Attack = Callable[[int, Tensor], Tensor]  # (number of half-steps, t) -> factor on the loss
ATTACKS: dict[str, Attack] = {
    "one_bin": lambda now, t: torch.where(bin_of(t) == 7, 1e6 * 0.8**now, 0.0),
    "last_bin": lambda now, t: torch.where(bin_of(t) == K - 1, 1e6 * 0.8**now, 1e-6),
    "thousandfold": lambda now, t: torch.where(bin_of(t) % 2 == 0, 1e3 * 0.8**now, 1.0),
    "thousandfold_slope": lambda now, t: 1e3**t * 0.8 ** (now * t),
    "alternating": lambda now, t: torch.where((t < 0.5) == (now // 2 % 2 == 0), 1e6, 1e-6),
    "alternating_within_a_step": lambda now, t: torch.where((t < 0.5) == (now % 2 == 0), 1e6, 1e-6),
    "rising": lambda now, t: torch.where(t < 0.1, 1.5**now, 1.0),
    "nan_window": lambda now, t: torch.full_like(t, NAN) if 4 <= now < 12 else 0.8 ** (now * t),
    "nan_bins": lambda now, t: torch.where(bin_of(t) < 15, NAN, 0.8**now),
    "nan": lambda now, t: torch.full_like(t, NAN),
    "zeros": lambda now, t: torch.zeros_like(t),
    "zeros_later": lambda now, t: torch.where(t < 0.3, 1.0, 0.0) * (now < 10),
    "from_zero": lambda now, t: torch.where(bin_of(t) == 3, 0.0 if now < 5 else 1e12, 0.9 ** (now * t)),
    "huge": lambda now, t: torch.where(t < 0.5, 1e14 * 0.8**now, 1e14),
    "beyond_float": lambda now, t: torch.where(t < 0.5, 1e38, -1e38),
}


class Scene:
    """A small training problem on one process, its loss multiplied by an attack."""

    def __init__(self, process: str, attack: str, num_rows: int = 16) -> None:
        (self.process, prediction), self.attack, self.num_rows = PROCESSES[process], ATTACKS[attack], num_rows
        self.objective = ks.Objective(self.process, prediction)
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.model = nn.Linear(2, 2)
            self.x0 = torch.randn(num_rows, 2)
        self.now = 0

    def loss_at(self, rows: Tensor, t: Tensor) -> Tensor:
        """Return the losses of rows at t, with a gradient."""
        losses = self.objective(lambda xt, time: self.model(xt), self.x0[rows % self.num_rows], t)
        return losses * self.attack(self.now, t)

    def step(self, sampler: ks.TimestepSampler) -> None:
        """Take one step of a training loop, in which the loss moves on."""
        drawn = sampler.sample(self.x0)
        assert bool((drawn.weight.isfinite() & (drawn.weight > 0)).all())
        assert bool(((drawn.t >= 0) & (drawn.t < 1)).all())
        losses = self.loss_at(torch.arange(self.num_rows), drawn.t).detach()
        with sampler.observe(self.x0, drawn, losses, self.loss_at):
            self.now += 1
        self.now += 1


Build = Callable[[Scene, float], ks.TimestepSampler]  # (scene, floor) -> sampler
HISTOGRAMS: dict[str, Build] = {
    "root_loss": lambda scene, floor: ks.RootLoss(K, 0.5, floor, warmup=1, refresh=1),
    "root_loss_weighted": lambda scene, floor: ks.RootLoss(
        K, floor=floor, loss_weight=lambda t: 1e3 ** (1 - t), warmup=1, refresh=1
    ),
    "infonoise": lambda scene, floor: ks.InfoNoise(
        scene.process, scene.objective.x0_weight, num_bins=K, decay=0.5, warmup=1, refresh=1, floor=floor, unbiased=True
    ),
    "loss_second_moment": lambda scene, floor: ks.LossSecondMoment(K, history=1, floor=floor),
    "gradient_variance": lambda scene, floor: ks.GradientVariance(
        scene.model.parameters(), num_bins=K, every=1, rows_per_gradient=4, decay=0.5, floor=floor, unbiased=True
    ),
}
POLICIES: dict[str, Build] = {
    "adaptive_pair": lambda scene, floor: adaptive(ks.ConstantBeta(), floor, unbiased=True),
    "adaptive_policy": lambda scene, floor: adaptive(ks.BetaPolicy.for_input((2,), 8, 1), floor),
}
SAMPLERS = HISTOGRAMS | POLICIES
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def adaptive(policy: nn.Module, floor: float, *, unbiased: bool = False) -> ks.Adaptive:
    return ks.Adaptive(
        policy,
        probing=ks.Probing(every=1, sweep=8, queue_size=3, reward_rows=8),
        floor=floor,
        learning_rate=3.0,
        unbiased=unbiased,
    )


def assert_bounded(sampler: ks.TimestepSampler, floor: float) -> Tensor:
    """Check the density (K,) against its bounds and return it relative to uniform."""
    density = sampler.density(K)
    assert bool(density.isfinite().all())
    torch.testing.assert_close(density.sum(), torch.tensor(1.0))
    cap = (1 - floor) * K + floor
    relative = density * K
    assert float(relative.min()) >= floor - 1e-4
    assert float(relative.max()) <= cap + 1e-4 * cap
    return relative


@pytest.mark.parametrize("process", PROCESSES)
@every_sampler
def test_one_attack_after_the_other_leaves_the_density_in_its_bounds(name: str, process: str) -> None:
    scene = Scene(process, "zeros")
    sampler = SAMPLERS[name](scene, 0.2)
    for attack in ATTACKS:
        scene.attack, scene.now = ATTACKS[attack], 0
        for _ in range(3):
            scene.step(sampler)
        assert_bounded(sampler, 0.2)
    state = sampler.state_dict().values()
    assert all(bool(value.isfinite().all()) for value in state if isinstance(value, Tensor))


@pytest.mark.parametrize("attack", ATTACKS)
@every_sampler
def test_each_attack_leaves_a_new_sampler_in_its_bounds(name: str, attack: str) -> None:
    scene = Scene("flow", attack)
    sampler = SAMPLERS[name](scene, 0.1)
    for _ in range(K + 2 if name == "gradient_variance" else 8):  # which looks at one bin per step
        scene.step(sampler)
        assert_bounded(sampler, 0.1)


@pytest.mark.parametrize("num_rows", [1, 2])
@every_sampler
def test_bins_never_drawn_leave_the_density_in_its_bounds(name: str, num_rows: int) -> None:
    scene = Scene("linear", "thousandfold", num_rows)
    sampler = SAMPLERS[name](scene, 0.1)
    for _ in range(4):
        scene.step(sampler)
        assert_bounded(sampler, 0.1)


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("name", ["root_loss", "loss_second_moment", "gradient_variance"])
def test_all_loss_in_one_bin_takes_the_density_to_its_cap(name: str, process: str) -> None:
    scene = Scene(process, "one_bin", num_rows=64)
    sampler = SAMPLERS[name](scene, 0.1)
    for _ in range(K + 2):
        scene.step(sampler)
    relative = assert_bounded(sampler, 0.1)
    assert int(relative.argmax()) == 7
    assert float(relative[7]) > 0.99 * (0.9 * K + 0.1)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_driven_far_keeps_its_floor(name: str) -> None:
    scene = Scene("flow", "thousandfold_slope", num_rows=64)
    sampler = SAMPLERS[name](scene, 0.1)
    for _ in range(30):
        scene.now = 0  # the same drop at every step
        scene.step(sampler)
    relative = assert_bounded(sampler, 0.1)
    assert float((relative - 1).abs().max()) > 0.5
