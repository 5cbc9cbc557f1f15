"""Where a script turns losses of samples into one number: traced back from its backward pass, branch by branch."""

import ast
from dataclasses import dataclass
from typing import NoReturn

from kairostep.integrations.patching.loop import Loop, depend_on_draws
from kairostep.integrations.patching.rebuilt import rebuilt_from_output
from kairostep.integrations.patching.source import (
    Refused,
    Source,
    dotted,
    is_assignment,
    names_in,
    targets_of,
    value_of,
)
from kairostep.integrations.patching.tree import Block, Frame, frames_to
from kairostep.integrations.patching.use_of_draw import REORDER, dotted_end, keeps_rows, receiver

LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
MODULES = ("F", "nn.functional", "torch.nn.functional")  # that have them
OPTIONS = ("input", "target", "reduction", "beta", "delta", "weight")  # of theirs that leave a loss for each element
NO_WEIGHTS = ("loss", "losses", "pred", "target", "output")  # ends of names: weighted_loss is none, loss_weight is one
BY_HAND = "keep one loss for each sample, write loss = losses.mean() as the last line before backward, and patch again"
ADD_FIRST = "add them before the mean, loss = (first + second).mean() with one loss for each sample, and patch again"
IN_HALVES = "take the halves by model_pred, model_pred_prior = torch.chunk(model_pred, 2, dim=0), and patch again"
WITH_MASK = "write ((losses * mask).sum([1, 2, 3]) / mask.sum([1, 2, 3])).mean() and patch again"

Means = frozenset[int]  # where those begin that one step takes and adds


@dataclass(frozen=True)
class Reduction:
    """A call that takes the mean over the batch."""

    call: ast.Call
    weight: str | None  # the variable that the losses were multiplied by, one for each sample
    is_prior: bool  # of the half that preserves the prior
    rebuilt_at: int | None = None  # the line that rebuilds the prediction by factors that the weight undoes

    @property
    def shown_weight(self) -> str | None:
        """The weight that the sampler is shown."""
        return None if self.rebuilt_at else self.weight

    @property
    def is_function(self) -> bool:
        """Whether the mean is taken within F.mse_loss and the like."""
        return dotted(self.call.func).rpartition(".")[2] in LOSSES


class Trace:
    """Follows the loss back to the means that it is made of."""

    def __init__(self, source: Source, loop: Loop) -> None:
        self.source, self.loop = source, loop
        self.from_draws = depend_on_draws(loop)
        self.rebuilt = rebuilt_from_output(loop)
        self.prior_names = second_halves(loop.body)
        self.found: dict[int, Reduction] = {}
        self.check(self.require(loop.loss, frames_to(loop.body, loop.backward), loop.backward))

    def check(self, steps: set[Means]) -> None:
        """Refuse a script that takes no mean of its losses, or steps that take two of the same samples."""
        if not self.found:
            self.refuse(self.loop.backward, "the loss must be a mean over the losses of a batch, which is not found")
        for means in sorted(steps, key=sorted):
            for half in (False, True):
                calls = [self.found[start].call for start in sorted(means) if self.found[start].is_prior == half]
                if len(calls) > 1:
                    first = calls[0].lineno
                    reason = f"a step must take one mean of its losses, got a second after that of line {first}"
                    raise Refused(calls[1].lineno, reason, IN_HALVES if all(map(is_of_slice, calls)) else ADD_FIRST)

    def require(self, name: str, frames: list[Frame], at: ast.stmt | ast.expr) -> set[Means]:
        """Find what a variable was made of, or refuse the script."""
        found = self.resolve(name, frames)
        if found is None:
            self.refuse(at, f"{name} must be computed in the loop, but no assignment to it is found")
        return found

    def resolve(self, name: str, frames: list[Frame]) -> set[Means] | None:
        """Return the means that a variable may be made of, looking back from a place in the loop."""
        added: set[Means] = {frozenset()}
        for depth in reversed(range(len(frames))):
            block, end = frames[depth]
            for index in reversed(range(end)):
                statement, here = block[index], [*frames[:depth], (block, index)]
                if not assigns(statement, name):
                    continue
                if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
                    added = sums(self.term(statement.value, here), added)
                    continue
                found = self.enter(statement, name, here)
                return None if found is None else sums(found, added)
        return None

    def enter(self, statement: ast.stmt, name: str, here: list[Frame]) -> set[Means] | None:
        """Look into the statement that assigns the variable; a branch that does not may do without it."""
        if isinstance(statement, ast.If):
            branches = [branch for branch in (statement.body, statement.orelse) if not leaves(branch)]
            found = [self.resolve(name, [*here, (branch, len(branch))]) for branch in branches]
            known = [means for means in found if means is not None]
            return set().union(*known) if known else None
        if isinstance(statement, ast.With):
            return self.resolve(name, [*here, (statement.body, len(statement.body))])
        if not is_assignment(statement) or not isinstance(targets_of(statement)[0], ast.Name):
            self.refuse(statement, f"how this line makes {name} is not recognised")
        return self.term(value_of(statement), here)

    def term(self, value: ast.expr, here: list[Frame]) -> set[Means]:
        """Take apart a sum, down to means over the batch."""
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            return sums(self.term(value.left, here), self.term(value.right, here))
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
            factors = [side for side in (value.left, value.right) if not is_setting(side)]
            if len(factors) != 1 or (factors[0] is value.right and isinstance(value.op, ast.Div)):
                self.refuse(value, f"the mean must be taken last, got {self.source.of(value)}")
            return self.term(factors[0], here)
        if isinstance(value, ast.Name):
            return self.require(value.id, here, value)
        if not isinstance(value, ast.Call) or not self.is_mean(value):
            self.refuse(value, f"a mean over the batch is expected, got {self.source.of(value)}")
        made_of = self.made_of(value, here)
        if not any(names_in(part) & self.from_draws for part in made_of):  # of weights, which have no timestep
            return {frozenset()}
        start = self.source.start(value)
        self.found[start] = self.reduction(value, made_of)
        return {frozenset({start})}

    def is_mean(self, call: ast.Call) -> bool:
        """Return whether a call takes the mean over all there is."""
        function = dotted(call.func)
        if function.rpartition(".")[2] in LOSSES and function.rpartition(".")[0] in MODULES:
            reduction = [keyword.value for keyword in call.keywords if keyword.arg == "reduction"]
            is_known = len(call.args) <= 2 and all(keyword.arg in OPTIONS for keyword in call.keywords)
            return is_known and all(isinstance(value, ast.Constant) and value.value == "mean" for value in reduction)
        if function == "torch.mean":
            return len(call.args) == 1 and not call.keywords
        return isinstance(call.func, ast.Attribute) and call.func.attr == "mean" and not call.args and not call.keywords

    def made_of(self, call: ast.Call, here: list[Frame]) -> list[ast.expr]:
        """Return a mean and, of `loss.mean()`, the lines before that made the variable, in the same block."""
        reduced, (block, end) = reduced_name(call), here[-1]
        values = (value_for(line, reduced) for line in block[:end]) if reduced else ()
        return [call, *(value for value in values if value is not None)]

    def reduction(self, call: ast.Call, made_of: list[ast.expr]) -> Reduction:
        """Return what is known of a mean: the weight within it, and the half of the batch that it is of."""
        self.check_rows(made_of)
        weights = [name for value in made_of for name in self.weights_in(value) if name != reduced_name(call)]
        names = {name for value in made_of for name in names_in(value)}
        rebuilt_at = min((self.rebuilt[name] for name in names if name in self.rebuilt), default=None)
        return Reduction(call, weights[0] if weights else None, bool(names & self.prior_names), rebuilt_at)

    def check_rows(self, made_of: list[ast.expr]) -> None:
        """Refuse losses of some elements alone, picked by a mask: their samples are not known any more."""
        names = {name for value in made_of for name in names_in(value)} & self.from_draws
        lines = [
            node for node in filter(is_assignment, ast.walk(self.loop.body)) if dotted(targets_of(node)[0]) in names
        ]
        for node in (part for value in [*map(value_of, lines), *made_of] for part in ast.walk(value)):
            if isinstance(node, ast.Subscript):
                picked_from = None if keeps_rows(node.slice, number=True) else node.value
            elif isinstance(node, ast.Call) and dotted_end(node.func) in REORDER:
                picked_from = receiver(node)
            else:
                continue
            if picked_from is not None and made_from(picked_from) & self.from_draws:
                reason = f"losses must be of whole samples in the order of the batch, got {self.source.of(node)}"
                raise Refused(node.lineno, reason, WITH_MASK)

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
        return name in self.from_draws and ("weigh" in name or "snr" in name) and not name.endswith(NO_WEIGHTS)

    def refuse(self, node: ast.stmt | ast.expr, reason: str) -> NoReturn:
        """Refuse the script at a line."""
        raise Refused(node.lineno, reason, BY_HAND)


def sums(first: set[Means], second: set[Means]) -> set[Means]:
    """Return the means of a sum, for each of the means that its two terms may be made of."""
    return {one | other for one in first for other in second}


def made_from(value: ast.expr) -> set[str]:
    """Return the variables whose rows an expression has: x of x.to(t.device), those of all arguments of F.mse_loss."""
    while isinstance(value, ast.Attribute | ast.Subscript | ast.Call):
        if not isinstance(value, ast.Call):
            value = value.value
        elif isinstance(value.func, ast.Attribute) and dotted(value.func.value) not in (*MODULES, "torch"):
            value = value.func.value
        else:
            return {name for part in value.args for name in names_in(part)}
    return names_in(value)


def is_of_slice(call: ast.Call) -> bool:
    """Return whether a mean is of a part of the batch, as F.mse_loss(pred[:half], target[:half])."""
    return any(isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) for node in ast.walk(call))


def reduced_name(call: ast.Call) -> str | None:
    """Return the variable of `loss.mean()`, if it is one."""
    reduced = call.func.value if isinstance(call.func, ast.Attribute) and not call.args else None
    return reduced.id if isinstance(reduced, ast.Name) else None


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


def value_for(statement: ast.stmt, name: str) -> ast.expr | None:
    """Return what a statement makes of this variable alone, the product for `loss *= weight`; None if nothing."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Mult) and dotted(statement.target) == name:
        return ast.copy_location(ast.BinOp(ast.Name(name), ast.Mult(), statement.value), statement)
    return value_of(statement) if is_assignment(statement) and is_name(statement, name) else None


def is_name(statement: ast.Assign | ast.AnnAssign, name: str) -> bool:
    """Return whether a statement assigns this variable and no other."""
    return dotted(targets_of(statement)[0]) == name


def is_setting(value: ast.expr) -> bool:
    """Return whether a factor is a number or one of the script's arguments."""
    return isinstance(value, ast.Constant) or dotted(value).startswith(("args.", "config."))


def leaves(branch: Block) -> bool:
    """Return whether a branch ends the step or the script."""
    return bool(branch) and isinstance(branch[-1], ast.Raise | ast.Continue | ast.Return | ast.Break)
