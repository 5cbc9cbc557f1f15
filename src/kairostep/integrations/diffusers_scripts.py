"""diffusers' training scripts: a sampler called as the functions that it stands for, which `kairostep patch` writes.

    timestep_sampler = ScriptSampler(args.timestep_sampler, accelerator, seed=args.seed)
    ...
    timesteps = timestep_sampler.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,), device=latents.device)
    ...
    loss = timestep_sampler.mean(F.mse_loss(model_pred.float(), target.float(), reduction="none"))
    accelerator.backward(loss)
    with timestep_sampler.observe():
        optimizer.step()

"uniform" has the density of the script and leaves its losses as they are, bitwise; "root_loss" keeps its objective.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kairostep.arguments import arguments_of
from kairostep.by_name import from_name
from kairostep.checks import choice
from kairostep.integrations.accelerate import Accelerated
from kairostep.integrations.diffusers import SCHEMES
from kairostep.integrations.foreign_loop import check_needs, learn_without_step
from kairostep.registry import samplers, unknown
from kairostep.timesteps import RootLoss, Timesteps, TimestepSampler
from kairostep.timesteps.histogram import BELOW_ONE

if TYPE_CHECKING:
    from accelerate import Accelerator


class ScriptSampler:
    """A sampler in a script: draws by the script's own calls, weights its mean, learns around its optimizer's step.

    Args:
        sampler: The name of a sampler, as `ks.from_name` takes it, or a sampler.
        accelerator: The script's. Its `save_state` and `load_state` hold the sampler. From a checkpoint that was saved
            before the script had one, the sampler starts afresh, with a warning.
        seed: The script's `--seed`. None for 0; each process draws its own times in any case.
    """

    def __init__(self, sampler: str | TimestepSampler, accelerator: "Accelerator", *, seed: int | None = None) -> None:
        made = sampler_for_script(sampler, seed)
        self.sampler = Accelerated(made, accelerator, required=False)
        self.prior = PriorHalf(self)
        self._needs_weights = isinstance(made, RootLoss) and made.loss_weight is None
        self._drawn: Timesteps | None = None
        self._losses: dict[bool, Tensor] = {}  # by whether they are of the half that preserves the prior
        self._is_step = False  # whether the gradients are in sync where these losses were

    def randint(
        self, low: int, high: int, size: tuple[int], *, device: Any = None, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Return steps (B,) from low to high - 1, the lowest being the least noisy: called as `torch.randint`."""
        (num_rows,) = size
        return (low + self._draw(num_rows).index(high - low)).to(device=device, dtype=dtype)

    def rand(self, size: tuple[int], *, device: Any = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return shares (B,) in [0, 1) of the script's own draws, called as `torch.rand`."""
        (num_rows,) = size
        largest = 1 - torch.finfo(dtype).eps / 2  # under 1 in this precision too
        return self._draw(num_rows).t.clamp(max=largest).to(device=device, dtype=dtype)

    def multinomial(self, weights: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
        """Return steps (B,), places in the script's weights (K,), called as `torch.multinomial`."""
        if not replacement:
            raise ValueError("timesteps must be drawn with replacement, got replacement=False: pass replacement=True")
        shares = weights.double().cumsum(0) / weights.double().sum()
        t = self._draw(num_samples).t.to(device=weights.device, dtype=torch.float64)
        return torch.searchsorted(shares, t, right=True).clamp(max=len(weights) - 1)

    def compute_density_for_timestep_sampling(
        self,
        weighting_scheme: str,
        batch_size: int,
        logit_mean: float | None = None,
        logit_std: float | None = None,
        mode_scale: float | None = None,
        device: Any = "cpu",
    ) -> Tensor:
        """Return u (B,) in [0, 1), 0 being noise, called as diffusers' function of this name.

        The sampler draws shares of the scheme's own draws. So "uniform" draws by the scheme, and a sampler that keeps
        its objective keeps the one that the scheme sets.
        """
        t = self._draw(batch_size).t
        return scheme_quantile(weighting_scheme, t, logit_mean, logit_std, mode_scale).to(device=device)

    def compute_density_of_sigmas(
        self,
        weighting_scheme: str,
        batch_size: int,
        logit_mean: float | None = None,
        logit_std: float | None = None,
        mode_scale: float | None = None,
        device: Any = "cpu",
    ) -> Tensor:
        """Return noise levels (B,) in [0, 1), 1 being noise, for scripts that take diffusers' u as their sigmas."""
        t = 1 - self._draw(batch_size).t.double()
        return scheme_quantile(weighting_scheme, t, logit_mean, logit_std, mode_scale).to(device=device)

    def mean(self, losses: Tensor, loss_weights: Tensor | None = None) -> Tensor:
        """Return the weighted mean of losses (B, ...), in place of their mean.

        Args:
            losses: One per sample, or more, in the order of the batch. With prior preservation, of its first half.
            loss_weights: What the script has multiplied its squared errors by, (B, ...), if it has.
        """
        return self._weighted_mean(losses, loss_weights, prior=False)

    def observe(self) -> AbstractContextManager[None]:
        """Wrap the optimizer's step. Under `accelerator.accumulate` the sampler learns once for all micro-batches."""
        if self._drawn is None or not self._losses:
            return nullcontext()
        drawn, losses = self._drawn, self._take_losses()
        return self.sampler.observe(rows_like(drawn), drawn, losses)

    def _draw(self, num_rows: int) -> Timesteps:
        if self._drawn is not None and self._losses:  # after these no step was wrapped
            drawn, losses = self._drawn, self._take_losses()
            if self._is_step:  # taken elsewhere, as DeepSpeed does
                learn_without_step(self.sampler.sampler, drawn, losses)
            else:
                self.sampler.show(rows_like(drawn), drawn, losses)
        self._drawn = self.sampler.sample(torch.empty(num_rows, 0, device=self.sampler.accelerator.device))
        return self._drawn

    def _weighted_mean(self, losses: Tensor, loss_weights: Tensor | None, *, prior: bool) -> Tensor:
        if self._drawn is None:
            raise ValueError("losses must follow a draw, got losses first: call randint of this sampler before")
        rows = self._rows(len(losses), prior=prior)
        if prior in self._losses:
            raise ValueError("each draw has one mean, got a second: add up the losses, (B, ...), and take one mean")
        weight = self._drawn.weight[rows].to(losses)
        of_rows = losses.detach().flatten(1).mean(1) if losses.ndim > 1 else losses.detach()
        if self._needs_weights and loss_weights is not None:
            of_rows = of_rows * self._factors(loss_weights.detach(), len(losses), rows)
        self._losses[prior] = of_rows
        self._is_step = self.sampler.accelerator.sync_gradients
        return (losses * weight.view(-1, *[1] * (losses.ndim - 1))).mean()

    def _rows(self, num_losses: int, *, prior: bool) -> slice:
        """Return the rows of the batch that so many losses belong to: all, or a half of a batch of two halves."""
        assert self._drawn is not None
        num_drawn = len(self._drawn.t)
        if num_losses == num_drawn and not prior:
            return slice(None)
        if 2 * num_losses != num_drawn:
            raise ValueError(
                f"losses must be one for each of the {num_drawn} timesteps, or for half of them with prior "
                f"preservation, got {num_losses}: keep the first dimension that of the batch"
            )
        return slice(num_losses, None) if prior else slice(num_losses)

    def _factors(self, loss_weights: Tensor, num_losses: int, rows: slice) -> Tensor:
        factors = loss_weights.flatten(1).mean(1) if loss_weights.ndim > 1 else loss_weights
        return factors[rows] if len(factors) != num_losses else factors

    def _take_losses(self) -> Tensor:
        halves, self._losses = self._losses, {}
        losses = torch.cat([halves[part] for part in sorted(halves)])  # the instances, then the prior
        assert self._drawn is not None
        if len(losses) != len(self._drawn.t):
            fix = "take the mean of the prior's half by timestep_sampler.prior too"
            if len(losses) > len(self._drawn.t):  # as diffusers' DreamBooth with --snr_gamma at one image a step
                fix = (
                    "with prior preservation multiply the first half by weights of the first half alone, "
                    "mse_loss_weights, _ = torch.chunk(mse_loss_weights, 2, dim=0)"
                )
            raise ValueError(
                f"losses of all {len(self._drawn.t)} samples must be weighted before the step, got {len(losses)}: {fix}"
            )
        self._drawn = None
        return losses


class PriorHalf:
    """The second half of a batch with prior preservation, the images of the class: `timestep_sampler.prior`."""

    def __init__(self, whole: ScriptSampler) -> None:
        self.whole = whole

    def mean(self, losses: Tensor, loss_weights: Tensor | None = None) -> Tensor:
        """Return the weighted mean of the losses (B/2, ...) of this half."""
        return self.whole._weighted_mean(losses, loss_weights, prior=True)


def sampler_for_script(sampler: str | TimestepSampler, seed: int | None = None) -> TimestepSampler:
    """Return the sampler of this name, or the sampler itself, if it does with what a script can show it."""
    if not isinstance(sampler, str):
        check_needs(sampler, "a patched script", x0=False, loss_at=False)
        return sampler
    if ":" not in sampler and sampler not in (names := names_for_scripts()):
        if sampler not in samplers:
            raise ValueError(samplers.removed.get(sampler) or unknown("sampler", sampler, names))
        raise ValueError(
            f"the sampler of a script must need the losses alone, got {sampler!r}: take "
            f"one of {', '.join(names)}, or module:Class"
        )
    made: TimestepSampler = from_name(sampler, **({} if seed is None else {"seed": seed}))
    check_needs(made, "a patched script", x0=False, loss_at=False)
    return made


def names_for_scripts() -> list[str]:
    """Return the names that `--timestep_sampler` takes: of samplers made without arguments that see losses alone."""
    names = []
    for name in samplers:
        needed = [argument for argument in arguments_of(samplers.find(name)).values() if argument.required]
        if not needed:
            made = from_name(name)
            names += [] if made.uses_x0 or made.uses_loss_at else [name]
    return names


def scheme_quantile(
    weighting_scheme: str,
    t: Tensor,
    logit_mean: float | None = None,
    logit_std: float | None = None,
    mode_scale: float | None = None,
) -> Tensor:
    """Return u (B,) such that for uniform t (B,) it is drawn as diffusers draws it; t = 0, the data, gives u near 1."""
    choice("weighting_scheme", weighting_scheme, SCHEMES)
    t = t.double()
    if weighting_scheme == "logit_normal":
        if logit_mean is None or logit_std is None:
            raise ValueError(f"logit_normal needs both, got {logit_mean=} and {logit_std=}: the usual ones are 0 and 1")
        u = torch.sigmoid(logit_mean + logit_std * torch.special.ndtri(1 - t))
    elif weighting_scheme == "mode":
        if mode_scale is None:
            raise ValueError("mode needs mode_scale, got None: the usual one is 1.29")
        u = 1 - t - mode_scale * (torch.cos(math.pi * t / 2) ** 2 - 1 + t)
    else:
        u = 1 - t
    return u.clamp(0, BELOW_ONE).float().clamp(max=BELOW_ONE)


def rows_like(drawn: Timesteps) -> Tensor:
    """Return as many rows without content as were drawn: (B, 0)."""
    return drawn.t.new_empty(len(drawn.t), 0)
