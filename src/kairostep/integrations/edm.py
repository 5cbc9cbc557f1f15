"""Losses for EDM and EDM2 (Karras et al. 2022, 2024), named by dotted path in their options.

EDM:  loss_kwargs.class_name = "kairostep.integrations.edm.EDMLoss"
EDM2: loss_kwargs = dict(class_name="kairostep.integrations.edm.EDM2Loss", P_mean=-0.4, P_std=1.0)

A sampler that asks for losses around the step: add sampler="adaptive" to these options, and call
`loss_fn.attach(optimizer, net)` once network and optimizer are made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kairostep.arguments import arguments_of, bundle
from kairostep.by_name import from_name
from kairostep.checks import finite, positive
from kairostep.diffusion import X0, Objective, edm
from kairostep.integrations.foreign_loop import check_needs, give_loss_weight, learn_without_step, require_sampler
from kairostep.integrations.noise_levels import LogNormal, ReadProcess, follow, level_at
from kairostep.integrations.optimizer_hooks import StepObserver
from kairostep.registry import samplers
from kairostep.timesteps import BetaPolicy, TimestepSampler

MAX_TOLD = 64  # batches, should nobody ask
OF_NETWORK = ("policy", "parameters")  # arguments of samplers that are made for a network


@dataclass(frozen=True, slots=True)
class Elements:
    """The loss of a batch by element."""

    trained: Tensor  # (B, C, H, W)
    shown: Tensor  # (B, C, H, W) to the sampler
    factor: Tensor | None = None  # (B, 1, 1, 1) that the network itself put on what is shown


class ToldFactor:
    """A factor on the loss as a function of t, recorded batch by batch since it was last read.

    A network that weights its own loss records the factor of each batch. `RootLoss` reads it at the times it has seen.
    """

    def __init__(self) -> None:
        self.told: list[tuple[Tensor, Tensor]] = []
        self.was_asked = False

    def tell(self, t: Tensor, factor: Tensor) -> None:
        """Record the factor (B,) at t (B,)."""
        earlier = [] if self.was_asked else self.told[-MAX_TOLD:]
        self.told, self.was_asked = [*earlier, (t, factor)], False

    def __call__(self, t: Tensor) -> Tensor:
        """Return the factor (N,) at recorded times (N,)."""
        if not self.told:
            return torch.ones_like(t)
        self.was_asked = True
        known, order = torch.cat([own for own, _ in self.told]).sort()
        place = torch.searchsorted(known, t.contiguous()).clamp(max=len(known) - 1)
        return torch.cat([factor for _, factor in self.told])[order[place]]

    def __getstate__(self) -> dict[str, Any]:
        return {"told": [], "was_asked": False}  # a copy or a pickle is told anew, on its own device


class SigmaLoss(nn.Module):
    """The loss of one batch by element, (B, C, H, W), its noise levels drawn by a sampler.

    A sampler learns when the loss is computed. One that asks for losses around the step needs
    `loss_fn.attach(optimizer, net)` once, before a checkpoint is loaded.

    This is a Module, and its state is the sampler's. EDM2's checkpoints hold it by `state_dict`. EDM forgets its loss
    when it resumes, so save `loss_fn.state_dict()` in its training state. Snapshots of both pickle the loss and load
    only where kairostep is installed, unless you leave it out. docs/integrations.md has the lines.

    Args:
        P_mean: Mean of log(sigma). t is the share of these draws that are less noisy, so that "uniform" draws as EDM.
        P_std: Standard deviation of log(sigma).
        sigma_data: Standard deviation of the data.
        sampler: A sampler, or its name. A sampler that takes the process gets it. "adaptive" and "gradient_variance"
            are made by `attach(optimizer, net)`, from the network's shapes.
        sampler_kwargs: Arguments of the sampler's class, as a dict or as JSON. With "adaptive" also `hidden` and
            `depth` of its policy.
    """

    sampler: TimestepSampler | None

    def __init__(
        self,
        P_mean: float,
        P_std: float,
        sigma_data: float,
        sampler: TimestepSampler | str,
        sampler_kwargs: dict[str, Any] | None,
    ) -> None:
        super().__init__()
        self.P_mean, self.P_std = finite("P_mean", P_mean), positive("P_std", P_std)
        self.sigma_data = positive("sigma_data", sigma_data, example=0.5)
        self.sampler = self._made(sampler, sampler_kwargs)
        self._unmade = (sampler, sampler_kwargs or {}) if self.sampler is None else None
        self._observer: StepObserver | None = None
        self.factor = ToldFactor()

    @property
    def process(self) -> ReadProcess:
        """x0 + sigma noise, t being the share of EDM's own draws of sigma that are smaller."""
        quantile = LogNormal(self.P_mean, self.P_std)
        return ReadProcess(torch.ones_like, quantile, time=quantile)

    @property
    def objective(self) -> Objective:
        """EDM's weighted error of the denoised image, for samplers that take an objective."""
        return Objective(self.process, X0, edm(self.sigma_data))

    def attach(self, optimizer: Optimizer, net: nn.Module | None = None) -> None:
        """Let the sampler observe the steps of this optimizer. A sampler given by name may need the network."""
        if self.sampler is None:
            assert self._unmade is not None
            name, options = self._unmade
            self.sampler = sampler_for_network(str(name), options, net)
        if self._observer is not None:
            self._observer.remove()
        self._observer = StepObserver(self.sampler, optimizer)

    def elements(self, net: Callable[..., Any], x0: Tensor, sigma: Tensor, **cond: Any) -> "Elements":
        """Return the loss at sigma (B, 1, 1, 1)."""
        raise NotImplementedError

    def edm_weight(self, sigma: Tensor) -> Tensor:
        """Return EDM's factor on the squared error of the denoised image."""
        return (sigma.square() + self.sigma_data**2) / (sigma * self.sigma_data).square()

    def sampled(self, net: Callable[..., Any], x0: Tensor, **cond: Tensor | None) -> Tensor:
        """Draw sigmas, return the weighted loss by element, and show it to the sampler."""
        sampler = self.sampler
        if sampler is None:
            name, _ = self._unmade or ("", {})
            raise ValueError(f"{name} is made for a network: call loss_fn.attach(optimizer, net) once both are made")
        follow(sampler, x0.device)
        drawn = sampler.sample(x0)
        found = self.elements(net, x0, self._sigma(drawn.t, x0), **cond)
        losses = found.shown.detach().flatten(1).mean(1)  # (B,)

        bare = net.module if isinstance(net, DistributedDataParallel) else net  # ranks may ask unequally often

        def loss_at(rows: Tensor, t: Tensor) -> Tensor:
            some = {name: value if value is None else value[rows] for name, value in cond.items()}
            return self.elements(bare, x0[rows], self._sigma(t, x0), **some).shown.flatten(1).mean(1)

        if torch.is_grad_enabled():  # an evaluation teaches nothing
            if found.factor is not None:
                self.factor.tell(drawn.t, found.factor.detach().flatten())
            if self._observer is not None:
                self._observer.show(x0, drawn, losses, loss_at)
            else:
                check_needs(sampler, "an EDM loss before attach(optimizer)", x0=True, loss_at=False)
                learn_without_step(sampler, drawn, losses)
        return found.trained * drawn.weight.to(found.trained.dtype).view(-1, *[1] * (x0.ndim - 1))

    def _sigma(self, t: Tensor, x0: Tensor) -> Tensor:
        sigma = level_at(LogNormal(self.P_mean, self.P_std), t)
        return sigma.to(torch.promote_types(x0.dtype, torch.float32)).view(-1, *[1] * (x0.ndim - 1))

    def _made(self, sampler: TimestepSampler | str, options: dict[str, Any] | None) -> TimestepSampler | None:
        """Return the sampler, or None if it needs the network first."""
        if not isinstance(sampler, str):
            if options:
                raise ValueError(f"sampler_kwargs belong to the name of a sampler, got {options} and {sampler!r}")
            return require_sampler(sampler)
        given = dict(options or {})
        taken = arguments_of(samplers.find(sampler)) if sampler in samplers else {}
        if any(name in taken and name not in given for name in OF_NETWORK):
            return None
        if "process" in taken:
            given.setdefault("process", self.process)
        if sampler == "infonoise":
            given.setdefault("loss_weight", self.objective.x0_weight)
        made = from_name(sampler, **given)
        return require_sampler(made)  # a weighting has a name too, and is refused

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_observer": None}  # a copy or a pickle observes no optimizer


class EDMLoss(SigmaLoss):
    """EDM's loss: (sigma**2 + sigma_data**2) / (sigma sigma_data)**2 on the squared error of the denoised image."""

    def __init__(
        self,
        P_mean: float = -1.2,
        P_std: float = 1.2,
        sigma_data: float = 0.5,
        sampler: TimestepSampler | str = "root_loss",
        sampler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(P_mean, P_std, sigma_data, sampler, sampler_kwargs)

    def forward(
        self,
        net: Callable[..., Tensor],  # net(x, sigma, labels, augment_labels=...) -> denoised x
        images: Tensor,
        labels: Tensor | None = None,
        augment_pipe: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Return the loss of each element, (B, C, H, W)."""
        x0, augment_labels = (images, None) if augment_pipe is None else augment_pipe(images)
        return self.sampled(net, x0, labels=labels, augment_labels=augment_labels)

    def elements(self, net: Callable[..., Any], x0: Tensor, sigma: Tensor, **cond: Any) -> Elements:
        """Return the weighted squared error."""
        noisy = x0 + torch.randn_like(x0) * sigma
        denoised = net(noisy, sigma, cond["labels"], augment_labels=cond["augment_labels"])
        error = self.edm_weight(sigma) * (denoised - x0).square()
        return Elements(error, error)


class EDM2Loss(SigmaLoss):
    """EDM2's loss: EDM's over the network's own estimate of it, exp(logvar), plus logvar.

    The sampler learns from the first term, which is never negative and is what trains the denoiser. `RootLoss` knows
    its factor 1/exp(logvar) and follows the factor times the root of EDM's loss.
    """

    def __init__(
        self,
        P_mean: float = -0.4,
        P_std: float = 1.0,
        sigma_data: float = 0.5,
        sampler: TimestepSampler | str = "root_loss",
        sampler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(P_mean, P_std, sigma_data, sampler, sampler_kwargs)
        if self.sampler is not None:
            give_loss_weight(self.sampler, self.factor)

    def forward(
        self,
        net: Callable[..., tuple[Tensor, Tensor]],  # net(x, sigma, labels, return_logvar=True) -> denoised x, logvar
        images: Tensor,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of each element, (B, C, H, W)."""
        return self.sampled(net, images, labels=labels)

    def elements(self, net: Callable[..., Any], x0: Tensor, sigma: Tensor, **cond: Any) -> Elements:
        """Return the loss, and its first term."""
        noisy = x0 + torch.randn_like(x0) * sigma
        denoised, logvar = net(noisy, sigma, cond["labels"], return_logvar=True)
        error = self.edm_weight(sigma) / logvar.exp() * (denoised - x0).square()
        return Elements(error + logvar, error, factor=(-logvar).exp())


def sampler_for_network(name: str, options: dict[str, Any], net: nn.Module | None) -> TimestepSampler:
    """Return the sampler of this name, made for the shape and the parameters of a network."""
    net = getattr(net, "module", net)
    channels, size = (getattr(net, key, None) for key in ("img_channels", "img_resolution"))
    if net is None or channels is None or size is None:
        raise ValueError(
            f"{name} is made for a network with img_channels and img_resolution, got {type(net).__name__}: "
            "call loss_fn.attach(optimizer, net), or pass a sampler in place of its name"
        )
    taken = arguments_of(samplers.find(name))
    given = bundle(samplers.find(name), options)
    if "policy" in taken:
        of_policy = {key: given.pop(key) for key in ("hidden", "depth") if key in given}
        given["policy"] = BetaPolicy.for_input((channels, size, size), **of_policy, seed=given.get("seed", 0))
    if "parameters" in taken:
        given["parameters"] = net.parameters()
    if "model" in taken:
        given["model"] = net
    made = from_name(name, **given)
    return require_sampler(made)
