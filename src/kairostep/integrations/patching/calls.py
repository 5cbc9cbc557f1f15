"""Calls of torch and diffusers, replaced by those of the sampler; comments within them stay."""

import ast

from kairostep.integrations.patching.draws import Draw
from kairostep.integrations.patching.losses import Reduction
from kairostep.integrations.patching.source import Node, Source, dotted

SAMPLER = "timestep_sampler"  # the variable
DENSITY_OF_SIGMAS = "compute_density_of_sigmas"
WIDTH = 119  # of the scripts' lines


def change_draw(source: Source, draw: Draw) -> str:
    """Call the sampler where the script calls torch or diffusers."""
    call = draw.call
    name = DENSITY_OF_SIGMAS if draw.is_of_sigmas else dotted(call.func).removeprefix("torch.")
    function = f"{SAMPLER}.{name}"
    start, end = source.start(call), source.end(call)
    arguments = source.bytes[opening(source, call) + 1 : end - 1].decode()
    if draw.needs_low:
        arguments = ("0," if arguments[0].isspace() else "0, ") + arguments
    text = call_text(source, call, function, arguments)
    source.replace(start, end, text)
    return f"line {call.lineno}: draws by the sampler, called as {dotted(call.func)}"


def call_text(source: Source, call: ast.Call, function: str, arguments: str) -> str:
    """Return a call in the place of another, wrapped if it was chosen; note it if its line gets too long."""
    before = source.bytes[source.line_starts[call.lineno - 1] : source.start(call)].decode()
    text = f"{function}({arguments})"
    if "\n" in text or len(before) + len(text) <= WIDTH:
        return text
    source.too_long[source.start(call)] = len(before) + len(text)
    if source.start(call) not in source.wrapped:
        return text
    indent = before[: len(before) - len(before.lstrip())]
    return f"{function}({source.newline}{indent}    {arguments}{source.newline}{indent})"


def change_mean(source: Source, mean: Reduction) -> str:
    """Take the sampler's weighted mean where the script takes the mean."""
    call = mean.call
    function = f"{SAMPLER}.prior.mean" if mean.is_prior else f"{SAMPLER}.mean"
    weight = f", {mean.shown_weight}" if mean.shown_weight else ""
    if mean.is_function:
        arguments = without_reduction(source, call) + weight
    elif dotted(call.func) == "torch.mean":
        arguments = with_argument(source, call, weight)
        if "#" not in arguments:
            arguments = source.of(call.args[0]) + weight
    else:
        assert isinstance(call.func, ast.Attribute)
        reduced = source.bytes[source.end(call.func.value) : source.end(call.func)]
        end = source.end(call.func.value) + after_parentheses(reduced)
        arguments = without_parentheses(source.bytes[source.start(call) : end].decode()) + weight
    source.replace(source.start(call), source.end(call), call_text(source, call, function, arguments))
    return f"line {call.lineno}: takes the weighted mean" + (" of the prior's half" if mean.is_prior else "")


def without_reduction(source: Source, call: ast.Call) -> str:
    """Return the text of F.mse_loss(...) with a loss for each element."""
    start = source.start(call)
    own = source.bytes[start : source.end(call)]
    reduction = [keyword.value for keyword in call.keywords if keyword.arg == "reduction"]
    if reduction:
        at, end = source.start(reduction[0]) - start, source.end(reduction[0]) - start
        return (own[:at] + b'"none"' + own[end:]).decode()
    before = source.bytes[start : opening(source, call)].decode()
    arguments = with_argument(source, call, ', reduction="none"')
    return f"{before}({arguments})"


def with_argument(source: Source, call: ast.Call, text: str) -> str:
    """Return what stands between the parentheses of a call, with more text after its last argument."""
    parts: list[Node] = [*call.args, *call.keywords]
    last = max(map(source.end, parts))
    rest = source.bytes[last : source.end(call) - 1]
    at = last + after_parentheses(rest)
    arguments = source.bytes[opening(source, call) + 1 : at].decode() + text
    return arguments + source.bytes[at : source.end(call) - 1].decode() if b"#" in rest else arguments


def opening(source: Source, call: ast.Call) -> int:
    """Return where the parenthesis of a call is."""
    return source.bytes.index(b"(", source.end(call.func))


def after_parentheses(gap: bytes) -> int:
    """Return where the last closing parenthesis of a gap between nodes ends, 0 without one; comments do not count."""
    end, in_comment = 0, False
    for position, letter in enumerate(gap):
        in_comment = letter == ord("#") or (in_comment and letter not in b"\r\n")
        if letter == ord(")") and not in_comment:
            end = position + 1
    return end


def without_parentheses(text: str) -> str:
    """Return the text without parentheses around all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    try:
        ast.parse(text[1:-1], mode="eval")
    except SyntaxError:  # (a) / (b)
        return text
    return text[1:-1]
