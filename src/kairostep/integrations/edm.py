"""Losses for EDM and EDM2 (Karras et al. 2022, 2024), named by dotted path in their options.

EDM:  loss_kwargs.class_name = "kairostep.integrations.edm.EDMLoss"
EDM2: loss_kwargs = dict(class_name="kairostep.integrations.edm.EDM2Loss", P_mean=-0.4, P_std=1.0)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kairostep.diffusion import X0, Objective, edm
from kairostep.integrations.noise_levels import LogNormal, ReadProcess, follow, level_at
from kairostep.integrations.optimizer_hooks import StepObserver
from kairostep.integrations.reach import check_reach, checked_sampler, learn_without_step
from kairostep.names import SAMPLERS, arguments_of, from_name
from kairostep.timesteps import TimestepSampler
from kairostep.timesteps.arguments import finite, positive


class SigmaLoss(nn.Module):
    """The loss of one batch by element, (B, C, H, W), its noise levels drawn by a sampler.

    A Module, whose state is the sampler's: EDM2's checkpoints hold it by `state_dict`, EDM's snapshots pickle it. EDM
    itself forgets its loss on resuming: `loss_fn.load_state_dict(snapshot["loss_fn"].state_dict())` brings it back.

    P_mean, P_std: of log(sigma). t is the share of these draws that are less noisy, so that "uniform" draws as EDM.
    sampler: a sampler, or its name with `sampler_kwargs`; one that takes the process is given it.

    What the sampler learns, it learns when the loss is computed; one that asks for losses around the step (Adaptive)
    needs `loss_fn.attach(optimizer)` once both are made.
    """

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
        self.sigma_data = positive("sigma_data", sigma_data)
        self.sampler = self._made(sampler, sampler_kwargs)
        self._observer: StepObserver | None = None

    @property
    def process(self) -> ReadProcess:
        """x0 + sigma noise, t being the share of EDM's own draws of sigma that are smaller."""
        quantile = LogNormal(self.P_mean, self.P_std)
        return ReadProcess(torch.ones_like, quantile, time=quantile)

    @property
    def objective(self) -> Objective:
        """EDM's weighted error of the denoised image, for samplers that want to know."""
        return Objective(self.process, X0, edm(self.sigma_data))

    def attach(self, optimizer: Optimizer) -> None:
        """Let the sampler observe the steps of this optimizer."""
        if self._observer is not None:
            self._observer.remove()
        self._observer = StepObserver(self.sampler, optimizer)

    def elements(self, net: Callable[..., Any], x0: Tensor, sigma: Tensor, **cond: Any) -> tuple[Tensor, Tensor]:
        """Return what is trained and what the sampler is shown, each (B, C, H, W), at sigma (B, 1, 1, 1)."""
        raise NotImplementedError

    def edm_weight(self, sigma: Tensor) -> Tensor:
        """Return EDM's factor on the squared error of the denoised image."""
        return (sigma.square() + self.sigma_data**2) / (sigma * self.sigma_data).square()

    def sampled(self, net: Callable[..., Any], x0: Tensor, **cond: Tensor | None) -> Tensor:
        """Return the elements at sigmas drawn now, times the weights of the draws, and show them to the sampler."""
        follow(self.sampler, x0.device)
        drawn = self.sampler.sample(x0)
        trained, shown = self.elements(net, x0, self._sigma(drawn.t, x0), **cond)
        losses = shown.detach().flatten(1).mean(1)  # (B,)

        def loss_at(rows: Tensor, t: Tensor) -> Tensor:
            some = {name: value if value is None else value[rows] for name, value in cond.items()}
            return self.elements(net, x0[rows], self._sigma(t, x0), **some)[1].flatten(1).mean(1)

        if torch.is_grad_enabled():  # an evaluation teaches nothing
            if self._observer is not None:
                self._observer.show(x0, drawn, losses, loss_at)
            else:
                check_reach(self.sampler, "an EDM loss before attach(optimizer)", x0=True, loss_at=False)
                learn_without_step(self.sampler, drawn, losses)
        return trained * drawn.weight.to(trained.dtype).view(-1, *[1] * (x0.ndim - 1))

    def _sigma(self, t: Tensor, x0: Tensor) -> Tensor:
        sigma = level_at(LogNormal(self.P_mean, self.P_std), t)
        return sigma.to(torch.promote_types(x0.dtype, torch.float32)).view(-1, *[1] * (x0.ndim - 1))

    def _made(self, sampler: TimestepSampler | str, options: dict[str, Any] | None) -> TimestepSampler:
        if not isinstance(sampler, str):
            if options:
                raise ValueError(f"sampler_kwargs belong to the name of a sampler, got {options} and {sampler!r}")
            return checked_sampler(sampler)
        given = dict(options or {})
        if "process" in (arguments_of(SAMPLERS[sampler]) if sampler in SAMPLERS else {}):
            given.setdefault("process", self.process)
        if sampler == "infonoise":
            given.setdefault("loss_weight", self.objective.x0_weight)
        made = from_name(sampler, **given)
        return checked_sampler(made)  # type: ignore[arg-type]  # a weighting has a name too, and is refused

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

    def elements(self, net: Callable[..., Any], x0: Tensor, sigma: Tensor, **cond: Any) -> tuple[Tensor, Tensor]:
        """Return the weighted squared error, twice."""
        noisy = x0 + torch.randn_like(x0) * sigma
        denoised = net(noisy, sigma, cond["labels"], augment_labels=cond["augment_labels"])
        error = self.edm_weight(sigma) * (denoised - x0).square()
        return error, error


class EDM2Loss(SigmaLoss):
    """EDM2's loss: EDM's over the network's own estimate of it, exp(logvar), plus logvar.

    The sampler is shown the first term, which is never negative and is what moves the denoiser.
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

    def forward(
        self,
        net: Callable[..., tuple[Tensor, Tensor]],  # net(x, sigma, labels, return_logvar=True) -> denoised x, logvar
        images: Tensor,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of each element, (B, C, H, W)."""
        return self.sampled(net, images, labels=labels)

    def elements(self, net: Callable[..., Any], x0: Tensor, sigma: Tensor, **cond: Any) -> tuple[Tensor, Tensor]:
        """Return the loss, and its first term."""
        noisy = x0 + torch.randn_like(x0) * sigma
        denoised, logvar = net(noisy, sigma, cond["labels"], return_logvar=True)
        error = self.edm_weight(sigma) / logvar.exp() * (denoised - x0).square()
        return error + logvar, error
