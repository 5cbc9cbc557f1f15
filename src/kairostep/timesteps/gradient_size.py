"""The size of a gradient as the optimizer sees it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Metric = Literal["plain", "half", "adam"]


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer trains, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@torch.no_grad()
def scale_gradients(
    gradients: Sequence[Tensor], optimizer: torch.optim.Optimizer, metric: Metric = "adam"
) -> list[Tensor]:
    """Return gradients whose plain norm is their size in the optimizer's metric, without waiting for the device.

    Args:
        gradients: One per parameter, in the order of `trained_parameters`.
        optimizer: Adam and its kin divide gradients by the root of their running second moment, v: that makes the
            metric. A parameter without v, as all of SGD's or that of a layer not used so far, has scale 1. So have all
            of an optimizer that factors v, such as Adafactor.
        metric: "adam" weights squares by 1/v, the size of the step; "half" by 1/sqrt(v), the metric in which Adam
            descends; "plain" not at all.
    """
    remaining, scaled = [g.detach().float() for g in gradients], []
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.requires_grad]
        own, remaining = remaining[: len(parameters)], remaining[len(parameters) :]
        states = [optimizer.state.get(p, {}) for p in parameters]
        known = [k for k, state in enumerate(states) if "exp_avg_sq" in state]
        if known and metric != "plain" and not _factors(states, group):
            divisors = _divisors([states[k] for k in known], group)
            divisors = list(torch._foreach_sqrt(divisors)) if metric == "half" else divisors
            for k, quotient in zip(known, torch._foreach_div([own[k] for k in known], divisors), strict=True):
                own[k] = quotient
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
    gradients = torch.autograd.grad((signs * losses).sum(), trained_parameters(optimizer), materialize_grads=True)
    return squared_size(gradients, optimizer)


def _factors(states: Sequence[Mapping[str, Any]], group: Mapping[str, Any]) -> bool:
    """Whether an optimizer keeps the second moment of matrices by rows and columns, or divides otherwise than Adam."""
    return any("exp_avg_sq_row" in state for state in states) or isinstance(group.get("eps"), tuple | list)


def _divisors(states: Sequence[Mapping[str, Any]], group: Mapping[str, Any]) -> list[Tensor]:
    """Return sqrt(v) + eps of each parameter, v corrected for its start at 0, as Adam divides by."""
    key = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
    roots = list(torch._foreach_sqrt([state[key].float() for state in states]))
    betas = group.get("betas")
    for step, own in _by_step(roots, states, group):
        if betas is not None:
            torch._foreach_div_(own, (1 - betas[1] ** step).sqrt())
    torch._foreach_add_(roots, group.get("eps", 1e-8))
    return roots


def _by_step(
    roots: Sequence[Tensor], states: Sequence[Mapping[str, Any]], group: Mapping[str, Any]
) -> list[tuple[Tensor, list[Tensor]]]:
    """Return the steps taken, (), and the parameters that took as many. None if the optimizer does not count.

    Counts on a GPU are not waited for: those of a group are taken to be that of its first parameter.
    """
    found: dict[float | None, tuple[Tensor, list[Tensor]]] = {}
    for root, state in zip(roots, states, strict=True):
        step = state.get("step", group.get("step"))
        if step is None:
            continue
        on_device = isinstance(step, Tensor) and step.device.type != "cpu"
        known = None if on_device else float(step)
        if known not in found:
            found[known] = (step.float() if known is None else root.new_full((), known)), []
        found[known][1].append(root)
    return list(found.values())
