"""A counter-based hash: random bits as a function of integers, so that no generator state has to be saved.

It is the finaliser of SplitMix64 (Steele et al. 2014), for tensors on any device and for Python integers.
"""

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
    value = (value ^ _shift(value, 30)) * _SIGNED_FIRST
    value = (value ^ _shift(value, 27)) * _SIGNED_SECOND
    return value ^ _shift(value, 31)


def _shift(value: Tensor, num: int) -> Tensor:
    """Shift right and fill with zeros; the shift of int64 would fill with the sign bit."""
    return (value >> num) & ((1 << (64 - num)) - 1)


def mix_seed(*counters: int) -> int:
    """Return 64 well-mixed bits that depend on every counter and on their order, in [0, 2**64)."""
    state = 0
    for counter in counters:
        state = (state + counter + GOLDEN_RATIO) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state
