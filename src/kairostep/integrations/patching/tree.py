"""Where a statement stands in a syntax tree."""

import ast
from collections.abc import Iterator
from itertools import pairwise

Block = list[ast.stmt]
Frame = tuple[Block, int]  # a block and how many of its statements come before


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


def parents_in(root: ast.AST) -> dict[ast.AST, ast.AST]:
    """Return the parent of each node under root."""
    return {child: node for node in ast.walk(root) for child in ast.iter_child_nodes(node)}


def path_of(parents: dict[ast.AST, ast.AST], node: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes from the root of these parents to a node, both included."""
    path = [node]
    while path[-1] in parents:
        path.append(parents[path[-1]])
    return tuple(reversed(path))
