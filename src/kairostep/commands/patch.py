"""`kairostep patch`: adds kairostep to one of diffusers' training scripts."""

import argparse
import codecs
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kairostep.integrations.patching import Patched

MAX_BYTES = 10_000_000  # of a script; the longest of diffusers have 100,000
PARSER = {
    "help": "make one of diffusers' training scripts choose its timesteps",
    "description": "Rewrite one of diffusers' training scripts (examples/**/train_*.py) so that it draws, weights and "
    "observes through kairostep, by at most 12 lines.\nThe script gets an argument --timestep_sampler (without "
    "argparse: the sampler's name) and keeps the sampler in its checkpoints. What is not recognised is refused: exit "
    "code 2.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the script, the sampler and where to write."""
    parser.add_argument("script", type=Path, metavar="SCRIPT")
    parser.add_argument(
        "--sampler",
        default="root_loss",
        help="default of --timestep_sampler, or in a script without argparse the sampler itself (root_loss); uniform "
        "has the script's density, an unknown name lists the nearest, or all",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help="where to write; without it, SCRIPT changes")
    parser.add_argument("--check", action="store_true", help="say what would change, and write nothing")
    parser.set_defaults(run=run)


def run(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Patch the script, show the diff and write it."""
    from kairostep.integrations.diffusers_scripts import sampler_for_script
    from kairostep.integrations.patching import Refused, patch_script

    sampler_for_script(known.sampler)
    mark, text = read_script(known.script)
    output = find_output(known.output or known.script)
    try:
        patched = patch_script(text, known.sampler, known.script.name)
    except Refused as error:
        raise ValueError(f"{known.script}, {error}") from error
    print(patched.diff, end="")
    if known.check:
        print(f"{known.script} is recognised; a patch changes {patched.num_changed} lines:")
        print("\n".join(patched.changes))
    else:
        replaced = ", and replaced" if known.output and output.exists() else ""
        write_script(output, mark + patched.text.encode(), like=output if output.exists() else known.script)
        told = "; try --timestep_sampler=uniform, the script's own density" if patched.has_argument else ""
        print(f"{output}: {patched.num_changed} lines changed{replaced}{told}")
    print(f"loss weight shown to the sampler: {', '.join(patched.weights) or 'none'}")
    print_notes(patched)


def find_output(path: Path) -> Path:
    """Return the file to write, at the end of symbolic links, in a folder that exists."""
    try:
        output = path.resolve()
    except RuntimeError as error:  # a loop of links
        raise ValueError(f"OUT must be a file or a link to one, got {path}: {error}") from error
    if not output.parent.is_dir():
        raise ValueError(f"OUT must be in a folder that exists, got {path}: mkdir -p {output.parent}")
    if output.is_dir():
        raise ValueError(f"OUT must be a file, got the folder {path}: name a file in it")
    return output


def read_script(path: Path) -> tuple[bytes, str]:
    """Return the byte order mark of a script, empty if it has none, and its text."""
    from kairostep.bounded_files import Unreadable, read_bytes

    try:
        content = read_bytes(path, MAX_BYTES)
        mark = codecs.BOM_UTF8 if content.startswith(codecs.BOM_UTF8) else b""
        return mark, content[len(mark) :].decode()
    except (UnicodeDecodeError, Unreadable) as error:
        raise ValueError(f"SCRIPT must be text in UTF-8, got {path}: {error}") from error
    except OSError as error:
        raise ValueError(f"SCRIPT must be a file that can be read, got {path}: {error.strerror}") from error


def write_script(path: Path, content: bytes, *, like: Path) -> None:
    """Write a file whole or not at all, with the permissions of another."""
    from kairostep.files import whole_file

    permissions = stat.S_IMODE(like.stat().st_mode)
    with whole_file(path) as temporary:
        temporary.write_bytes(content)
    path.chmod(permissions)


def print_notes(patched: "Patched") -> None:
    """Print what the user should know."""
    for note in patched.notes:
        print(f"note: {note}")
