"""The training loop of a script: where it draws, takes its backward pass and steps, and what stands around it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from kairostep.integrations.patching.source import Refused, Source, dotted, names_in

DENSITY = "compute_density_for_timestep_sampling"
TIMES = ("timesteps", "timestep", "t", "u", "indices", "index", "sigma_indices")  # what scripts call their draws
SIGMAS = ("sigmas", "sigma")  # what they call noise levels, of which 1 is noise
BY_HAND = "draw with drawn = sampler.sample(latents), as docs/integrations.md shows for any loop"

Block = list[ast.stmt]
Frame = tuple[Block, int]  # a block and how many of its statements come before


@dataclass(frozen=True)
class Draw:
    """A call that draws one timestep for each sample."""

    call: ast.Call
    statement: ast.Assign
    path: tuple[ast.AST, ...]  # from the loop to the call

    @property
    def is_of_sigmas(self) -> bool:
        """Whether diffusers' density is taken as the noise level itself, not as a place among the timesteps."""
        return dotted(self.call.func) == DENSITY and dotted(self.statement.targets[0]) in SIGMAS


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
    loss = call.args[0] if len(call.args) == 1 and not call.keywords else None
    if not isinstance(loss, ast.Name):
        got = source.of(call)
        raise Refused(backward.lineno, f"backward must take one variable, got {got}", "write loss = ... before it")
    functions = [node for node in path_to(source.tree, backward) if isinstance(node, ast.FunctionDef)]
    assert isinstance(call.func, ast.Attribute)
    return Loop(
        functions[-1] if functions else source.tree,
        loop,
        dotted(call.func.value),
        backward,
        loss.id,
        find_draws(source, loop, backward),
        find_steps(loop, backward),
    )


def find_backward(tree: ast.Module) -> tuple[ast.stmt, ast.Call]:
    """Return the one statement `accelerator.backward(loss)`."""
    found = [
        (node, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and dotted(node.value.func).endswith("accelerator.backward")
    ]
    if not found:
        reason = "the script must take its gradient by accelerator.backward(loss), which is not found"
        raise Refused(1, reason, BY_HAND)
    if len(found) > 1:
        lines = ", ".join(str(node.lineno) for node, _ in found)
        reason = f"there must be one accelerator.backward(loss), got those of lines {lines}"
        raise Refused(found[1][0].lineno, reason, "patch the loop of the network that learns to denoise by hand")
    return found[0]


def find_steps(loop: ast.For, backward: ast.stmt) -> tuple[ast.stmt, ...]:
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
        raise Refused(backward.lineno, reason, "wrap the step by hand: with timestep_sampler.observe(): ...")
    return steps


def find_draws(source: Source, loop: ast.For, backward: ast.stmt) -> tuple[Draw, ...]:
    """Return the draws of the loop; more than one only if a step makes one of them."""
    draws = []
    for statement in (node for node in ast.walk(loop) if isinstance(node, ast.Assign)):
        for call in (node for node in ast.walk(statement.value) if isinstance(node, ast.Call)):
            if is_draw(source, statement, call):
                check_size(source, call)
                draws.append(Draw(call, statement, tuple(path_to(loop, call))))
    if not draws:
        reason = f"no draw of timesteps is recognised before line {backward.lineno}"
        raise Refused(other_draw(loop) or loop.lineno, reason, f"draw by torch.randint(0, T, (bsz,)), or {BY_HAND}")
    for number, draw in enumerate(draws):
        for other in draws[:number]:
            if not are_exclusive(draw.path, other.path):
                reason = f"a step must draw once, got a second draw after that of line {other.call.lineno}"
                raise Refused(draw.call.lineno, reason, BY_HAND)
    return tuple(draws)


def is_draw(source: Source, statement: ast.Assign, call: ast.Call) -> bool:
    """Return whether a call draws timesteps: by its function, its bound, and the name that it is given."""
    function = dotted(call.func)
    if function == DENSITY:
        return True
    target = statement.targets[0]
    named = isinstance(target, ast.Name) and target.id in TIMES
    if function in ("torch.rand", "torch.multinomial"):
        return named and bool(call.args)
    return function == "torch.randint" and named and len(call.args) >= 2 and "timesteps" in source.of(call.args[1])


def check_size(source: Source, call: ast.Call) -> None:
    """Refuse a draw of anything but one number for each sample, or by a generator of its own."""
    by_hand = "draw one for each sample, (bsz,)"
    for keyword in call.keywords:
        if keyword.arg == "generator":
            raise Refused(call.lineno, "a sampler draws by its own seed, got generator=", "leave it out")
    if dotted(call.func) in (DENSITY, "torch.multinomial"):
        return
    size = call.args[-1]
    if not isinstance(size, ast.Tuple | ast.List) or len(size.elts) != 1:
        raise Refused(call.lineno, f"the size of a draw must be (bsz,), got {source.of(size)}", by_hand)
    if isinstance(size.elts[0], ast.Constant):
        raise Refused(call.lineno, f"each sample must have a timestep, got {source.of(size)} for all", by_hand)


def other_draw(loop: ast.For) -> int | None:
    """Return the line of something random that is called as timesteps are, to name it."""
    for node in ast.walk(loop):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        calls = [dotted(part.func) for part in ast.walk(node.value) if isinstance(part, ast.Call)]
        if node.targets[0].id in TIMES + SIGMAS and any(
            "rand" in call or "normal" in call or "sample" in call for call in calls
        ):
            return node.lineno
    return None


def are_exclusive(first: tuple[ast.AST, ...], second: tuple[ast.AST, ...]) -> bool:
    """Return whether two paths part at an `if`, one to each branch."""
    common = [node for node, other in zip(first, second, strict=False) if node is other]
    last = common[-1]
    if not isinstance(last, ast.If):
        return False
    return (first[len(common)] in last.body) != (second[len(common)] in last.body)


def path_to(root: ast.AST, target: ast.AST) -> list[ast.AST]:
    """Return the nodes from root to target, both included; none if it is not there."""
    if root is target:
        return [root]
    for child in ast.iter_child_nodes(root):
        if path := path_to(child, target):
            return [root, *path]
    return []


def blocks_of(statement: ast.AST) -> Iterator[Block]:
    """Yield the lists of statements within one."""
    for name in ("body", "orelse", "finalbody"):
        if isinstance(block := getattr(statement, name, None), list) and block:
            yield block


def frames_to(root: ast.AST, target: ast.stmt) -> list[Frame]:
    """Return the blocks around a statement, the outermost first, each with the number of statements before."""
    frames: list[Frame] = []
    path = path_to(root, target)
    for node, child in pairwise(path):
        frames += [(block, block.index(child)) for block in blocks_of(node) if child in block]
    return frames


def depend_on_draws(loop: Loop) -> set[str]:
    """Return the variables of the loop that are computed from what was drawn."""
    known = {name for draw in loop.draws for target in draw.statement.targets for name in names_in(target)}
    assigned = [node for node in ast.walk(loop.body) if isinstance(node, ast.Assign)]
    assigned.sort(key=lambda node: node.lineno)
    for _ in range(3):  # later lines may be read by earlier ones of branches
        for node in assigned:
            if names_in(node.value) & known:
                known |= {name for target in node.targets for name in names_in(target)}
    return known
