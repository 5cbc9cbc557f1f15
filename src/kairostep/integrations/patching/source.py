"""A script as text: where the nodes of its syntax tree stand, and edits that leave the rest alone."""

import ast
from dataclasses import dataclass, field
from typing import TypeGuard

Node = ast.expr | ast.stmt | ast.alias | ast.keyword


class Refused(ValueError):
    """A script that is not recognised: the line, why, and what to change by hand."""

    def __init__(self, line: int, reason: str, by_hand: str) -> None:
        super().__init__(f"line {line}: {reason}: {by_hand}")
        self.line = line


@dataclass(frozen=True)
class Edit:
    """Replace the bytes from start to end."""

    start: int
    end: int
    text: str


@dataclass
class Source:
    """The text of a script, its tree, and the edits to make. Positions are in bytes, as those of `ast` are."""

    text: str
    wrapped: frozenset[int] = frozenset()  # where the calls begin that get a line for their arguments
    tree: ast.Module = field(init=False)
    edits: list[Edit] = field(default_factory=list)
    too_long: dict[int, int] = field(default_factory=dict)  # where a call makes its line too long: the length

    def __post_init__(self) -> None:
        try:
            self.tree = ast.parse(self.text)
        except SyntaxError as error:
            raise Refused(error.lineno or 1, f"the script must be Python, got {error.msg}", "correct it") from error
        self.bytes = self.text.encode()
        self.line_starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.newline = next((end for end in ("\r\n", "\n", "\r") if end in self.text), "\n")

    def start(self, node: Node) -> int:
        """Return where a node begins."""
        return self.line_starts[node.lineno - 1] + node.col_offset

    def end(self, node: Node) -> int:
        """Return where a node ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node."""
        return self.bytes[self.start(node) : self.end(node)].decode()

    def indent(self, node: ast.stmt) -> str:
        """Return the white space that the line of a statement begins with."""
        line = self.bytes[self.line_starts[node.lineno - 1] : self.line_starts[node.lineno]].decode()
        return line[: len(line) - len(line.lstrip(" \t\f"))]

    def line_of(self, node: ast.stmt) -> str:
        """Return the line that a statement begins in."""
        return self.bytes[self.line_starts[node.lineno - 1] : self.line_starts[node.lineno]].decode().strip()

    def starts_line(self, node: ast.stmt) -> bool:
        """Return whether nothing stands before a statement in its line."""
        return not self.bytes[self.line_starts[node.lineno - 1] : self.start(node)].strip()

    def is_alone(self, node: ast.stmt) -> bool:
        """Return whether a statement shares its lines with comments at most."""
        assert node.end_lineno is not None
        after = self.bytes[self.end(node) : self.line_starts[node.end_lineno]].strip()
        return self.starts_line(node) and (not after or after.startswith(b"#"))

    def replace(self, start: int, end: int, text: str) -> None:
        """Replace the text between two positions."""
        self.edits.append(Edit(start, end, text))

    def insert_after(self, node: ast.stmt, lines: list[str]) -> None:
        """Insert lines after the last line of a statement."""
        assert node.end_lineno is not None
        at = self.line_starts[node.end_lineno]
        self.replace(at, at, "".join(line + self.newline for line in lines))

    def insert_before(self, node: ast.stmt, lines: list[str]) -> None:
        """Insert lines before the first line of a statement."""
        at = self.line_starts[node.lineno - 1]
        self.replace(at, at, "".join(line + self.newline for line in lines))

    def edited(self) -> str:
        """Return the text with all edits made."""
        result, position = [], 0
        for edit in sorted(self.edits, key=lambda edit: (edit.start, edit.end)):
            result += [self.bytes[position : edit.start], edit.text.encode()]
            position = edit.end
        return b"".join([*result, self.bytes[position:]]).decode()


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` for such an expression, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def names_in(node: ast.AST) -> set[str]:
    """Return the variables that a part of the tree mentions."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def is_assignment(node: ast.AST) -> TypeGuard[ast.Assign | ast.AnnAssign]:
    """Return whether a statement is `a = value` or `a: Tensor = value`."""
    return isinstance(node, ast.Assign) or (isinstance(node, ast.AnnAssign) and node.value is not None)


def targets_of(statement: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    """Return what an assignment assigns to."""
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def value_of(statement: ast.Assign | ast.AnnAssign) -> ast.expr:
    """Return the right side of an assignment."""
    assert statement.value is not None
    return statement.value
