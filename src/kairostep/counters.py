"""Random numbers as a function of integers, so that no generator state has to be saved or shared between processes.

The hash is the finaliser of SplitMix64 (Steele et al. 2014), for tensors on any device and for Python integers.
"""

import math

import torch
from torch import Tensor

_MASK = 2**64 - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    """Return the 64 bits of `value` as int64 reads them."""
    return value - 2**64 if value >= 2**63 else value


GOLDEN_RATIO = _signed(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, as int64: its multiples are spread evenly
_SIGNED_FIRST, _SIGNED_SECOND = _signed(_FIRST), _signed(_SECOND)


def mix(value: Tensor) -> Tensor:
    """Return 64 well-mixed bits for each integer, int64 -> int64, one to one. Products wrap on every device."""
    value = _shift(value, 30).bitwise_xor_(value).mul_(_SIGNED_FIRST)  # in place: memory is what this costs
    value = _shift(value, 27).bitwise_xor_(value).mul_(_SIGNED_SECOND)
    return _shift(value, 31).bitwise_xor_(value)


def _shift(value: Tensor, num: int) -> Tensor:
    """Shift right and fill with zeros; the shift of int64 would fill with the sign bit."""
    return (value >> num).bitwise_and_((1 << (64 - num)) - 1)


def mix_seed(*counters: int) -> int:
    """Return 64 well-mixed bits that depend on every counter and on their order, in [0, 2**64)."""
    state = 0
    for counter in counters:
        state = (state + counter + GOLDEN_RATIO) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state


def key_tensor(*counters: int, device: torch.device | str = "cpu") -> Tensor:
    """Return `mix_seed` of the counters as an int64 scalar on a device, without waiting for it."""
    return torch.full((), _signed(mix_seed(*counters)), dtype=torch.int64, device=device)


class RowRandom:
    """Random numbers for rows of a batch, each row's a function of (key, number of the row, call).

    Which process makes a row, and which rows it makes beside it, does not matter: processes that share a batch draw
    what one would draw for all of it. Each call returns fresh numbers.

    Args:
        key: An int64 scalar, of `key_tensor`. What is drawn for another purpose or step needs another key.
        rows: Numbers of the rows in the batch over all processes, (B,) int64 on the key's device.
    """

    def __init__(self, key: Tensor, rows: Tensor) -> None:
        self.key, self.rows, self.num_calls = key, rows, 0

    def _bits(self, num: int) -> Tensor:
        """Return (B, num) random int64: for each row a SplitMix64 generator that starts at a hash of its number."""
        self.num_calls += 1
        start = mix(mix(self.key + self.num_calls) + self.rows * GOLDEN_RATIO)  # (B,)
        return mix((start[:, None] + torch.arange(num, device=start.device)) * GOLDEN_RATIO)

    def uniform(self) -> Tensor:
        """Return one number in [0, 1) for each row, (B,) float32."""
        return (self._bits(1)[:, 0] & 0xFFFFFF).to(torch.float32) * 2**-24

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Return standard normal numbers for each row, (B, *shape) float32, by Box and Muller's transform.

        Two numbers are made from 64 bits. None is beyond 6.7.
        """
        num = math.prod(shape)
        bits = self._bits(-(-num // 2)).view(torch.int32)  # (B, N), or one more
        low, high = bits[:, ::2], bits[:, 1::2]  # (B, N / 2) each
        share = low.to(torch.float32).abs_().add_(0.5).mul_(2**-31)  # in (0, 1], fine near 0, where the tails are
        radius, angle = share.log_().mul_(-2).sqrt_(), high.to(torch.float32).mul_(math.pi * 2**-31)
        return torch.cat([angle.cos().mul_(radius), angle.sin_().mul_(radius)], dim=1)[:, :num].reshape(-1, *shape)
