"""What an optimizer divides gradients by, read from its state. Nothing here waits for the device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

State = Mapping[str, Any]  # of one parameter
Group = Mapping[str, Any]  # of parameters, with their settings
MOMENTA = ("momentum_buffer", "exp_avg", "ax")  # what optimizers keep that divide by nothing: SGD, Muon, Lion, ASGD


def of_adam(states: Sequence[State], group: Group) -> list[Tensor]:
    """Return sqrt(v) + eps of each parameter, v corrected for its start at 0."""
    key = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
    roots = list(torch._foreach_sqrt([state[key].float() for state in states]))
    betas = group.get("betas")
    for step, own in _by_step(roots, states, group):
        if betas is not None:
            torch._foreach_div_(own, (1 - betas[1] ** step).sqrt())
    torch._foreach_add_(roots, group.get("eps", 1e-8))
    return roots


def of_adamax(states: Sequence[State], group: Group) -> list[Tensor]:
    """Return the running maximum of each parameter, which has eps in it."""
    return [state["exp_inf"].float() for state in states]


def of_rmsprop(states: Sequence[State], group: Group) -> list[Tensor]:
    """Return sqrt(v) + eps of each parameter, v around the mean gradient if centered."""
    squares = [state["square_avg"].float() for state in states]
    if group.get("centered"):
        means = [state["grad_avg"].float() for state in states]
        squares = list(torch._foreach_addcmul(squares, means, means, value=-1))
        torch._foreach_clamp_min_(squares, 0.0)  # rounding
    roots = list(torch._foreach_sqrt(squares))
    torch._foreach_add_(roots, group["eps"])
    return roots


def of_adadelta(states: Sequence[State], group: Group) -> list[Tensor]:
    """Return sqrt(v + eps) / sqrt(u + eps) of each parameter: u is the mean square of its past steps."""
    squares, deltas = (
        torch._foreach_add([state[key].float() for state in states], group["eps"])
        for key in ("square_avg", "acc_delta")
    )
    return list(torch._foreach_sqrt(torch._foreach_div(squares, deltas)))


def of_adagrad(states: Sequence[State], group: Group) -> list[Tensor]:
    """Return sqrt(sum) + eps of each parameter, 1 where there was no gradient so far: its state is older than that."""
    roots = torch._foreach_sqrt([state["sum"].float() for state in states])
    return [torch.where(root > 0, root + group["eps"], 1.0) for root in roots]


READ_BY: dict[str, Callable[[Sequence[State], Group], list[Tensor]]] = {
    "exp_avg_sq": of_adam,  # and AdamW, NAdam, RAdam
    "exp_inf": of_adamax,
    "acc_delta": of_adadelta,  # has a square_avg too
    "square_avg": of_rmsprop,
    "sum": of_adagrad,
}
"""How divisors are read, by the name of what the state holds; the first name counts."""


def divisors(states: Sequence[State], group: Group) -> dict[int, Tensor]:
    """Return what the gradients of a group's parameters are divided by, by place; none for those without state."""
    found: dict[int, Tensor] = {}
    for name, read in READ_BY.items():
        known = [k for k, state in enumerate(states) if _name(state) == name]
        if known:
            found.update(zip(known, read([states[k] for k in known], group), strict=True))
    return found


def can_be_read(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `divisors` knows all that an optimizer divides by, which may be nothing.

    It does not know factored or quantised state, such as that of Adafactor or of 8-bit optimizers, nor state that the
    optimizer keeps elsewhere, as ZeroRedundancyOptimizer does: without any state, only SGD is trusted to need none.
    """
    found = [
        (optimizer.state.get(parameter, {}), parameter, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    if not any(state for state, _, _ in found):
        return isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.SGD)
    return all(_is_known(*each) for each in found)


def _name(state: State) -> str | None:
    return next((name for name in READ_BY if name in state), None)


def _is_known(state: State, parameter: Tensor, group: Group) -> bool:
    name = _name(state)
    if name is None:
        kept = [key for key, value in state.items() if isinstance(value, Tensor) and value.ndim > 0]
        return set(kept) <= set(MOMENTA)
    value = state[name]
    if isinstance(group.get("eps"), tuple | list):  # of Adafactor, which keeps v of vectors whole
        return False
    whole = type(value) is Tensor or type(value) is type(parameter.data)  # other classes quantise
    fits = value.shape == parameter.shape and value.device == parameter.device
    return whole and fits and value.is_floating_point()


def _by_step(roots: Sequence[Tensor], states: Sequence[State], group: Group) -> list[tuple[Tensor, list[Tensor]]]:
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
