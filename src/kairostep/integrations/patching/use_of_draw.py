"""What a loop does with the values that it draws: whether they become its timesteps, and keep their order."""

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kairostep.integrations.patching.source import Refused, Source, dotted, is_assignment, names_in
from kairostep.integrations.patching.tree import are_exclusive, parents_in, path_of

if TYPE_CHECKING:
    from kairostep.integrations.patching.draws import Draw

TIMES = ("timesteps", "timestep", "t", "u", "indices", "index", "sigma_indices")  # what scripts call their draws
SIGMAS = ("sigmas", "sigma")  # what they call noise levels, of which 1 is noise
TAKE_TIMES = {"add_noise": 2, "get_velocity": 2, "scale_noise": 1, "q_sample": 1, "get_sigmas": 0}  # at which place
REORDER = (  # of the draws themselves; a table may be read at them
    *("sort", "argsort", "msort", "topk", "unique", "flip", "flipud", "roll"),
    *("sorted", "reversed", "index_select", "masked_select", "gather", "take", "take_along_dim"),
)
ABOUT = ("shape", "size", "device", "dtype", "ndim", "len", "ones_like", "zeros_like", "empty_like")  # no values

Changing = ast.Assign | ast.AnnAssign | ast.AugAssign


class UseOfDraw:
    """Follows the values of one draw through the assignments after it, in the order of their lines."""

    def __init__(self, source: Source, loop: ast.For, draw: "Draw") -> None:
        self.source, self.draw = source, draw
        self.parents = parents_in(loop)
        self.statements = sorted(self.later_statements(loop), key=lambda node: node.lineno)
        self.carrying: set[str] = set()  # variables computed from the values
        self.times: set[str] = set()  # those with one value for each sample, as drawn

    @property
    def is_of_times(self) -> bool:
        """Whether the values become timesteps or noise levels, by name or as an argument of add_noise."""
        return any(self.sets_times(statement) for statement in self.followed())

    def check_order(self, backward: ast.stmt) -> None:
        """Refuse a loop that gives values to other samples than they were drawn for."""
        for statement in self.followed():
            if statement.lineno <= backward.lineno and (found := self.reordering(statement)):
                got = self.source.of(found)
                reason = f"the draws must keep their order, for each has a weight and a loss of its own, got {got}"
                raise Refused(found.lineno, reason, "leave it out: their order is random already")

    def later_statements(self, loop: ast.For) -> Iterator[ast.stmt]:
        """Yield the statements of the loop that a step may come to with the values of this draw."""
        for node in ast.walk(loop):
            if not isinstance(node, Changing | ast.Expr) or node.lineno < self.draw.statement.lineno:
                continue
            if node is self.draw.statement or not are_exclusive(self.draw.path, path_of(self.parents, node)):
                yield node

    def followed(self) -> Iterator[ast.stmt]:
        """Yield statements in order, knowing which variables carry the values when each is reached."""
        self.carrying, self.times = set(), set()
        for statement in self.statements:
            yield statement
            if isinstance(statement, Changing):
                self.assign(statement)

    def assign(self, statement: Changing) -> None:
        """Learn what an assignment makes of the values."""
        value = statement.value
        names = {name for target in targets(statement) for name in names_in(target)}
        if value is not None and self.carries(value):
            self.carrying |= names
            self.times |= names if self.is_times(value) else names & {*TIMES, *SIGMAS}
        elif is_assignment(statement) and self.is_always_reached(statement):
            self.carrying -= names
            self.times -= names

    def is_always_reached(self, statement: ast.stmt) -> bool:
        """Return whether a step that makes the draw comes to a statement under no further condition."""
        conditions = [node for node in path_of(self.parents, statement)[:-1] if isinstance(node, ast.If)]
        return all(node in self.draw.path for node in conditions)

    def carries(self, value: ast.AST) -> bool:
        """Return whether an expression is computed from the values, comparisons and shapes not counted."""
        if value is self.draw.call:
            return True
        if isinstance(value, ast.Compare) or (isinstance(value, ast.Attribute) and value.attr in ABOUT):
            return False
        if isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] in ABOUT:
            return False
        if isinstance(value, ast.Name):
            return value.id in self.carrying
        return any(self.carries(part) for part in ast.iter_child_nodes(value))

    def sets_times(self, statement: ast.stmt) -> bool:
        """Return whether a statement uses the values as timesteps or noise levels."""
        for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
            if any(map(self.carries, times_given_to(call))):
                return True
        if not isinstance(statement, Changing) or statement.value is None or not self.carries(statement.value):
            return False
        if self.blends(statement.value):
            return True
        if statement is self.draw.statement and dotted(self.draw.call.func) == "torch.rand":  # by its name alone
            return False
        names = {name for target in targets(statement) for name in names_in(target)}
        return any("timestep" in name or "sigma" in name for name in names)

    def blends(self, value: ast.expr) -> bool:
        """Return whether an expression multiplies something by a draw called t, as x_t = (1 - t) * x0 + t * noise."""
        return bool(self.carrying & {"t", "timestep", "timesteps"}) and any(
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Mult)
            and self.carries(node.left) != self.carries(node.right)
            and bool(names_in(node.left))
            and bool(names_in(node.right))
            for node in ast.walk(value)
        )

    def reordering(self, statement: ast.stmt) -> ast.expr | None:
        """Return the part of a statement that gives the values another order or picks some of them."""
        names = {name for target in targets(statement) for name in names_in(target)}
        number = not names & {*TIMES, *SIGMAS}  # of one row, to print it
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and dotted_end(node.func) in REORDER and self.is_times(receiver(node)):
                return node
            if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
                continue
            if self.is_times(node.value) and not keeps_rows(node.slice, number=number):
                return node
        return None

    def is_times(self, value: ast.expr | None) -> bool:
        """Return whether an expression has one value for each sample, made of what was drawn for it."""
        if value is self.draw.call:
            return True
        if isinstance(value, ast.Name):
            return value.id in self.times
        if isinstance(value, ast.Attribute):
            return value.attr not in ABOUT and self.is_times(value.value)
        if isinstance(value, ast.Call):
            return dotted_end(value.func) not in ABOUT and self.is_times(receiver(value))
        if isinstance(value, ast.Subscript):  # a table read at them too
            return self.is_times(value.value) or self.is_times(value.slice)
        if isinstance(value, ast.BinOp):
            sides = (value.left, value.right)
            return any(map(self.is_times, sides)) and any(
                isinstance(side, ast.Constant | ast.Attribute) for side in sides
            )
        return False


def times_given_to(call: ast.Call) -> list[ast.expr]:
    """Return the argument of add_noise and the like that is the timesteps."""
    place = TAKE_TIMES.get(dotted_end(call.func))
    if place is None:
        return []
    named = [keyword.value for keyword in call.keywords if keyword.arg in ("timesteps", "timestep", "t")]
    return named or call.args[place : place + 1]


def receiver(call: ast.Call) -> ast.expr | None:
    """Return what a call works on: x of x.sort() and of torch.sort(x)."""
    if not isinstance(call.func, ast.Attribute):  # sorted(x)
        return call.args[0] if dotted(call.func) in REORDER and call.args else None
    if dotted(call.func.value) == "torch":
        return call.args[0] if call.args else None
    return call.func.value


def dotted_end(function: ast.expr) -> str:
    """Return the last name of a function, `sort` of x.long().sort."""
    return function.attr if isinstance(function, ast.Attribute) else dotted(function)


def targets(statement: ast.stmt) -> list[ast.expr]:
    """Return what a statement assigns to, if it is an assignment."""
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign | ast.AugAssign) else []


def keeps_rows(index: ast.expr, *, number: bool) -> bool:
    """Return whether an index leaves the rows in order: `:`, `None` or `...` first, or a number where it is allowed."""
    if isinstance(index, ast.BinOp):  # (...,) + (None,) * n
        parts = [part for node in ast.walk(index) if isinstance(node, ast.Tuple) for part in node.elts]
        return bool(parts) and all(is_constant(part, number=False) for part in parts)
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    rows = next((part for part in parts if not (isinstance(part, ast.Constant) and part.value is None)), None)
    if isinstance(rows, ast.Slice):
        return rows.step is None
    return rows is None or is_constant(rows, number=number)


def is_constant(part: ast.expr, *, number: bool) -> bool:
    """Return whether a part of an index is `None` or `...`, or a number or key where these are allowed."""
    if isinstance(part, ast.UnaryOp):
        part = part.operand
    return isinstance(part, ast.Constant) and (number or part.value is None or part.value is ...)
