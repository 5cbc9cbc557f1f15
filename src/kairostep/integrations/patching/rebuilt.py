"""Predictions that a script rebuilds from the network's output by factors of the draw, which its loss weight undoes.

With x0 = x - sigma * output, an error weighted by 1 / sigma**2 is the plain error of the output. A sampler that is
shown the weight takes the plain error for a weighted one, and `RootLoss` then draws where there is least to learn.
"""

import ast

from kairostep.integrations.patching.loop import Loop, depend_on_draws
from kairostep.integrations.patching.source import dotted, is_assignment, names_in, targets_of, value_of
from kairostep.integrations.patching.use_of_draw import ABOUT

LIBRARIES = ("torch", "F", "nn")  # whose functions rebuild no prediction


def rebuilt_from_output(loop: Loop) -> dict[str, int]:
    """Return the variables that are made of a rebuilt prediction, each with the line that rebuilds it."""
    from_draws = depend_on_draws(loop)
    outputs: set[str] = set()
    rebuilt: dict[str, int] = {}
    lines = sorted(filter(is_assignment, ast.walk(loop.body)), key=lambda node: node.lineno)
    for line in lines:
        value = value_of(line)
        names = {name for target in targets_of(line) for name in names_in(target)}
        earlier = [rebuilt[name] for name in names_in(value) if name in rebuilt]
        if earlier:
            rebuilt |= dict.fromkeys(names, min(earlier))
        elif is_network_call(value, from_draws):
            outputs |= names
        elif any(scales(part, outputs, from_draws) for part in ast.walk(value)):
            rebuilt |= dict.fromkeys(names, value.lineno)
        elif carries(value, outputs) or (names_in(value) & from_draws and any(map(is_named_as_output, names))):
            outputs |= names
    return rebuilt


def is_network_call(value: ast.expr, from_draws: set[str]) -> bool:
    """Return whether an expression is what a network returns: `unet(x, t).sample`, `net(x, t, return_dict=False)`."""
    call = value
    while isinstance(call, ast.Attribute | ast.Subscript):
        call = call.value
    if not isinstance(call, ast.Call) or not names_in(call) & from_draws:
        return False
    if root_of(call) in {*LIBRARIES, *from_draws} or "scheduler" in root_of(call):
        return False
    return call is not value or any(keyword.arg == "return_dict" for keyword in call.keywords)


def is_named_as_output(name: str) -> bool:
    """Return whether a variable is called as scripts call what a network returns."""
    return "pred" in name or "output" in name


def carries(value: ast.expr, outputs: set[str]) -> bool:
    """Return whether an expression is an output in another form: `x.float()`, `-x`, `torch.chunk(x, 2)`."""
    if isinstance(value, ast.Name):
        return value.id in outputs
    if isinstance(value, ast.UnaryOp):
        return carries(value.operand, outputs)
    if isinstance(value, ast.Attribute | ast.Subscript):
        return carries(value.value, outputs)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        of_torch = dotted(value.func.value) == "torch" and bool(value.args)
        return carries(value.args[0] if of_torch else value.func.value, outputs)
    return False


def scales(part: ast.AST, outputs: set[str], from_draws: set[str]) -> bool:
    """Return whether a part multiplies an output by a factor of the draw, or gives both to one function."""
    if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult | ast.Div):
        sides = (part.left, part.right)
        return any(carries(side, outputs) for side in sides) and any(
            values_in(side) & (from_draws - outputs) for side in sides
        )
    if isinstance(part, ast.Call) and root_of(part) not in LIBRARIES:  # get_velocity(output, noisy, timesteps)
        given = [*part.args, *(keyword.value for keyword in part.keywords)]
        return any(carries(each, outputs) for each in given) and any(
            values_in(each) & (from_draws - outputs) for each in given
        )
    return False


def values_in(node: ast.AST) -> set[str]:
    """Return the variables whose values an expression has: not x of x.shape."""
    if isinstance(node, ast.Attribute) and node.attr in ABOUT:
        return set()
    if isinstance(node, ast.Name):
        return {node.id}
    return set().union(*map(values_in, ast.iter_child_nodes(node)))


def root_of(call: ast.expr) -> str:
    """Return the name that a chain of calls begins with: `torch` of torch.stack(x).min(dim=1)."""
    while isinstance(call, ast.Attribute | ast.Subscript | ast.Call):
        call = call.func if isinstance(call, ast.Call) else call.value
    return call.id if isinstance(call, ast.Name) else ""
