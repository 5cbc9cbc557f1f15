"""kohya's sd-scripts: a sampler called as `train_util.get_timesteps`, and around the mean of the loss.

self.timestep_sampler = KohyaSampler("root_loss", accelerator, seed=args.seed)
train_util.get_timesteps = self.timestep_sampler.get_timesteps
...
loss = loss.mean(dim=list(range(1, loss.ndim)))
self.timestep_sampler.show(loss)
loss = loss * batch["loss_weights"]
loss = self.post_process_loss(loss, args, timesteps, noise_scheduler)
return self.timestep_sampler.mean(loss)
...
with self.timestep_sampler.observe():
    optimizer.step()
"""

from typing import Any

import torch
from torch import Tensor

from kairostep.checks import choice, positive
from kairostep.integrations.diffusers_scripts import ScriptSampler

SAMPLINGS = ("uniform", "sigmoid", "shift")


class KohyaSampler(ScriptSampler):
    """A sampler in one of sd-scripts' loops: the accelerator keeps it, `args` of the scripts stay in force."""

    _bare: Tensor | None = None  # (B,) losses before any weight
    _validates: bool = False  # whether the next mean is of a step that was given, not drawn

    def get_timesteps(self, min_timestep: int, max_timestep: int, b_size: int, device: Any) -> Tensor:
        """Return steps (B,) in [min, max), called as `train_util.get_timesteps`; of an empty range, the step itself.

        An empty range is validation at one step: nothing is drawn, and the next `mean` is the plain one.
        """
        self._validates = min_timestep >= max_timestep
        if self._validates:
            return torch.full((b_size,), max_timestep, dtype=torch.int64, device=device)
        return self.randint(min_timestep, max_timestep, (b_size,), device=device)

    def get_sigmas(
        self,
        timestep_sampling: str,
        b_size: int,
        device: Any = None,
        *,
        sigmoid_scale: float = 1.0,
        discrete_flow_shift: float = 1.0,
    ) -> Tensor:
        """Return noise levels (B,) of a flow, drawn as `--timestep_sampling` says, for a uniform sampler exactly so.

        Validation draws by it too. That teaches nothing: its losses have no gradient.
        """
        t = self._draw(b_size).t
        return flow_quantile(timestep_sampling, t, sigmoid_scale, discrete_flow_shift).to(device=device)

    def show(self, losses: Tensor) -> None:
        """Show the losses (B,) before the weights of images and SNR, so that `mean` knows what these were."""
        self._bare = losses.detach()

    def mean(self, losses: Tensor, loss_weights: Tensor | None = None) -> Tensor:
        """Return the weighted mean of the losses (B,), in place of `loss.mean()`.

        In validation, of a step that was given or of losses without a gradient, it is the plain mean, and the sampler
        learns nothing.
        """
        if self._validates or not losses.requires_grad:
            self._bare = None
            if not self._validates:  # drawn by get_sigmas, which is not told that it is asked by validation
                self._drawn, self._losses = None, {}
                self.sampler.sampler.num_unshown = 0
            return losses.mean()
        if loss_weights is None and self._bare is not None:
            loss_weights = losses.detach() / self._bare.clamp(min=torch.finfo(torch.float32).tiny)
        self._bare = None
        return super().mean(losses, loss_weights)


def flow_quantile(
    timestep_sampling: str, t: Tensor, sigmoid_scale: float = 1.0, discrete_flow_shift: float = 1.0
) -> Tensor:
    """Return noise levels (B,) that for uniform t (B,) are drawn as sd-scripts draws them; t = 0 is the data."""
    choice("timestep_sampling", timestep_sampling, SAMPLINGS)
    if timestep_sampling == "uniform":
        return t
    sigmas: Tensor = torch.sigmoid(sigmoid_scale * torch.special.ndtri(t.double()))
    if timestep_sampling == "shift":
        sigmas = shifted(sigmas, discrete_flow_shift)
    return sigmas.to(t)


def shifted(sigmas: Tensor, shift: float) -> Tensor:
    """Return the noise levels (B,) after the shift of Stable Diffusion 3: logit(sigma) grows by log(shift)."""
    positive("shift", shift)
    return shift * sigmas / (1 + (shift - 1) * sigmas)
