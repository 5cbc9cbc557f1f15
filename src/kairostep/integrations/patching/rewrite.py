"""The patch itself: a few lines of a script, changed where they stand."""

import ast
import difflib
from dataclasses import dataclass
from typing import TypeGuard

from kairostep.integrations.patching.draws import DENSITY, Draw
from kairostep.integrations.patching.loop import Loop, find_loop
from kairostep.integrations.patching.losses import Reduction, reductions
from kairostep.integrations.patching.source import Refused, Source, dotted, names_in
from kairostep.integrations.patching.tree import path_to

SAMPLER = "timestep_sampler"  # the variable
IMPORT = "from kairostep.integrations.diffusers_scripts import ScriptSampler"
DENSITY_OF_SIGMAS = "compute_density_of_sigmas"
MOST_LINES = 12  # that a patch adds or changes
WIDTH = 119  # of the scripts' lines


@dataclass(frozen=True)
class Patched:
    """A patched script, and what was changed."""

    text: str
    diff: str
    num_changed: int
    changes: tuple[str, ...]  # one sentence for each place, with its line in the original


def patch_script(text: str, sampler: str = "root_loss", name: str = "script.py") -> Patched:
    """Return a training script of diffusers that draws, weights and observes through kairostep.

    Args:
        text: The script.
        sampler: The default of its new argument, `--timestep_sampler`.
        name: The script's name, for the diff.

    Raises:
        Refused: The script is not recognised; the message has the line and the change by hand.
    """
    patched = rewritten(text, sampler, name)
    if patched.num_changed < MOST_LINES:  # a wrapped call has two lines more
        patched = rewritten(text, sampler, name, wraps=(MOST_LINES - patched.num_changed) // 2)
    if patched.num_changed > MOST_LINES:
        reason = f"a patch must change at most {MOST_LINES} lines, this one changes {patched.num_changed}"
        raise Refused(1, reason, "shorten the loop, or patch it by hand as docs/integrations.md shows")
    compile(patched.text, name, "exec")
    return patched


def rewritten(text: str, sampler: str, name: str, *, wraps: int = 0) -> Patched:
    """Return the script with all changes made, so many of its long lines wrapped."""
    source = Source(text, wraps_left=wraps)
    if SAMPLER in names_in(source.tree) or "kairostep" in text:
        reason = "the script must be as diffusers has it, got one with kairostep in it"
        raise Refused(first_line(text), reason, "patch the original")
    loop = find_loop(source)
    means = reductions(source, loop)
    changes = [add_import(source), add_argument(source, sampler), make_sampler(source, loop)]
    changes += [change_draw(source, draw) for draw in loop.draws]
    changes += [change_mean(source, mean) for mean in means]
    changes += [wrap_step(source, step) for step in loop.steps]
    drop_import(source, loop)
    return difference(text, source.edited(), name, tuple(changes))


def first_line(text: str) -> int:
    """Return the line that has kairostep in it."""
    return next((number for number, line in enumerate(text.splitlines(), 1) if "kairostep" in line), 1)


def difference(before: str, after: str, name: str, changes: tuple[str, ...]) -> Patched:
    """Return the patched script with its unified diff."""
    lines = list(
        difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
        )
    )
    num_changed = sum(line.startswith("+") for line in lines[2:])
    return Patched(after, "".join(lines), num_changed, changes)


def add_import(source: Source) -> str:
    """Add the import where a sorted list of imports has it."""
    imports = [node for node in source.tree.body if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    if not imports:
        raise Refused(1, "the script must import from libraries, got no such line", f"add {IMPORT}")
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


def add_argument(source: Source, sampler: str) -> str:
    """Add --timestep_sampler to the script's arguments, after the last of them."""
    blocks = [
        node.body
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.Module) or is_main_guard(node)  # within no other if
    ]
    found = [
        statement
        for block in blocks
        for statement in block
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and dotted(statement.value.func).endswith(".add_argument")
    ]
    if not found:
        by_hand = f'add parser.add_argument("--{SAMPLER}", default="{sampler}")'
        raise Refused(1, "the script must have a parser with add_argument, which is not found", by_hand)
    last = max(found, key=lambda statement: statement.lineno)
    assert isinstance(last, ast.Expr)
    assert isinstance(last.value, ast.Call)
    parser = dotted(last.value.func).rpartition(".")[0]
    help_text = "One of kairostep's timestep samplers."
    text = f'{parser}.add_argument("--{SAMPLER}", default="{sampler}", help="{help_text}")'
    source.insert_after(last, [source.indent(last) + text])
    return f"line {last.end_lineno}: adds --{SAMPLER} to the arguments"


def is_main_guard(node: ast.AST) -> TypeGuard[ast.If]:
    """Return whether a statement is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and "__name__" in names_in(node.test)


def make_sampler(source: Source, loop: Loop) -> str:
    """Make the sampler once the accelerator has prepared the model, before a checkpoint is loaded."""
    function = loop.function
    at = next(index for index, node in enumerate(function.body) if path_to(node, loop.body))
    before = function.body[:at]
    prepared = [node for node in before if calls(node, f"{loop.accelerator}.prepare")]
    made = [node for node in before if isinstance(node, ast.Assign) and dotted(node.targets[0]) == loop.accelerator]
    by_hand = f"make {SAMPLER} = ScriptSampler(args.{SAMPLER}, accelerator) before the loop"
    if not prepared and not made:
        reason = f"{loop.accelerator}.prepare(...) must come before the loop in its function, which is not found"
        raise Refused(loop.body.lineno, reason, by_hand)
    after = (prepared or made)[-1]
    loaded = [node for node in before if calls(node, f"{loop.accelerator}.load_state")]
    if loaded and loaded[0].lineno < after.lineno:
        reason = "the state must be loaded after prepare, so that it holds the sampler, got it before"
        raise Refused(loaded[0].lineno, reason, by_hand)
    attributes = {dotted(node) for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    if not any(name.startswith("args.") for name in attributes):
        raise Refused(loop.body.lineno, "the loop's function must know the arguments as args, got no args.", by_hand)
    seed = ", seed=args.seed" if "args.seed" in attributes else ""
    text = f"{SAMPLER} = ScriptSampler(args.{SAMPLER}, {loop.accelerator}{seed})"
    source.insert_after(after, [source.indent(after) + text])
    return f"line {after.end_lineno}: makes the sampler, which {loop.accelerator}.save_state and load_state then hold"


def calls(node: ast.AST, function: str) -> bool:
    """Return whether a statement, or one within it, calls this function."""
    return any(isinstance(part, ast.Call) and dotted(part.func) == function for part in ast.walk(node))


def change_draw(source: Source, draw: Draw) -> str:
    """Call the sampler where the script calls torch or diffusers."""
    call = draw.call
    name = DENSITY_OF_SIGMAS if draw.is_of_sigmas else dotted(call.func).removeprefix("torch.")
    function = f"{SAMPLER}.{name}"
    start, open_, end = source.start(call), source.bytes.index(b"(", source.end(call.func)), source.end(call)
    arguments = source.bytes[open_ + 1 : end - 1].decode()
    if draw.needs_low:
        arguments = ("0," if arguments[0].isspace() else "0, ") + arguments
    text = call_text(source, call, function, arguments)
    source.replace(start, end, text)
    return f"line {call.lineno}: draws by the sampler, called as {dotted(call.func)}"


def call_text(source: Source, call: ast.Call, function: str, arguments: str) -> str:
    """Return a call in the place of another, its arguments on a line of their own if the line gets too long."""
    before = source.bytes[source.line_starts[call.lineno - 1] : source.start(call)].decode()
    text = f"{function}({arguments})"
    if not source.wraps_left or "\n" in text or len(before) + len(text) <= WIDTH:
        return text
    source.wraps_left -= 1
    indent = before[: len(before) - len(before.lstrip())]
    return f"{function}({source.newline}{indent}    {arguments}{source.newline}{indent})"


def change_mean(source: Source, mean: Reduction) -> str:
    """Take the sampler's weighted mean where the script takes the mean."""
    call = mean.call
    function = f"{SAMPLER}.prior.mean" if mean.is_prior else f"{SAMPLER}.mean"
    weight = f", {mean.weight}" if mean.weight else ""
    start, end = source.start(call), source.end(call)
    if mean.is_function:
        inner = without_reduction(source, call)
    elif dotted(call.func) == "torch.mean":
        inner = source.of(call.args[0])
    else:
        assert isinstance(call.func, ast.Attribute)
        inner = without_parentheses(source.bytes[start : source.end(call.func)].decode().removesuffix(".mean"))
    text = call_text(source, call, function, inner + weight)
    source.replace(start, end, text)
    return f"line {call.lineno}: takes the weighted mean" + (" of the prior's half" if mean.is_prior else "")


def without_reduction(source: Source, call: ast.Call) -> str:
    """Return the text of F.mse_loss(...) with a loss for each element."""
    own = source.bytes[source.start(call) : source.end(call)]
    reduction = [keyword.value for keyword in call.keywords if keyword.arg == "reduction"]
    if reduction:
        at, end = source.start(reduction[0]) - source.start(call), source.end(reduction[0]) - source.start(call)
        return (own[:at] + b'"none"' + own[end:]).decode()
    return own[:-1].decode().rstrip().rstrip(",") + ', reduction="none")'


def without_parentheses(text: str) -> str:
    """Return the text without parentheses around all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    try:
        ast.parse(text[1:-1], mode="eval")
    except SyntaxError:  # (a) / (b)
        return text
    return text[1:-1]


def wrap_step(source: Source, step: ast.stmt) -> str:
    """Let the sampler observe the optimizer's step."""
    indent = source.indent(step)
    source.insert_before(step, [f"{indent}with {SAMPLER}.observe():"])
    source.replace(source.start(step), source.start(step), "    ")
    return f"line {step.lineno}: observes the optimizer's step"


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
        source.replace(source.line_starts[node.lineno - 1], source.line_starts[node.end_lineno], "")
        return
    line_start, line_end = source.line_starts[alias.lineno - 1], source.line_starts[alias.lineno]
    if source.bytes[line_start:line_end].decode().strip().rstrip(",") == DENSITY:
        source.replace(line_start, line_end, "")
        return
    index = node.names.index(alias)
    if index + 1 < len(node.names):
        source.replace(source.start(alias), source.start(node.names[index + 1]), "")
    else:
        source.replace(source.end(node.names[index - 1]), source.end(alias), "")
