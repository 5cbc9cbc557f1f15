"""The arguments of a script: --timestep_sampler, added to the parser that makes `args`, before it parses.

A script without a parser, or whose loop does not know `args`, gets none: the sampler's name stands in its code.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from kairostep.integrations.patching.calls import SAMPLER
from kairostep.integrations.patching.draws import BY_HAND
from kairostep.integrations.patching.source import Refused, Source, dotted, is_assignment, names_in, targets_of
from kairostep.integrations.patching.tree import Block

ONE_PARSER = f"call the arguments of the training args and the others by another name, and patch again, or {BY_HAND}"
PARSE = ("parse_args", "parse_known_args")


@dataclass(frozen=True)
class Parsing:
    """A statement that calls parse_args, or has it in a branch."""

    block: Block
    index: int  # of the statement in its block
    parser: str
    function: str  # whose body the block is; empty for the script's own lines
    makes_args: bool  # and calls them so, or returns them

    @property
    def statement(self) -> ast.stmt:
        """The statement itself."""
        return self.block[self.index]


def add_argument(source: Source, sampler: str) -> str:
    """Add --timestep_sampler to the arguments of a script that has some, after the last one before parsing."""
    blocks = list(blocks_of_script(source.tree))
    added = added_arguments(source.tree)
    parsing = find_parsing(source, blocks)
    if parsing:
        before = parsing.block[: parsing.index]
        added = [statement for statement in before if parser_added_to(statement) == parsing.parser]
        at, parser = parsing.statement, parsing.parser
    else:
        at, parser = added[-1], parser_added_to(added[-1])
        if other := next((line for line in added if parser_added_to(line) != parser), None):
            reason = f"one parser must make args, got arguments of another at line {other.lineno}"
            raise Refused(at.lineno, reason, ONE_PARSER)
    text = argument_text(parser, sampler)
    if added and (added[-1].end_lineno or 0) < (parsing.statement.lineno if parsing else 10**9):
        source.insert_after(added[-1], [source.indent(added[-1]) + text])
        return f"line {added[-1].end_lineno}: adds --{SAMPLER} to the arguments"
    if not source.starts_line(at):
        reason = f"{parser}.parse_args() must start its line, got {source.line_of(at)}"
        raise Refused(at.lineno, reason, f"move it to a new line, or {BY_HAND}")
    source.insert_before(at, [source.indent(at) + text])
    return f"line {at.lineno}: adds --{SAMPLER} to the arguments before"


def added_arguments(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements that add an argument to some parser."""
    return [statement for _, block in blocks_of_script(tree) for statement in block if parser_added_to(statement)]


def argument_text(parser: str, sampler: str) -> str:
    """Return the line that adds the argument; a name that it cannot take lists those that it can."""
    return f'{parser}.add_argument("--{SAMPLER}", default="{sampler}", help="uniform has the script\'s density")'


def blocks_of_script(tree: ast.Module) -> Iterator[tuple[str, Block]]:
    """Yield the statements of functions, of the script and of its main guard, within no other `if`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name, node.body
        elif isinstance(node, ast.Module) or is_main_guard(node):
            yield "", node.body


def is_main_guard(node: ast.AST) -> TypeGuard[ast.If]:
    """Return whether a statement is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and "__name__" in names_in(node.test)


def parser_added_to(statement: ast.stmt) -> str:
    """Return the parser of `parser.add_argument(...)`, an empty string for other statements."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return ""
    parser, _, method = dotted(statement.value.func).rpartition(".")
    return parser if method == "add_argument" else ""


def find_parsing(source: Source, blocks: list[tuple[str, Block]]) -> Parsing | None:
    """Return where the script parses what it calls args, the first place if the same parser has several."""
    found = [parsing for function, block in blocks for parsing in parsings_in(function, block)]
    found = [parsing for parsing in found if parsing.makes_args] or found
    called = functions_called_for_args(source.tree)
    if len({(id(parsing.block), parsing.parser) for parsing in found}) > 1:
        found = [parsing for parsing in found if parsing.function in called] or found
    places = {(id(parsing.block), parsing.parser): parsing.statement.lineno for parsing in reversed(found)}
    if len(places) > 1:
        lines = ", ".join(map(str, sorted(places.values())))
        raise Refused(max(places.values()), f"one parser must make args, got parsing in lines {lines}", ONE_PARSER)
    return found[0] if found else None


def parsings_in(function: str, block: Block) -> Iterator[Parsing]:
    """Yield the statements of a block that parse arguments."""
    for index, statement in enumerate(block):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) or is_main_guard(statement):
            continue
        for node in ast.walk(statement):
            if not isinstance(node, ast.Return) and not is_assignment(node):
                continue
            is_args = isinstance(node, ast.Return) or any("args" in names_in(target) for target in targets_of(node))
            for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
                parser, _, method = dotted(call.func).rpartition(".")
                if method in PARSE and parser:
                    yield Parsing(block, index, parser, function, is_args)


def functions_called_for_args(tree: ast.Module) -> set[str]:
    """Return the functions that give args: `args = parse_args()`, `main(parse_args())`, and the script's own lines."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = {dotted(part.func) for call in calls for part in call.args if isinstance(part, ast.Call)}
    assigned = {
        dotted(part.func)
        for node in filter(is_assignment, ast.walk(tree))
        if any("args" in names_in(target) for target in targets_of(node))
        for part in ast.walk(node)
        if isinstance(part, ast.Call)
    }
    return {"", *given, *assigned}
