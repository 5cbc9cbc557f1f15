"""Whether the function of a training loop knows the parsed arguments as `args`, so that it can read one of them.

Not every `args` is a namespace: the scripts of diffusers' basic-training tutorial call a tuple so, which they pass to
`notebook_launcher`. Where it is not sure, the sampler's name is written into the script, which is right in any case.
"""

import ast
from collections.abc import Iterator

from kairostep.integrations.patching.arguments import added_arguments, blocks_of_script, parsings_in
from kairostep.integrations.patching.loop import Loop
from kairostep.integrations.patching.source import Source, dotted, is_assignment, targets_of, value_of
from kairostep.integrations.patching.tree import path_to

ARGS = "args"
Scope = ast.FunctionDef | ast.Module


def takes_argument(source: Source, loop: Loop) -> bool:
    """Return whether the script has a parser, and the loop's function knows what it parses as `args`."""
    if not added_arguments(source.tree):
        return False
    if any(name.startswith(f"{ARGS}.") for name in attributes_in(loop.function)):
        return True
    return not is_read_by_key(source.tree) and is_namespace(source.tree, loop)


def attributes_in(node: ast.AST) -> set[str]:
    """Return the attributes that are read within a node: `args.seed`."""
    return {dotted(part) for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def is_namespace(tree: ast.Module, loop: Loop) -> bool:
    """Return whether the innermost scope around the loop that has an `args` takes or parses it."""
    scopes = [node for node in path_to(tree, loop.body) if isinstance(node, Scope)]
    for scope in reversed(scopes):
        kept = list(stored_in(scope))
        if kept:
            return all(is_parsed(statement, functions_that_parse(tree)) for statement in kept)
        if isinstance(scope, ast.FunctionDef) and ARGS in parameters_of(scope):
            return ARGS in taken_by_name(scope)
    return False


def stored_in(scope: Scope) -> Iterator[ast.AST]:
    """Yield what gives `args` a value in this scope, not in functions or classes within it."""
    waiting: list[ast.AST] = list(scope.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if is_assignment(node):
            if any(
                isinstance(part, ast.Name) and part.id == ARGS for target in targets_of(node) for part in parts(target)
            ):
                yield node
        elif isinstance(node, ast.Name) and node.id == ARGS and isinstance(node.ctx, ast.Store):
            yield node
        else:
            waiting += ast.iter_child_nodes(node)


def parts(target: ast.expr) -> list[ast.expr]:
    """Return the targets of `a, b = ...`, or the one of `a = ...`."""
    return target.elts if isinstance(target, ast.Tuple) else [target]


def is_parsed(node: ast.AST, functions: set[str]) -> bool:
    """Return whether a statement makes `args` by parse_args, or by a function of the script that parses."""
    if not is_assignment(node):
        return False
    value = value_of(node)
    is_part = isinstance(value, ast.Subscript) or any(isinstance(target, ast.Tuple) for target in targets_of(node))
    parse = "parse_known_args" if is_part else "parse_args"  # the first returns a tuple
    call = value.value if isinstance(value, ast.Subscript) else value
    if not isinstance(call, ast.Call):
        return False
    return dotted(call.func) in functions or dotted(call.func).rpartition(".")[2] == parse


def functions_that_parse(tree: ast.Module) -> set[str]:
    """Return the functions of the script that parse its arguments."""
    blocks = list(blocks_of_script(tree))
    return {parsing.function for name, block in blocks for parsing in parsings_in(name, block)} - {""}


def is_read_by_key(tree: ast.Module) -> bool:
    """Return whether the script takes `args` for a dict or a tuple somewhere: `args["lr"]`, `*args` or `**args`."""
    for node in ast.walk(tree):
        part = node.value if isinstance(node, ast.Subscript | ast.Starred | ast.keyword) else None
        is_whole = not isinstance(node, ast.keyword) or node.arg is None
        if is_whole and isinstance(part, ast.Name) and part.id == ARGS:
            return True
    return False


def parameters_of(function: ast.FunctionDef) -> set[str]:
    """Return the names of all parameters, with those of `*args` and `**kwargs`."""
    rest = [each.arg for each in (function.args.vararg, function.args.kwarg) if each]
    return taken_by_name(function).union(rest)


def taken_by_name(function: ast.FunctionDef) -> set[str]:
    """Return the names of the parameters that take one value each."""
    taken = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {each.arg for each in taken}
