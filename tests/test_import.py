"""Importing kairostep brings torch and nothing heavier, and takes next to no time beyond it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"

CODE = """
import json, sys, time
start = time.perf_counter()
import torch
middle, before = time.perf_counter(), set(sys.modules)
import kairostep
end = time.perf_counter()
print(json.dumps({"torch": middle - start, "seconds": end - middle, "new": sorted(set(sys.modules) - before)}))
"""


def imported() -> dict[str, Any]:
    """Return what a fresh interpreter loads for kairostep after torch, and how long that takes."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_importing_kairostep_imports_torch_and_the_standard_library_alone() -> None:
    new = imported()["new"]
    packages = {name.split(".")[0] for name in new}
    assert packages - set(sys.stdlib_module_names) == {"kairostep"}  # no numpy either, unless torch brought it
    layers = {name.split(".")[1] for name in new if name.startswith("kairostep.")}
    shared = {"arguments", "began", "checks", "counters", "ranks", "registry", "renamed_options", "shares", "version"}
    assert layers == {"by_name", "diffusion", "evaluation", "timesteps"} | shared


def test_importing_kairostep_takes_less_than_a_tenth_of_a_second_beyond_torch() -> None:
    for _ in range(5):  # the machine may be busy: the best of a few, and torch's own import as the measure of that
        found = imported()
        if found["seconds"] < 0.1:
            break
    assert found["seconds"] < max(0.1, 0.1 * found["torch"])  # torch takes a second where nothing else goes on
