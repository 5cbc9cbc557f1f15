"""Names of runs and arms on a page, taken from their folders."""

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

SEPARATORS = " /_.=-"


def run_names(directories: Sequence[Path]) -> list[str]:
    """Return the name of each folder, with enough parent folders to make it unique."""
    names = []
    for directory in directories:
        parts = directory.parts
        others = [other.parts for other in directories if other.parts != parts]
        depth = next((n for n in range(1, len(parts)) if all(o[-n:] != parts[-n:] for o in others)), len(parts))
        names.append("/".join(parts[-depth:]))
    return names


def arm_name(names: Sequence[str], seeds: Sequence[object], directories: Sequence[Path]) -> str:
    """Return the common part of the names of an arm's runs: `uniform` for `uniform-0` and `uniform-1`."""
    if len(names) == 1:
        return names[0]
    without_seeds = {_without_seed(name, seed) for name, seed in zip(names, seeds, strict=True)}
    shared = without_seeds.pop() if len(without_seeds) == 1 else _shared_start(names)
    if shared:
        return shared
    parents = {directory.parent for directory in directories}
    if len(parents) == 1 and (name := parents.pop().name):
        return name
    return f"{names[0]} and {len(names) - 1} more"


def _without_seed(name: str, seed: object) -> str:
    return re.sub(rf"(^|[{SEPARATORS}])(seed|s)?[{SEPARATORS}]*{re.escape(str(seed))}$", "", name)


def _shared_start(names: Sequence[str]) -> str:
    """Return the words and numbers with which all names start, without `seed` at their end."""
    pieces = [re.findall(r"[^\W\d_]+|\d+|[\W_]", name) for name in names]
    same = takewhile(lambda column: len(set(column)) == 1, zip(*pieces, strict=False))
    start = "".join(column[0] for column in same).rstrip(SEPARATORS)
    return re.sub(rf"(^|[{SEPARATORS}])seed$", "", start)
