"""Where a training loop draws its timesteps, and that what it makes of them keeps one for each sample, in order."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from kairostep.integrations.patching.source import Refused, Source, dotted, is_assignment, targets_of, value_of
from kairostep.integrations.patching.tree import are_exclusive, path_to
from kairostep.integrations.patching.use_of_draw import SIGMAS, TIMES, UseOfDraw

DENSITY = "compute_density_for_timestep_sampling"
PARAMETERS = {  # of the sampler's methods that stand for these functions
    "torch.randint": ("low", "high", "size", "device", "dtype"),
    "torch.rand": ("size", "device", "dtype"),
    "torch.multinomial": ("weights", "num_samples", "replacement"),
    DENSITY: ("weighting_scheme", "batch_size", "logit_mean", "logit_std", "mode_scale", "device"),
}
NUM_POSITIONAL = {"torch.randint": 3, "torch.rand": 1, "torch.multinomial": 3, DENSITY: 6}
USUAL = "timesteps = torch.randint(0, num_steps, (bsz,), device=latents.device)"
BY_HAND = (
    "by hand, write drawn = sampler.sample(latents) and take timesteps = drawn.index(num_steps), as the page "
    "'Start in 5 minutes' of kairostep's documentation shows for any loop"
)


@dataclass(frozen=True)
class Draw:
    """A call that draws one timestep for each sample."""

    call: ast.Call
    statement: ast.Assign | ast.AnnAssign
    path: tuple[ast.AST, ...]  # from the loop to the call

    @property
    def is_of_sigmas(self) -> bool:
        """Whether diffusers' density is taken as the noise level itself, not as a place among the timesteps."""
        return dotted(self.call.func) == DENSITY and dotted(targets_of(self.statement)[0]) in SIGMAS

    @property
    def needs_low(self) -> bool:
        """Whether torch.randint is called without its lowest value, which is 0 then."""
        return dotted(self.call.func) == "torch.randint" and "low" not in arguments_of(self.call)


def find_draws(source: Source, loop: ast.For, backward: ast.stmt) -> tuple[Draw, ...]:
    """Return the draws of the loop; more than one only if a step makes one of them."""
    draws = list(draws_in(source, loop))
    if not draws:
        reason = f"no draw of timesteps is recognised before line {backward.lineno}"
        raise Refused(other_draw(loop) or loop.lineno, reason, f"write {USUAL}, or {BY_HAND}")
    for number, draw in enumerate(draws):
        for other in draws[:number]:
            if not are_exclusive(draw.path, other.path):
                reason = f"a step must draw once, got a second draw after that of line {other.call.lineno}"
                raise Refused(draw.call.lineno, reason, "leave one of them out")
        UseOfDraw(source, loop, draw).check_order(backward)
    return tuple(draws)


def draws_in(source: Source, loop: ast.For) -> Iterator[Draw]:
    """Yield the calls of a loop that draw timesteps."""
    for statement in filter(is_assignment, ast.walk(loop)):
        for call in (node for node in ast.walk(value_of(statement)) if isinstance(node, ast.Call)):
            draw = Draw(call, statement, tuple(path_to(loop, call)))
            if is_draw(source, loop, draw):
                check_call(source, call)
                yield draw


def is_draw(source: Source, loop: ast.For, draw: Draw) -> bool:
    """Return whether a call draws timesteps: by its function, its bound, its name, and where its values go."""
    function, target = dotted(draw.call.func), targets_of(draw.statement)[0]
    if function == DENSITY:
        return True
    if function not in PARAMETERS or not isinstance(target, ast.Name):
        return False
    if target.id not in TIMES:  # whatever it is called, its values are given to add_noise
        return function != "torch.rand" and UseOfDraw(source, loop, draw).is_of_times
    arguments = arguments_of(draw.call)
    if function == "torch.multinomial":
        return bool(draw.call.args)
    if function == "torch.randint" and "high" in arguments and "timesteps" in source.of(arguments["high"]):
        return True
    return UseOfDraw(source, loop, draw).is_of_times


def arguments_of(call: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of a draw by the names of their parameters, as torch reads them."""
    function = dotted(call.func)
    arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    names = PARAMETERS[function]
    if function == "torch.randint" and len(call.args) + ("high" in arguments) + ("size" in arguments) == 2:
        names = names[1:]
    return dict(zip(names, call.args, strict=False)) | arguments


def check_call(source: Source, call: ast.Call) -> None:
    """Refuse a draw that the sampler cannot be called as, or of anything but one number for each sample."""
    function = dotted(call.func)
    for keyword in call.keywords:
        if keyword.arg == "generator":
            raise Refused(keyword.lineno, "a sampler draws by its own seed, got generator=", "leave it out")
        if keyword.arg not in PARAMETERS[function]:
            allowed = ", ".join(f"{name}=" for name in PARAMETERS[function])
            got = f"{keyword.arg}=" if keyword.arg else source.of(call)
            raise Refused(keyword.lineno, f"a sampler's draw takes {allowed}, got {got}", "leave it out")
    if len(call.args) > NUM_POSITIONAL[function] or any(isinstance(part, ast.Starred) for part in call.args):
        fix = "write its options as keywords, and the size as (bsz,)"
        raise Refused(call.lineno, f"the arguments of this draw are not recognised, got {source.of(call)}", fix)
    if function in (DENSITY, "torch.multinomial"):
        return
    size, by_hand = arguments_of(call).get("size"), "draw one for each sample, (bsz,)"
    if not isinstance(size, ast.Tuple | ast.List) or len(size.elts) != 1:
        got = source.of(size) if size else "none"
        raise Refused(call.lineno, f"the size of a draw must be (bsz,), got {got}", by_hand)
    if isinstance(size.elts[0], ast.Constant):
        raise Refused(call.lineno, f"each sample must have a timestep, got {source.of(size)} for all", by_hand)


def other_draw(loop: ast.For) -> int | None:
    """Return the line of something random that is called as timesteps are, to name it."""
    found = []
    for node in filter(is_assignment, ast.walk(loop)):
        target = dotted(targets_of(node)[0])
        calls = [dotted(part.func) for part in ast.walk(value_of(node)) if isinstance(part, ast.Call)]
        is_of_steps = "num_train_timesteps" in ast.unparse(node)
        if (target in TIMES + SIGMAS or is_of_steps) and any(
            "rand" in call or "normal" in call or "sample" in call for call in calls
        ):
            found.append((not target.startswith(("timestep", "sigma")), node.lineno))  # rather than some u
    return min(found)[1] if found else None
