"""Random numbers as a function of (seed, step, row of the whole batch): two integers to save, nothing to synchronise.

A hash of counters stands where a generator would. A resumed run goes on bitwise, ranks differ although they hold the
same state, W ranks draw what one rank draws for the whole batch, and `torch.compile` and CUDA graphs replay it, since
the step is a buffer on the device.
"""

import torch
from torch import Tensor, nn

from kairostep.counters import GOLDEN_RATIO, mix
from kairostep.ranks import own_rows, world_size
from kairostep.timesteps.histogram import ABOVE_ZERO, BELOW_ONE


def random_bits(key: Tensor, step: Tensor, num: int) -> Tensor:
    """Return (num,) random int64 that depend on key (), step (), num and position alone."""
    # Large constants meet tensors alone: in compiled code the range below is int32 until a tensor is added.
    start = key + step * GOLDEN_RATIO + (num << 32)  # ()
    return mix((torch.arange(num, device=key.device) + start) * GOLDEN_RATIO)


def check_batch(x0: Tensor) -> None:
    """Raise unless x0 is a batch of at least one row."""
    if not isinstance(x0, Tensor):
        raise ValueError(f"x0 must be a tensor, got {x0!r}: pass the clean batch (B, ...) itself, not its size")
    if x0.ndim == 0 or x0.shape[0] == 0:
        raise ValueError(f"x0 must have at least one row, got shape {tuple(x0.shape)}: pass a batch (B, ...)")


class Draws(nn.Module):
    """Uniform numbers in (0, 1), one per row of the batch, fresh at every call.

    `stratified` puts exactly one number into each of N equal strata of [0, 1], N the batch over all ranks, in random
    order. Ranks whose batches differ in size stratify as if all had theirs, each on numbers of its own.
    """

    key: Tensor
    step: Tensor

    def __init__(self, seed: int, *, stratified: bool) -> None:
        super().__init__()
        if not hasattr(seed, "__index__") or not 0 <= seed < 2**63:
            raise ValueError(f"seed must be a whole number in [0, 2**63), got {seed!r}: pass for instance seed=0")
        self.stratified = stratified
        self.register_buffer("key", mix(mix(torch.tensor(int(seed))) + GOLDEN_RATIO))
        self.register_buffer("step", torch.tensor(0))

    def forward(self, x0: Tensor) -> Tensor:
        """Return (B,) numbers for this rank's batch x0 (B, ...) and move on by one step."""
        check_batch(x0)
        num_local = x0.shape[0]
        return own_rows(self.draw_for_all_ranks(x0, num_local * world_size()), num_local)  # (B,)

    def draw_for_all_ranks(self, x0: Tensor, num: int) -> Tensor:
        """Return (num,) numbers, the same on every rank, and move on by one step; dtype and device are those for x0."""
        if x0.device != self.step.device:
            raise ValueError(
                f"sampler and batch must be on one device, got {self.step.device} and {x0.device}: "
                f"move the sampler once with sampler.to('{x0.device}')"
            )
        dtype = torch.float64 if x0.dtype == torch.float64 else torch.float32  # half precision would be too coarse
        bits = random_bits(self.key, self.step, num)  # (N,)
        self.step.add_(1)
        u = (bits & 0xFFFFFF).to(dtype) * 2**-24  # (N,) in [0, 1)
        if self.stratified:
            stratum = bits.argsort()  # (N,) a random permutation; decided by the high bits, u by the low ones
            u = (stratum + u) / num
        return u.clamp(ABOVE_ZERO, BELOW_ONE)
