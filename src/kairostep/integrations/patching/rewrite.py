"""The patch itself: a few lines of a script, changed where they stand."""

import ast
import difflib
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kairostep.integrations.patching.arguments import add_argument
from kairostep.integrations.patching.calls import SAMPLER, change_draw, change_mean
from kairostep.integrations.patching.draws import BY_HAND, DENSITY
from kairostep.integrations.patching.imports import add_import, drop_import
from kairostep.integrations.patching.known_args import attributes_in, takes_argument
from kairostep.integrations.patching.loop import Loop, find_loop
from kairostep.integrations.patching.losses import Reduction, reductions
from kairostep.integrations.patching.source import Refused, Source, dotted
from kairostep.integrations.patching.tree import path_to

MOST_LINES = 12  # that a patch adds or changes
NAME_IN_SCRIPT = (
    "the loop has no args of argparse, so the sampler's name stands where the script calls ScriptSampler: to change "
    'it, replace "{sampler}" there; "uniform" has the script\'s own density'
)


@dataclass(frozen=True)
class Patched:
    """A patched script, and what was changed."""

    text: str
    diff: str
    num_changed: int
    changes: tuple[str, ...]  # one sentence for each place, with its line in the original
    weights: tuple[str, ...] = ()  # the variables that multiply the loss of each sample
    notes: tuple[str, ...] = ()  # what the script does without
    has_argument: bool = True  # whether --timestep_sampler chooses, not the name in the script


def patch_script(text: str, sampler: str = "root_loss", name: str = "script.py") -> Patched:
    """Return a training script of diffusers that draws, weights and observes through kairostep.

    Args:
        text: The script.
        sampler: The default of its new argument, `--timestep_sampler`, or of a script without a parser the sampler.
        name: The script's name, for the diff.

    Raises:
        Refused: The script is not recognised; the message has the line and the change by hand.
    """
    patched, too_long = rewritten(text, sampler, name)
    num_wraps = (MOST_LINES - patched.num_changed) // 2  # a wrapped call has two lines more
    if too_long and num_wraps > 0:
        longest = sorted(too_long, key=lambda start: -too_long[start])[:num_wraps]
        patched, _ = rewritten(text, sampler, name, wrapped=frozenset(longest))
    if patched.num_changed > MOST_LINES:
        reason = f"a patch must change at most {MOST_LINES} lines, this one changes {patched.num_changed}"
        raise Refused(1, reason, f"shorten the loop, or {BY_HAND}")
    check_python(text, patched.text)
    return patched


def rewritten(
    text: str, sampler: str, name: str, *, wrapped: frozenset[int] = frozenset()
) -> tuple[Patched, dict[int, int]]:
    """Return the script with all changes made, the calls at these places wrapped, and the lengths of long lines."""
    source = Source(text, wrapped=wrapped)
    if line := line_with_kairostep(source.tree):
        reason = "the script must be as diffusers has it, got one with kairostep in it"
        fix = f"patch the original; to change the sampler, run this one with --{SAMPLER}=NAME"
        raise Refused(line, reason, f"{fix}, or write another name where it calls ScriptSampler")
    loop = find_loop(source)
    means = reductions(source, loop)
    by_argument = takes_argument(source, loop)
    changes = [add_import(source, loop)]
    changes += [add_argument(source, sampler)] if by_argument else []
    changes += [make_sampler(source, loop, f"args.{SAMPLER}" if by_argument else f'"{sampler}"')]
    changes += [change_draw(source, draw) for draw in loop.draws]
    changes += [change_mean(source, mean) for mean in means]
    changes += [wrap_step(source, step) for step in loop.steps]
    drop_import(source, loop)
    patched = difference(text, source.edited(), name, tuple(changes))
    weights = tuple(dict.fromkeys(mean.shown_weight for mean in means if mean.shown_weight))
    notes = [] if by_argument else [NAME_IN_SCRIPT.format(sampler=sampler)]
    notes += notes_on(source, loop, means, sampler)
    return replace(patched, weights=weights, notes=tuple(notes), has_argument=by_argument), source.too_long


def notes_on(source: Source, loop: Loop, means: list[Reduction], sampler: str) -> Iterator[str]:
    """Yield what the user should know of a script that is patched none the less."""
    undone = {mean.rebuilt_at: mean.weight for mean in means if mean.rebuilt_at and mean.weight}
    for line, weight in undone.items():
        yield (
            f"line {line} rebuilds the prediction from the network's output, and {weight} undoes that in the loss: "
            f"the sampler is not shown {weight}"
        )
    is_flow = any(dotted(draw.call.func) == DENSITY for draw in loop.draws)
    if is_flow and sampler == "root_loss" and not any(mean.rebuilt_at for mean in means):
        yield (
            "the loss of a flow is nearly flat in t, so root_loss draws as uniform does, unless --weighting_scheme "
            "weights the loss"
        )
    if not any(isinstance(node, ast.Attribute) and node.attr == "save_state" for node in ast.walk(source.tree)):
        call = f"{loop.accelerator}.save_state(folder)"
        yield f"the script never calls {call}, so its sampler is not saved: call it where the script saves the model"


def line_with_kairostep(tree: ast.Module) -> int | None:
    """Return the first line that imports or uses kairostep, or a variable called as the sampler is."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr))
    return min((node.lineno for node in nodes if is_ours(node)), default=None)


def is_ours(node: ast.stmt | ast.expr) -> bool:
    """Return whether a node imports or names kairostep, or names the sampler."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        return any(module.partition(".")[0] == "kairostep" for module in modules)
    if isinstance(node, ast.Constant):
        return bool(node.value == f"--{SAMPLER}")
    return isinstance(node, ast.Name) and node.id in ("kairostep", SAMPLER)


def check_python(before: str, after: str) -> None:
    """Refuse a script that its patch would break, or whose comments it would lose."""
    try:
        compile(after, "script", "exec")
    except SyntaxError as error:
        line = original_line(before, after, error.lineno or 1)
        raise Refused(line, f"the patched script would be no Python, got {error.msg}", BY_HAND) from error
    kept = Counter(comment for comment, _ in comments_in(after))
    for comment, line in comments_in(before):
        kept[comment] -= 1
        if kept[comment] < 0:
            reason = f"a comment must not stand within a line that changes, got {comment}"
            raise Refused(line, reason, "move it to a line of its own before the statement, and patch again")


def comments_in(text: str) -> list[tuple[str, int]]:
    """Return the comments of a script with their lines."""
    tokens = tokenize.generate_tokens(io.StringIO(text, newline=None).readline)
    return [(token.string.rstrip(), token.start[0]) for token in tokens if token.type == tokenize.COMMENT]


def original_line(before: str, after: str, line: int) -> int:
    """Return the line of the original that a line of the patched script comes from, or stands after."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    for tag, start, _, start_after, end_after in matcher.get_opcodes():
        if line <= end_after:
            return start + (line - start_after if tag == "equal" else 1)
    return 1


def difference(before: str, after: str, name: str, changes: tuple[str, ...]) -> Patched:
    """Return the patched script with its unified diff."""
    lines = list(
        difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
        )
    )
    num_changed = sum(line.startswith("+") for line in lines[2:])
    return Patched(after, "".join(lines), num_changed, changes)


def make_sampler(source: Source, loop: Loop, name: str) -> str:
    """Make the sampler once the accelerator has prepared the model, before a checkpoint is loaded.

    Args:
        source: The script.
        loop: Its loop.
        name: The sampler's name as code: an argument of the script or a string in quotes.
    """
    function = loop.function
    at = next(index for index, node in enumerate(function.body) if path_to(node, loop.body))
    before = function.body[:at]
    prepared = [node for node in before if calls(node, f"{loop.accelerator}.prepare")]
    made = [node for node in before if isinstance(node, ast.Assign) and dotted(node.targets[0]) == loop.accelerator]
    if not prepared and not made:
        reason = f"{loop.accelerator}.prepare(...) must come before the loop in its function, which is not found"
        raise Refused(loop.body.lineno, reason, f"prepare the model there, and patch again, or {BY_HAND}")
    after = (prepared or made)[-1]
    loaded = [node for node in before if calls(node, f"{loop.accelerator}.load_state")]
    if loaded and loaded[0].lineno < after.lineno:
        reason = "the state must be loaded after prepare, so that it holds the sampler, got it before"
        raise Refused(loaded[0].lineno, reason, "move it after prepare, and patch again")
    attributes = attributes_in(function)
    seeds = ("args.seed",) if name.startswith("args.") else ("args.seed", "config.seed")
    seed = next((f", seed={each}" for each in seeds if each in attributes), "")
    text = f"{SAMPLER} = ScriptSampler({name}, {loop.accelerator}{seed})"
    source.insert_after(after, [source.indent(after) + text])
    return f"line {after.end_lineno}: makes the sampler, which {loop.accelerator}.save_state and load_state then hold"


def calls(node: ast.AST, function: str) -> bool:
    """Return whether a statement, or one within it, calls this function."""
    return any(isinstance(part, ast.Call) and dotted(part.func) == function for part in ast.walk(node))


def wrap_step(source: Source, step: ast.stmt) -> str:
    """Let the sampler observe the optimizer's step."""
    indent = source.indent(step)
    source.insert_before(step, [f"{indent}with {SAMPLER}.observe():"])
    source.replace(source.start(step), source.start(step), "    ")
    return f"line {step.lineno}: observes the optimizer's step"
