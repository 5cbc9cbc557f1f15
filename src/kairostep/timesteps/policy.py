"""Policies over t: from clean data x0 to a beta distribution (Kim et al., Eq. 11)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kairostep.checks import choice, count
from kairostep.timesteps.histogram import BELOW_ONE
from kairostep.timesteps.probes import isolated_randomness

MAX_CONCENTRATION = 50.0  # bounded a and b stay within 1/50..50
RELEASED_BIAS, RELEASED_MIN = 0.5, 1e-5  # the released code starts at a = b = softplus(0.5) + 1e-5 = 0.974
NUM_CELLS = 512  # of the table that inverts the CDF
TAIL = 1e-7  # mass left out at either end of it


@dataclass(frozen=True, slots=True)
class Beta:
    """One beta distribution on (0, 1) per row."""

    a: Tensor  # (B,)
    b: Tensor  # (B,)

    def log_prob(self, u: Tensor) -> Tensor:
        """Return the log-density at u (B,)."""
        u = u.clamp(2**-24, BELOW_ONE)
        return (self.a - 1) * u.log() + (self.b - 1) * torch.log1p(-u) - self._log_norm()

    def entropy(self) -> Tensor:
        """Return the differential entropy (B,) in nats: 0 where uniform, negative elsewhere."""
        a, b = self.a, self.b
        digamma = torch.digamma
        return self._log_norm() - (a - 1) * digamma(a) - (b - 1) * digamma(b) + (a + b - 2) * digamma(a + b)

    def entropy_with_exact_slope(self) -> Tensor:
        """Return the entropy (B,) up to a constant, with a gradient that is exactly 0 where the density is uniform.

        Left to autograd, the slope is a difference of large terms whose rounding error Adam would follow.
        """
        a, b = self.a.detach(), self.b.detach()
        common = (a + b - 2) * torch.polygamma(1, a + b)
        slope_a = common - (a - 1) * torch.polygamma(1, a)
        slope_b = common - (b - 1) * torch.polygamma(1, b)
        return slope_a * self.a + slope_b * self.b

    def quantile(self, v: Tensor) -> Tensor:
        """Return u (B,) under which a share v (B,) of each row's mass lies."""
        low, high, mass = self._cells()
        cumulative = mass.cumsum(1)  # (B, NUM_CELLS)
        v = v * cumulative[:, -1]
        cell = torch.searchsorted(cumulative, v[:, None], right=True).clamp(max=NUM_CELLS - 1)  # (B, 1)
        from_right = ((cumulative.gather(1, cell)[:, 0] - v) / mass.gather(1, cell)[:, 0]).clamp(0, 1)
        z = torch.lerp(low, high, (cell[:, 0] + 1 - from_right) / NUM_CELLS)
        return torch.sigmoid(z).clamp(2**-24, BELOW_ONE)

    def cdf(self, u: Tensor) -> Tensor:
        """Return the share of each row's mass below each of the times u (K,): (B, K)."""
        low, high, mass = self._cells()
        cumulative = F.pad(mass.cumsum(1), (1, 0))  # (B, NUM_CELLS + 1)
        position = ((u.logit() - low[:, None]) / (high - low)[:, None] * NUM_CELLS).clamp(0, NUM_CELLS)  # (B, K)
        left = position.floor().clamp(max=NUM_CELLS - 1).long()
        below = torch.lerp(cumulative.gather(1, left), cumulative.gather(1, left + 1), position - left)
        return below / cumulative[:, -1:]

    def _log_norm(self) -> Tensor:
        return torch.lgamma(self.a) + torch.lgamma(self.b) - torch.lgamma(self.a + self.b)

    def _cells(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the range of z = logit(u), (B,) and (B,), and the mass of its NUM_CELLS equal cells, not normalised.

        In z the density is smooth and falls off exponentially, so that the midpoint rule is accurate for any a and b.
        """
        log_norm = self._log_norm()
        low = ((TAIL * self.a).log() + log_norm) / self.a
        high = -((TAIL * self.b).log() + log_norm) / self.b
        middle = (torch.arange(NUM_CELLS, dtype=low.dtype, device=low.device) + 0.5) / NUM_CELLS
        z = torch.lerp(low[:, None], high[:, None], middle)  # (B, NUM_CELLS)
        log_pdf = (self.a + self.b)[:, None] * F.logsigmoid(z) - self.b[:, None] * z - log_norm[:, None]
        return low, high, log_pdf.exp()


def concentrations(output: Tensor) -> Beta:
    """Return Beta(a, b) from a network's output (B, 2): 1 at 0, never beyond MAX_CONCENTRATION, never quite flat.

    The bound is reached polynomially, so that a policy pushed far out still feels the way back.
    """
    limit = math.log(MAX_CONCENTRATION)
    a, b = (limit * output * (limit**2 + output.square()).rsqrt()).exp().unbind(1)
    return Beta(a, b)


class Concentrations(nn.Module):
    """From the output of a policy (B, 2) to Beta(a, b), saved with the weights that belong to it.

    bounded: `concentrations`; else the released code's softplus(output) + 1e-5, which has no upper bound.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bounded = True

    def forward(self, output: Tensor) -> Beta:
        """Return one distribution per row."""
        return concentrations(output) if self.bounded else Beta(*(F.softplus(output) + RELEASED_MIN).unbind(1))

    @torch.no_grad()
    def release(self, bias: Tensor) -> None:
        """Take the released code's map, and move the bias (2,) from our start to that of the released code."""
        if self.bounded:
            self.bounded = False
            bias.add_(RELEASED_BIAS)

    def get_extra_state(self) -> Tensor:
        """Return which map it is."""
        return torch.tensor(self.bounded)

    def set_extra_state(self, state: Tensor) -> None:
        """Take up the map that the weights were trained with."""
        self.bounded = bool(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load states of earlier versions too: they had the bounded map alone and did not name it."""
        state_dict.setdefault(f"{prefix}_extra_state", torch.tensor(True))
        super()._load_from_state_dict(state_dict, prefix, *args)


def at_least_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what `Module._apply` is given without casts to half precision: a policy's steps would be lost in it."""

    def move(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        return moved if moved.element_size() >= tensor.element_size() else tensor.to(moved.device)

    return move


class BetaPolicy(nn.Module):
    """x0 (B, *shape) -> Beta(a, b), uniform for every x0 at the start; build it with `BetaPolicy.for_input(shape)`.

    Convolutions of 32, 64 and 128 channels, halving the size each time, then `depth` hidden layers of `hidden` units;
    vectors go to the hidden layers directly. What is larger than 32 along a side is averaged down to 32 first.
    """

    MAX_SIZE, POOLED_SIZE, CHANNELS = 32, 4, (32, 64, 128)

    def __init__(self, shape: tuple[int, ...], hidden: int, depth: int, *, bounded: bool = True) -> None:
        super().__init__()
        self.shape = shape
        num_axes = len(shape) - 1
        if num_axes == 0:
            self.features: nn.Module = nn.Identity()
            num_features = shape[0]
        else:
            convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[num_axes - 1]
            pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[num_axes - 1]
            halve = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[num_axes - 1]
            sizes = [min(size, self.MAX_SIZE) for size in shape[1:]]
            layers: list[nn.Module] = [pool(tuple(sizes))] if sizes != list(shape[1:]) else []
            for num_in, num_out in pairwise((shape[0], *self.CHANNELS)):
                layers += [convolution(num_in, num_out, 3, padding=1, dtype=torch.float32), nn.ReLU()]
                if min(sizes) > self.POOLED_SIZE:
                    layers.append(halve(2))
                    sizes = [size // 2 for size in sizes]
            pooled = [min(size, self.POOLED_SIZE) for size in sizes]
            layers += [pool(tuple(pooled))] if sizes != pooled else []
            self.features = nn.Sequential(*layers)
            num_features = self.CHANNELS[-1] * math.prod(pooled)
        widths = [num_features, *[hidden] * depth]
        linear = partial(nn.Linear, dtype=torch.float32)  # whatever torch's default
        self.hidden = nn.Sequential(*[m for pair in pairwise(widths) for m in (linear(*pair), nn.ReLU())])
        self.out = linear(widths[-1], 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.to_beta = Concentrations()
        if not bounded:
            self.use_released_map()

    @classmethod
    def for_input(
        cls, shape: tuple[int, ...], hidden: int = 128, depth: int = 2, *, bounded: bool = True, seed: int = 0
    ) -> "BetaPolicy":
        """Return a policy for x0 of this shape without the batch: (D,), (C, L), (C, H, W) or (C, D, H, W).

        Weights depend on the seed alone, so that all ranks start alike, and the global generator is left as it was.

        Args:
            shape: x0.shape[1:].
            hidden: units of each hidden layer; 128 in the paper's Table 7, 256 in its other tables and released code.
            depth: hidden layers.
            bounded: a and b within 1/50..50; False takes the released code's softplus, unbounded, 0.974 at the start.
            seed: of the weights.
        """
        if not isinstance(shape, tuple) or not 1 <= len(shape) <= 4 or min(shape) < 1:
            fix = "pass x0.shape[1:]" if shape else "use ConstantBeta(), or make x0 (B,) of shape (B, 1) by x0[:, None]"
            raise ValueError(f"shape must be (D,), (C, L), (C, H, W) or (C, D, H, W), got {tuple(shape)}: {fix}")
        count("hidden", hidden, at_most=2**16, example=128)
        count("depth", depth, at_most=10**3, example=12)
        with isolated_randomness(torch.device("cpu"), seed):
            return cls(tuple(shape), hidden, depth, bounded=bounded)

    def use_released_map(self) -> None:
        """Take the released code's map to a and b; a policy at its start then has a = b = 0.974."""
        self.to_beta.release(self.out.bias)

    def forward(self, x0: Tensor) -> Beta:
        """Return one distribution per row of x0 (B, *shape)."""
        if x0.shape[1:] != self.shape:
            raise ValueError(
                f"x0 must have the shape the policy was built for, (B, {', '.join(map(str, self.shape))}), "
                f"got {tuple(x0.shape)}: build it with BetaPolicy.for_input({tuple(x0.shape[1:])})"
            )
        with torch.autocast(x0.device.type, enabled=False):
            features = self.features(x0.to(self.out.weight.dtype)).flatten(1)
            beta: Beta = self.to_beta(self.out(self.hidden(features)))
            return beta

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the model to its device but never into half precision."""
        super()._apply(at_least_float32(fn), recurse)  # type: ignore[no-untyped-call]
        return self


class ConstantBeta(nn.Module):
    """One Beta(a, b) whatever x0: two parameters, uniform at the start.

    Args:
        bounded: Keep a and b within 1/50..50. False takes the released code's softplus: unbounded, 0.974 at the start.
    """

    def __init__(self, *, bounded: bool = True) -> None:
        super().__init__()
        self.to_beta = Concentrations()
        self.output = nn.Parameter(torch.zeros(2, dtype=torch.float32))
        if not bounded:
            self.use_released_map()

    def forward(self, x0: Tensor) -> Beta:
        """Return the same distribution for each row of x0 (B, ...)."""
        beta: Beta = self.to_beta(self.output.expand(x0.shape[0], 2))
        return beta

    def use_released_map(self) -> None:
        """Take the released code's map to a and b; which at its start then has a = b = 0.974."""
        self.to_beta.release(self.output)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the model to its device but never into half precision."""
        super()._apply(at_least_float32(fn), recurse)  # type: ignore[no-untyped-call]
        return self


def check_policy(policy: nn.Module) -> None:
    """Raise unless it is a Module."""
    if not isinstance(policy, nn.Module):
        raise ValueError(f"policy must be a Module, got {policy!r}: pass BetaPolicy.for_input(x0.shape[1:])")


def make_policy(
    name: str, shape: tuple[int, ...], hidden: int, depth: int, *, bounded: bool, seed: int
) -> BetaPolicy | ConstantBeta:
    """Return the policy of a name: "network", which sees x0 of this shape, or "pair"."""
    choice("sampler.policy", name, ("network", "pair"))
    if name == "pair":
        return ConstantBeta(bounded=bounded)
    return BetaPolicy.for_input(shape, hidden, depth, bounded=bounded, seed=seed)


def hidden_units(as_published: bool) -> int:
    """Return the width of a policy that is made for the user: of the paper's Table 7, or of the released code."""
    return 256 if as_published else 128
