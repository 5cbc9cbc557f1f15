"""The imports of a script: ours added where a sorted list has it, the one that nothing uses removed."""

import ast

from kairostep.integrations.patching.draws import DENSITY
from kairostep.integrations.patching.loop import Loop
from kairostep.integrations.patching.source import Refused, Source, dotted

IMPORT = "from kairostep.integrations.diffusers_scripts import ScriptSampler"


def add_import(source: Source, loop: Loop) -> str:
    """Add the import where a sorted list of imports has it, before the loop if the script imports there."""
    imports = [node for node in source.tree.body if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    start = loop.body.lineno if isinstance(loop.function, ast.Module) else loop.function.lineno
    imports = [node for node in imports if node.lineno < start] or imports
    if not imports:
        raise Refused(
            1,
            "the script must import from libraries, got no such line",
            "add from accelerate import Accelerator, and patch again",
        )
    block = third_party_block(source.tree.body, imports)
    later = [node for node in block if (node.module or "").casefold() > "kairostep"]  # as the scripts sort them
    if later:
        source.insert_before(later[0], [IMPORT])
        return f"line {later[0].lineno}: imports ScriptSampler"
    source.insert_after(block[-1], [IMPORT])
    return f"line {block[-1].lineno}: imports ScriptSampler"


def third_party_block(body: list[ast.stmt], imports: list[ast.ImportFrom]) -> list[ast.ImportFrom]:
    """Return the imports that stand with `from accelerate import ...`, else the last ones that stand together."""
    groups: list[list[ast.ImportFrom]] = [[]]
    last = None
    for node in body:
        is_next = last is not None and node.lineno == (last.end_lineno or 0) + 1
        if not isinstance(node, ast.ImportFrom | ast.Import) or not is_next:
            groups.append([])
        if isinstance(node, ast.ImportFrom) and node in imports:
            groups[-1].append(node)
        last = node
    filled = [group for group in groups if group]
    named = [group for group in filled if any((node.module or "").startswith("accelerate") for node in group)]
    return (named or filled[-1:])[0]


def drop_import(source: Source, loop: Loop) -> None:
    """Remove the import of diffusers' density where nothing else calls it."""
    uses = [node for node in ast.walk(source.tree) if isinstance(node, ast.Name) and node.id == DENSITY]
    if not uses or len(uses) > sum(dotted(draw.call.func) == DENSITY for draw in loop.draws):
        return
    for node in source.tree.body:
        if isinstance(node, ast.ImportFrom) and (alias := [name for name in node.names if name.name == DENSITY]):
            drop_alias(source, node, alias[0])


def drop_alias(source: Source, node: ast.ImportFrom, alias: ast.alias) -> None:
    """Remove one name of an import: its line, its place in the line, or the whole import."""
    assert node.end_lineno is not None
    if len(node.names) == 1:
        remove(source, source.line_starts[node.lineno - 1], source.line_starts[node.end_lineno])
        return
    line_start, line_end = source.line_starts[alias.lineno - 1], source.line_starts[alias.lineno]
    if source.bytes[line_start:line_end].decode().strip().rstrip(",") == DENSITY:
        remove(source, line_start, line_end)
        return
    index = node.names.index(alias)
    if index + 1 < len(node.names):
        remove(source, source.start(alias), source.start(node.names[index + 1]))
    else:
        remove(source, source.end(node.names[index - 1]), source.end(alias))


def remove(source: Source, start: int, end: int) -> None:
    """Remove a part of an import, unless it has a comment: the import stays then."""
    if b"#" not in source.bytes[start:end]:
        source.replace(start, end, "")
