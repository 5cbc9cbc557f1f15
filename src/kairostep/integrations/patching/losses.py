"""Where a script turns losses of samples into one number: traced back from its backward pass, branch by branch."""

import ast
from dataclasses import dataclass
from typing import NoReturn

from kairostep.integrations.patching.loop import Loop, depend_on_draws
from kairostep.integrations.patching.source import Refused, Source, dotted, names_in
from kairostep.integrations.patching.tree import Block, Frame, frames_to

LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
BY_HAND = "keep a loss for each sample and write loss = timestep_sampler.mean(losses)"


@dataclass(frozen=True)
class Reduction:
    """A call that takes the mean over the batch."""

    call: ast.Call
    weight: str | None  # the variable that the losses were multiplied by, one for each sample
    is_prior: bool  # of the half that preserves the prior

    @property
    def is_function(self) -> bool:
        """Whether the mean is taken within F.mse_loss and the like."""
        return dotted(self.call.func).rpartition(".")[2] in LOSSES


class Trace:
    """Follows the loss back to the means that it is made of."""

    def __init__(self, source: Source, loop: Loop) -> None:
        self.source, self.loop = source, loop
        self.from_draws = depend_on_draws(loop)
        self.prior_names = second_halves(loop.body)
        self.found: dict[int, Reduction] = {}
        self.require(loop.loss, frames_to(loop.body, loop.backward), loop.backward)

    def require(self, name: str, frames: list[Frame], at: ast.stmt | ast.expr) -> None:
        """Find what a variable was made of, or refuse the script."""
        if not self.resolve(name, frames):
            self.refuse(at, f"{name} must be computed in the loop, but no assignment to it is found")

    def resolve(self, name: str, frames: list[Frame]) -> bool:
        """Find what a variable was made of, looking back from a place in the loop; return whether it was found."""
        for depth in reversed(range(len(frames))):
            block, end = frames[depth]
            for index in reversed(range(end)):
                statement, here = block[index], [*frames[:depth], (block, index)]
                if not assigns(statement, name):
                    continue
                if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
                    self.term(statement.value, here)
                    continue
                return self.enter(statement, name, here)
        return False

    def enter(self, statement: ast.stmt, name: str, here: list[Frame]) -> bool:
        """Look into the statement that assigns the variable; a branch that does not may do without it."""
        if isinstance(statement, ast.If):
            branches = [branch for branch in (statement.body, statement.orelse) if not leaves(branch)]
            found = [self.resolve(name, [*here, (branch, len(branch))]) for branch in branches]
            return any(found)
        if isinstance(statement, ast.With):
            return self.resolve(name, [*here, (statement.body, len(statement.body))])
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            self.refuse(statement, f"how this line makes {name} is not recognised")
        self.term(statement.value, here)
        return True

    def term(self, value: ast.expr, here: list[Frame]) -> None:
        """Take apart a sum, down to means over the batch."""
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            self.term(value.left, here)
            self.term(value.right, here)
        elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
            factors = [side for side in (value.left, value.right) if not is_setting(side)]
            if len(factors) != 1 or (factors[0] is value.right and isinstance(value.op, ast.Div)):
                self.refuse(value, f"the mean must be taken last, got {self.source.of(value)}")
            self.term(factors[0], here)
        elif isinstance(value, ast.Name):
            self.require(value.id, here, value)
        elif isinstance(value, ast.Call) and self.is_mean(value):
            self.found[self.source.start(value)] = self.reduction(value, here)
        else:
            self.refuse(value, f"a mean over the batch is expected, got {self.source.of(value)}")

    def is_mean(self, call: ast.Call) -> bool:
        """Return whether a call takes the mean over all there is."""
        function = dotted(call.func)
        if function.rpartition(".")[2] in LOSSES and function.rpartition(".")[0] in ("F", "torch.nn.functional"):
            reduction = [keyword.value for keyword in call.keywords if keyword.arg == "reduction"]
            return all(isinstance(value, ast.Constant) and value.value == "mean" for value in reduction)
        if function == "torch.mean":
            return len(call.args) == 1 and not call.keywords
        return isinstance(call.func, ast.Attribute) and call.func.attr == "mean" and not call.args and not call.keywords

    def reduction(self, call: ast.Call, here: list[Frame]) -> Reduction:
        """Return what is known of a mean: the weight within it, and the half of the batch that it is of."""
        reduced = call.func.value if isinstance(call.func, ast.Attribute) and not call.args else None
        made_of: list[ast.expr] = [call]
        if isinstance(reduced, ast.Name):  # loss.mean(): the lines before made it, in the same block
            block, end = here[-1]
            made_of += [
                line.value for line in block[:end] if isinstance(line, ast.Assign) and is_name(line, reduced.id)
            ]
        own = {reduced.id} if isinstance(reduced, ast.Name) else set()
        weights = [name for value in made_of for name in self.weights_in(value) if name not in own]
        prior = any(names_in(value) & self.prior_names for value in made_of)
        return Reduction(call, weights[0] if weights else None, prior)

    def weights_in(self, value: ast.expr) -> list[str]:
        """Return the variables that depend on the draws and multiply something: `w * ...` or `w.float() * ...`."""
        sides = [
            side.func.value
            if isinstance(side, ast.Call) and isinstance(side.func, ast.Attribute) and side.func.attr == "float"
            else side
            for node in ast.walk(value)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
            for side in (node.left, node.right)
        ]
        return [side.id for side in sides if isinstance(side, ast.Name) and self.is_weight(side.id)]

    def is_weight(self, name: str) -> bool:
        """Return whether a variable is a weight: it depends on the draws, and is no loss, prediction or target."""
        return name in self.from_draws and ("weigh" in name or "snr" in name)

    def refuse(self, node: ast.stmt | ast.expr, reason: str) -> NoReturn:
        """Refuse the script at a line."""
        raise Refused(node.lineno, reason, BY_HAND)


def reductions(source: Source, loop: Loop) -> list[Reduction]:
    """Return the means that the loss is made of, in the order of the script."""
    found = Trace(source, loop).found
    return [found[start] for start in sorted(found)]


def second_halves(loop: ast.For) -> set[str]:
    """Return the variables that are second halves of the batch: `a, b = torch.chunk(x, 2, dim=0)`."""
    halves = set()
    for node in ast.walk(loop):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
            continue
        names, call = node.targets[0].elts, node.value
        if len(names) != 2 or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        is_first_dim = all(ast.unparse(keyword.value) == "0" for keyword in call.keywords if keyword.arg == "dim")
        if call.func.attr == "chunk" and is_first_dim and isinstance(names[1], ast.Name):
            halves.add(names[1].id)
    return halves - {"_"}


def assigns(statement: ast.stmt, name: str) -> bool:
    """Return whether a statement, or one within it, assigns the variable."""
    return any(isinstance(node, ast.Name) and node.id == name for target in targets_in(statement) for node in target)


def targets_in(statement: ast.stmt) -> list[list[ast.AST]]:
    """Return what a statement and those within it assign."""
    targets: list[list[ast.AST]] = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Assign):
            targets += [list(ast.walk(target)) for target in node.targets if not isinstance(target, ast.Subscript)]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
            targets.append(list(ast.walk(node.target)))
    return targets


def is_name(statement: ast.Assign, name: str) -> bool:
    """Return whether a statement assigns this variable and no other."""
    return isinstance(statement.targets[0], ast.Name) and statement.targets[0].id == name


def is_setting(value: ast.expr) -> bool:
    """Return whether a factor is a number or one of the script's arguments."""
    return isinstance(value, ast.Constant) or dotted(value).startswith(("args.", "config."))


def leaves(branch: Block) -> bool:
    """Return whether a branch ends the step or the script."""
    return bool(branch) and isinstance(branch[-1], ast.Raise | ast.Continue | ast.Return | ast.Break)
