"""The size of a gradient as the optimizer sees it."""

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kairostep.timesteps.divisors import can_be_read, divisors

Metric = Literal["plain", "half", "adam"]
REENTRANT = (
    "a probe of gradients needs gradient checkpointing with use_reentrant=False, got True: pass use_reentrant=False to "
    "torch.utils.checkpoint.checkpoint, or in transformers call "
    "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
)


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer trains, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def gradients_of(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradient of a loss () by each parameter, 0 for one without a part in it.

    Reentrant gradient checkpointing hides its parameters from torch: that raises in place of gradients of 0.
    """
    try:
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise ValueError(REENTRANT) from error
    if any(gradient is None for gradient in found) and _has_reentrant_checkpoint(loss):
        raise ValueError(REENTRANT)
    if all(gradient is None for gradient in found):  # known without waiting for the device, unlike a gradient of 0
        warnings.warn(
            f"the losses depend on none of the {len(parameters)} parameters whose gradient is measured, so that it is "
            "0: pass the optimizer, or the parameters, of the model that computes these losses",
            stacklevel=2,
        )
    return tuple(torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True))


def _has_reentrant_checkpoint(loss: Tensor) -> bool:
    waiting, seen = [loss.grad_fn], set[torch.autograd.graph.Node]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if "CheckpointFunction" in node.name():
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


def warn_of_plain_norm(optimizer: torch.optim.Optimizer) -> None:
    """Warn if an optimizer divides gradients by what cannot be read, so that its metric is the plain norm."""
    if not can_be_read(optimizer):
        name = type(getattr(optimizer, "optimizer", optimizer)).__name__  # accelerate and Lightning wrap it
        warnings.warn(
            f"what {name} divides gradients by cannot be read from its state, so they are measured by the plain norm: "
            f"the density that is least noisy in it may not be so for {name}'s steps; AdamW is read, and RootLoss "
            "needs no optimizer",
            stacklevel=3,
        )


def warn_of_useless_probes(num_skipped: Tensor, num_probes: int) -> None:
    """Warn if all probes of the first sweep were skipped. Reading their number waits for the device."""
    if int(num_skipped) == num_probes:
        warnings.warn(
            f"none of the first {num_probes} probes found a gradient that is finite and above 0, so LeastNoise draws "
            "as RootLoss does: check that loss_at returns finite losses of the model whose optimizer it was given",
            stacklevel=3,
        )


@torch.no_grad()
def scale_gradients(
    gradients: Sequence[Tensor], optimizer: torch.optim.Optimizer, metric: Metric = "adam"
) -> list[Tensor]:
    """Return gradients whose plain norm is their size in the optimizer's metric, without waiting for the device.

    Args:
        gradients: One per parameter, in the order of `trained_parameters`.
        optimizer: What it divides gradients by makes the metric: Adam by the root of its running second moment, v.
            A parameter that it divides by nothing, as all of SGD's or that of a layer not used so far, has scale 1. So
            have all if any cannot be read, as with Adafactor, which factors v.
        metric: "adam" weights squares by 1/v, the size of the step; "half" by 1/sqrt(v), the metric in which Adam
            descends; "plain" not at all. With other optimizers, the square of the divisor takes the place of v.
    """
    remaining, scaled = [g.detach().float() for g in gradients], []
    divided = metric != "plain" and can_be_read(optimizer)
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.requires_grad]
        own, remaining = remaining[: len(parameters)], remaining[len(parameters) :]
        found = divisors([optimizer.state.get(p, {}) for p in parameters], group) if divided else {}
        if found:
            by = list(found.values())
            by = list(torch._foreach_sqrt(by)) if metric == "half" else by
            for place, quotient in zip(found, torch._foreach_div([own[k] for k in found], by), strict=True):
                own[place] = quotient
        scaled += own
    return scaled


def squared_size(gradients: Sequence[Tensor], optimizer: torch.optim.Optimizer, metric: Metric = "adam") -> Tensor:
    """Return the squared size of a gradient in the optimizer's metric, a float32 scalar; see `scale_gradients`."""
    return _squared_norm(scale_gradients(gradients, optimizer, metric))


def scaled_gradient(gradients: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
    """Return a gradient (P,) whose plain norm is its size in the optimizer's metric: those of several ranks add up."""
    return torch.cat([gradient.flatten() for gradient in scale_gradients(gradients, optimizer)])


def _squared_norm(gradients: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(gradients)).square().sum()


def signed_size(losses: Tensor, signs: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the squared size of the gradient of the sum of losses (N,) with these signs, a float32 scalar.

    With random signs it is the sum of the rows' own squared sizes, since products between rows cancel on average.
    """
    gradients = gradients_of((signs * losses).sum(), trained_parameters(optimizer))
    return squared_size(gradients, optimizer)
