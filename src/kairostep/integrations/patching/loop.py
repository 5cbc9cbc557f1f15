"""The training loop of a script: where it draws, takes its backward pass and steps, and what stands around it."""

import ast
from dataclasses import dataclass

from kairostep.integrations.patching.draws import BY_HAND, Draw, find_draws
from kairostep.integrations.patching.source import (
    Refused,
    Source,
    dotted,
    is_assignment,
    names_in,
    targets_of,
    value_of,
)
from kairostep.integrations.patching.tree import path_to


@dataclass(frozen=True)
class Loop:
    """The parts of a training loop that a patch changes or needs."""

    function: ast.FunctionDef | ast.Module
    body: ast.For
    accelerator: str
    backward: ast.stmt
    loss: str  # the variable whose gradient is taken
    draws: tuple[Draw, ...]
    steps: tuple[ast.stmt, ...]  # of the optimizer


def find_loop(source: Source) -> Loop:
    """Return the training loop, or refuse the script."""
    backward, call = find_backward(source.tree)
    parents = [node for node in path_to(source.tree, backward) if isinstance(node, ast.For)]
    if not parents:
        raise Refused(backward.lineno, "the backward pass must be in a loop over batches, got none around it", BY_HAND)
    loop = parents[-1]
    loss = loss_of(call)
    if not isinstance(loss, ast.Name):
        got = source.of(call)
        raise Refused(
            backward.lineno, f"backward must take one variable, got {got}", "write loss = ... before it and patch again"
        )
    functions = [node for node in path_to(source.tree, backward) if isinstance(node, ast.FunctionDef)]
    assert isinstance(call.func, ast.Attribute)
    return Loop(
        functions[-1] if functions else source.tree,
        loop,
        dotted(call.func.value),
        backward,
        loss.id,
        find_draws(source, loop, backward),
        find_steps(source, loop, backward),
    )


def loss_of(call: ast.Call) -> ast.expr | None:
    """Return the loss of `backward(loss)`, or of `backward(loss / n)`, which divides the mean that is taken before."""
    loss = call.args[0] if len(call.args) == 1 and not call.keywords else None
    if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div):
        is_number = isinstance(loss.right, ast.Constant) or bool(dotted(loss.right))
        return loss.left if is_number else None
    return loss


def find_backward(tree: ast.Module) -> tuple[ast.stmt, ast.Call]:
    """Return the one statement `accelerator.backward(loss)`."""
    calls = [
        (node, node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ]
    found = [(node, call) for node, call in calls if dotted(call.func).endswith("accelerator.backward")]
    if not found:
        others = [node.lineno for node, call in calls if dotted(call.func).endswith(".backward")]
        reason = "the script must take its gradient by accelerator.backward(loss), which is not found"
        raise Refused(min(others, default=1), reason, BY_HAND)
    if len(found) > 1:
        lines = ", ".join(str(node.lineno) for node, _ in found)
        reason = f"there must be one accelerator.backward(loss), got those of lines {lines}"
        raise Refused(found[1][0].lineno, reason, BY_HAND)
    return found[0]


def find_steps(source: Source, loop: ast.For, backward: ast.stmt) -> tuple[ast.stmt, ...]:
    """Return the statements `optimizer.step()` of the loop."""
    steps = tuple(
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and dotted(node.value.func) == "optimizer.step"
    )
    if not steps:
        reason = "the loop must call optimizer.step(), which is not found"
        raise Refused(backward.lineno, reason, "call the optimizer so, on a line of its own, and patch again")
    for step in steps:
        if not source.is_alone(step):
            reason = f"optimizer.step() must stand alone on its line, got {source.line_of(step)}"
            raise Refused(step.lineno, reason, "give it a line of its own")
    return steps


def depend_on_draws(loop: Loop) -> set[str]:
    """Return the variables of the loop that are computed from what was drawn."""
    known = {name for draw in loop.draws for target in targets_of(draw.statement) for name in names_in(target)}
    changes = sorted((node for node in ast.walk(loop.body) if isinstance(node, ast.stmt)), key=lambda node: node.lineno)
    for _ in range(3):  # later lines may be read by earlier ones of branches
        for names, value in (changed for node in changes if (changed := change_in(node))):
            if names_in(value) & known:
                known |= names
    return known


def change_in(node: ast.stmt) -> tuple[set[str], ast.expr] | None:
    """Return the variables that a statement changes, and from what."""
    if is_assignment(node):
        return {name for target in targets_of(node) for name in names_in(target)}, value_of(node)
    if isinstance(node, ast.AugAssign):
        return names_in(node.target), node.value
    if isinstance(node, ast.For):
        return names_in(node.target), node.iter
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        function = node.value.func
        if function.attr in ("append", "extend", "insert") and isinstance(function.value, ast.Name):
            return {function.value.id}, node.value
    return None
