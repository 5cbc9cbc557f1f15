"""The size of a gradient as the optimizer sees it."""

from collections.abc import Sequence
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
            metric. One without such a state, as SGD, and a parameter not yet stepped, count plainly.
        metric: "adam" weights squares by 1/v, the size of the step; "half" by 1/sqrt(v), the metric in which Adam
            descends; "plain" not at all.
    """
    remaining, scaled = [g.detach().float() for g in gradients], []
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.requires_grad]
        own, remaining = remaining[: len(parameters)], remaining[len(parameters) :]
        states = [optimizer.state.get(p) for p in parameters]
        if metric == "plain" or not all(map(_has_second_moment, states)):
            scaled += own
            continue
        divisors = _divisors(states, group)
        scaled += torch._foreach_div(own, torch._foreach_sqrt(divisors) if metric == "half" else divisors)
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


def _has_second_moment(state: dict[str, Any] | None) -> bool:
    return state is not None and "exp_avg_sq" in state


def _divisors(states: Sequence[Any], group: dict[str, Any]) -> list[Tensor]:
    """Return sqrt(v) + eps of each parameter, v corrected for its start at 0, as Adam divides by."""
    key = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
    roots = torch._foreach_sqrt([state[key].float() for state in states])
    step = torch.as_tensor(states[0]["step"], dtype=torch.float32, device=roots[0].device)  # all stepped together
    torch._foreach_div_(roots, (1 - group["betas"][1] ** step).sqrt())
    torch._foreach_add_(roots, group["eps"])
    return list(roots)
