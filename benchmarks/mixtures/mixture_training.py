"""Training one arm on one mixture: the networks of all seeds are one batched network under one optimizer."""

import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import torch
from mixtures import Examination, Setting, Slices, generate, setting_of
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

import kairostep as ks

BATCH, WIDTH, LEARNING_RATE, AVERAGE_DECAY = 64, 64, 1e-3, 0.99
NUM_CHECKPOINTS = 10  # up to the budget
NUM_CHECKPOINTS_AFTER = 1  # all arms go on, so that those a little slower than uniform need no extrapolation
NUM_EXAMINED = 512  # rows for each metric and seed
NUM_GENERATED, NUM_GENERATION_STEPS = 1024, 50
NOISE_SEED = 1_000_000  # plus the step, far from the seeds of everything else
STEPS_PER_DRAW = 10
NUM_REFERENCES = 20_000  # data that the stable target draws from

LossAtOf = Callable[[int], ks.LossAt]
Noising = Callable[[Setting, Tensor, ks.Timesteps], tuple[Tensor, Tensor]]
"""`noising(setting, x0, drawn)`: the data and the noise (S, B, D) to train with at the drawn times (S, B)."""


def independent_noise(setting: Setting, x0: Tensor, drawn: ks.Timesteps) -> tuple[Tensor, Tensor]:
    """Return the data as they are, and noise."""
    return x0, torch.randn(x0.shape)


@dataclass(frozen=True)
class Arm:
    """What is compared: a sampler for each seed, and how its draws are trained on."""

    sampler: Callable[["Training", int], ks.TimestepSampler]
    sample_at_once: bool = True  # where vmap can follow
    observe_at_once: bool = True  # where it can, and the sampler learns from losses alone
    noising: Noising = independent_noise
    weighting: ks.Weighting | None = None
    stable_target: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one arm did in one setting."""

    evaluations: list[float]  # (C,) of the network by each checkpoint, per seed, probes included
    excess: list[list[list[float]]]  # (C, S, 3)
    distance: list[float]  # (S,) sliced Wasserstein at the budget
    probe_share: float  # of all evaluations
    seconds: float  # of training, for all seeds together
    density: list[float]  # (20,) of the last draws, mean over seeds


class Networks(nn.Module):
    """One MLP of three hidden layers for each of S seeds."""

    def __init__(self, setting: Setting, num_seeds: int) -> None:
        super().__init__()
        self.num_times = getattr(setting.process, "num_steps", None)
        self.register_buffer("frequency", torch.pi * 2.0 ** torch.arange(4))
        sizes = [setting.num_axes + 9, WIDTH, WIDTH, WIDTH, setting.num_axes]
        generator = torch.Generator().manual_seed(3)
        self.weights = nn.ParameterList(
            torch.randn(num_seeds, *pair, generator=generator) / pair[0] ** 0.5 for pair in pairwise(sizes)
        )
        self.biases = nn.ParameterList(torch.zeros(num_seeds, 1, size) for size in sizes[1:])

    def forward(self, xt: Tensor, time: Tensor, seeds: slice = slice(None)) -> Tensor:
        """Return the outputs (S, N, D) for x_t (S, N, D) at times (S, N), of all seeds or some."""
        t = time[..., None] if self.num_times is None else (time[..., None] + 0.5) / self.num_times
        phase = t * self.frequency  # (S, N, 4)
        hidden = torch.cat([xt, t, phase.sin(), phase.cos()], 2)  # (S, N, D + 9)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = nn.functional.silu(hidden) if i else hidden
            hidden = torch.baddbmm(bias[seeds], hidden, weight[seeds])
        return hidden


class Samplers:
    """The samplers of all seeds, called as one where `torch.vmap` can follow them: a fifth of the time, the same draws.

    What a sampler knows is a view of what all know stacked, which both ways of calling change in place.
    """

    def __init__(self, samplers: list[ks.TimestepSampler], *, sample_at_once: bool, observe_at_once: bool) -> None:
        self.samplers = samplers
        self.sample_at_once, self.observe_at_once = sample_at_once, observe_at_once
        calls = [_Call(sampler) for sampler in samplers]
        buffers = stack_module_state(calls)[1]
        for name, stacked in buffers.items():
            path, _, leaf = name.rpartition(".")
            for seed, call in enumerate(calls):
                call.get_submodule(path)._buffers[leaf] = stacked[seed]
        self.call = partial(torch.vmap(lambda buffers, *args: functional_call(calls[0], buffers, args)), buffers)

    def sample(self, x0: Tensor) -> ks.Timesteps:
        """Return times and weights (S, B) for x0 (S, B, D)."""
        if self.sample_at_once:
            return ks.Timesteps(*self.call(x0))
        drawn = [sampler.sample(x) for sampler, x in zip(self.samplers, x0, strict=True)]
        return ks.Timesteps(torch.stack([one.t for one in drawn]), torch.stack([one.weight for one in drawn]))

    def observe(self, x0: Tensor, drawn: ks.Timesteps, losses: Tensor, loss_at_of: LossAtOf) -> ExitStack:
        """Return the context in which all of them observe the optimizer's step."""
        if self.observe_at_once:
            self.call(x0, drawn.t, drawn.weight, losses)
            return ExitStack()
        with ExitStack() as stack:
            for seed, sampler in enumerate(self.samplers):
                one = ks.Timesteps(drawn.t[seed], drawn.weight[seed])
                stack.enter_context(sampler.observe(x0[seed], one, losses[seed], loss_at_of(seed)))
            return stack.pop_all()


class _Call(nn.Module):
    """A sampler as one function of tensors: draws, or observes where it is given what was drawn."""

    def __init__(self, sampler: ks.TimestepSampler) -> None:
        super().__init__()
        self.sampler = sampler

    def forward(self, x0: Tensor, *seen: Tensor) -> tuple[Tensor, Tensor]:
        if not seen:
            drawn = self.sampler.sample(x0)
            return drawn.t, drawn.weight
        t, weight, losses = seen
        with self.sampler.observe(x0, ks.Timesteps(t, weight), losses):
            return t, weight


def stable_target(setting: Setting) -> ks.StableTarget:
    """Return the stable target; at each step the seeds share the references drawn."""
    return ks.StableTarget(setting.mixture.draw((NUM_REFERENCES,), torch.Generator().manual_seed(5)))


class Training:
    """One arm in one setting: S networks, their samplers, and the count of their evaluations.

    The arms of a setting share initial weights, data, noise and the random numbers behind the times.
    """

    def __init__(self, setting: Setting, arm: Arm, num_seeds: int) -> None:
        self.setting, self.arm, self.num_seeds = setting, arm, num_seeds
        self.networks = Networks(setting, num_seeds)
        self.average = copy.deepcopy(self.networks).requires_grad_(False)
        self.weights, self.averaged_weights = list(self.networks.parameters()), list(self.average.parameters())
        self.optimizer = torch.optim.Adam(self.weights, lr=LEARNING_RATE, fused=True)
        target = stable_target(setting) if arm.stable_target else None
        self.objective = ks.Objective(setting.process, setting.prediction, arm.weighting, target)
        self.generator = torch.Generator().manual_seed(4)
        self.num_steps = self.num_probes = 0
        self.drawn = torch.zeros(20)
        self.samplers = Samplers(
            [arm.sampler(self, seed) for seed in range(num_seeds)],
            sample_at_once=arm.sample_at_once,
            observe_at_once=arm.observe_at_once,
        )

    @property
    def evaluations(self) -> float:
        """The network evaluations of each seed so far."""
        return self.num_steps * BATCH + self.num_probes / self.num_seeds

    def step(self) -> None:
        """Take one step of all seeds."""
        torch.default_generator.manual_seed(NOISE_SEED + self.num_steps)  # so that arms pair whatever they use up
        x0 = self.next_data()  # (S, B, D)
        with torch.no_grad():
            drawn = self.samplers.sample(x0)
        x0, noise = self.arm.noising(self.setting, x0, drawn)
        losses = self.objective(self.predict_flat, x0.flatten(0, 1), drawn.t.flatten(), noise=noise.flatten(0, 1))
        losses = losses.view_as(drawn.t)
        self.optimizer.zero_grad()
        (losses * drawn.weight).mean(1).sum().backward()
        with torch.no_grad(), self.samplers.observe(x0, drawn, losses.detach(), partial(self.loss_at, x0)):
            self.optimizer.step()
        self.num_steps += 1
        decay = min(AVERAGE_DECAY, self.num_steps / (9 + self.num_steps))
        torch._foreach_lerp_(self.averaged_weights, self.weights, 1 - decay)
        if self.num_steps % 10 == 0:
            self.drawn = 0.98 * self.drawn + 0.02 * torch.histc(drawn.t, 20, 0, 1) / drawn.t.numel()

    def next_data(self) -> Tensor:
        """Return the data of the next step (S, B, D); they are drawn for several steps at a time."""
        within = self.num_steps % STEPS_PER_DRAW
        if within == 0:
            self.drawn_data = self.setting.mixture.draw((STEPS_PER_DRAW, self.num_seeds, BATCH), self.generator)
        return self.drawn_data[within]

    def predict_flat(self, xt: Tensor, time: Tensor) -> Tensor:
        """Return the outputs (S B, D) for x_t (S B, D), the rows of a seed side by side."""
        shape = (self.num_seeds, -1)
        return self.networks(xt.view(*shape, xt.shape[1]), time.view(shape)).flatten(0, 1)

    def predict_one(self, seed: int, xt: Tensor, time: Tensor) -> Tensor:
        """Return the outputs (N, D) of one seed's network for x_t (N, D)."""
        return self.networks(xt[None], time[None], slice(seed, seed + 1))[0]

    def loss_at(self, x0: Tensor, seed: int) -> ks.LossAt:
        """Return the losses of one seed's rows of x0 (S, ...), as samplers ask for them; each is counted."""

        def losses(rows: Tensor, t: Tensor) -> Tensor:
            self.num_probes += len(rows)
            return self.objective(partial(self.predict_one, seed), x0[seed][rows], t)

        return losses


@cache
def prepared(name: str, num_seeds: int) -> tuple[Setting, Examination, Slices, Tensor]:
    """Return a setting, what its networks are examined on, and the noise that they generate from."""
    setting = setting_of(name)
    noise = torch.randn(num_seeds, NUM_GENERATED, setting.num_axes, generator=torch.Generator().manual_seed(6))
    return setting, Examination.of(setting, num_seeds, NUM_EXAMINED), Slices.of(setting.mixture, NUM_GENERATED), noise


def train(name: str, arm: Arm, num_seeds: int, num_steps: int) -> Outcome:
    """Return what this arm does in the setting of this name; the budget is what uniform needs for `num_steps`."""
    setting, examination, slices, noise = prepared(name, num_seeds)
    training = Training(setting, arm, num_seeds)
    evaluations, excess, distance, seconds = [], [], None, 0.0
    for checkpoint in range(1, NUM_CHECKPOINTS + NUM_CHECKPOINTS_AFTER + 1):
        while training.num_steps < num_steps * checkpoint // NUM_CHECKPOINTS:
            start = time.perf_counter()
            training.step()
            seconds += time.perf_counter() - start
            if distance is None and training.evaluations >= num_steps * BATCH:
                distance = slices.distance(generate(setting, training.average, noise, NUM_GENERATION_STEPS))
        evaluations.append(training.evaluations)
        excess.append(examination.excess(training.average).tolist())
    share = training.num_probes / num_seeds / training.evaluations
    return Outcome(
        evaluations, excess, distance.tolist(), share, seconds, (training.drawn / training.drawn.sum()).tolist()
    )
