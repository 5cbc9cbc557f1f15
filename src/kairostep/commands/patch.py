"""`kairostep patch`: adds kairostep to one of diffusers' training scripts."""

import argparse
from collections.abc import Sequence
from pathlib import Path

MAX_BYTES = 10_000_000  # of a script; the longest of diffusers have 100,000
PARSER = {
    "help": "make one of diffusers' training scripts choose its timesteps",
    "description": "Rewrite one of diffusers' training scripts (examples/**/train_*.py) so that it draws, weights and "
    "observes through kairostep, by at most 12 lines.\nThe script gets an argument --timestep_sampler and keeps the "
    "sampler in its checkpoints. What is not recognised is refused: exit code 2.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the script, the sampler and where to write."""
    parser.add_argument("script", type=Path, metavar="SCRIPT")
    parser.add_argument("--sampler", default="root_loss", help="default of --timestep_sampler (root_loss)")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help="where to write; without it, SCRIPT changes")
    parser.add_argument("--check", action="store_true", help="say what would change, and write nothing")
    parser.set_defaults(run=run)


def run(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Patch the script, show the diff and write it."""
    from kairostep.bounded_files import Unreadable, read_bytes
    from kairostep.files import whole_file
    from kairostep.integrations.diffusers_scripts import sampler_for_script
    from kairostep.integrations.patching import Refused, patch_script

    sampler_for_script(known.sampler)
    try:
        text = read_bytes(known.script, MAX_BYTES).decode()
    except (UnicodeDecodeError, Unreadable) as error:
        raise ValueError(f"SCRIPT must be text in UTF-8, got {known.script}: {error}") from error
    try:
        patched = patch_script(text, known.sampler, known.script.name)
    except Refused as error:
        raise ValueError(f"{known.script}, {error}") from error
    print(patched.diff, end="")
    if known.check:
        print(f"{known.script} is recognised; a patch changes {patched.num_changed} lines:")
        print("\n".join(patched.changes))
        return
    output = known.output or known.script
    with whole_file(output) as temporary:
        Path(temporary).write_bytes(patched.text.encode())
    print(f"{output}: {patched.num_changed} lines changed; try --timestep_sampler=uniform, which draws as before")
