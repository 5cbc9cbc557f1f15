"""Random numbers as a function of (seed, step, rank, row): two integers to save, nothing to synchronise.

A hash of counters stands where a generator would. A resumed run goes on bitwise, ranks differ although they hold the
same state, W ranks draw what one rank draws for the whole batch, and `torch.compile` and CUDA graphs replay it, since
the step is a buffer on the device.
"""

import torch
from kairostep.timesteps.distributed import rank, world_size
from kairostep.timesteps.histogram import BELOW_ONE
from torch import Tensor, nn

_32_BITS = 0xFFFFFFFF
_GOLDEN_RATIO = 0x9E3779B9  # of 2**32: multiples of it stay far apart from each other


def mix(value: Tensor) -> Tensor:
    """Return 32 well-mixed bits for each integer: int64 in, int64 in [0, 2**32) out."""
    value = value & _32_BITS
    # The multipliers lie under 2**31, so that no product leaves int64: signed overflow is not defined everywhere.
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & _32_BITS
    value = ((value ^ (value >> 15)) * 0x2C1B3C6D) & _32_BITS
    return value ^ (value >> 16)


class Draws(nn.Module):
    """Uniform numbers in (0, 1), one per row of the batch, fresh at every call.

    `stratified` puts exactly one number into each of N equal strata of [0, 1], N the batch over all ranks, in random
    order. Ranks whose batches differ in size stratify as if all had theirs.
    """

    key: Tensor
    step: Tensor

    def __init__(self, seed: int, *, stratified: bool) -> None:
        super().__init__()
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32), got {seed}: pass for instance seed={seed % 2**32}")
        self.stratified = stratified
        self.register_buffer("key", mix(torch.tensor(seed)))
        self.register_buffer("step", torch.tensor(0))

    def forward(self, x0: Tensor) -> Tensor:
        """Return (B,) numbers for this rank's batch x0 (B, ...) and move on by one step."""
        if x0.device != self.step.device:
            raise ValueError(
                f"sampler and batch must be on one device, got {self.step.device} and {x0.device}: "
                f"move the sampler once with sampler.to('{x0.device}')"
            )
        dtype = torch.float64 if x0.dtype == torch.float64 else torch.float32  # t in half precision would be too coarse
        num_local = x0.shape[0]
        num_global = num_local * world_size()
        counter = torch.arange(2 * num_global, device=x0.device)
        bits = mix(mix(counter + self.key) + self.step * _GOLDEN_RATIO)  # (2N,)
        self.step.add_(1)
        u = (bits[:num_global] >> 8).to(dtype) * 2**-24  # (N,) in [0, 1)
        if self.stratified:
            stratum = bits[num_global:].argsort()  # (N,) a random permutation
            u = (stratum + u) / num_global
        first = rank() * num_local
        return u[first : first + num_local].clamp(2**-25, BELOW_ONE)  # (B,)
