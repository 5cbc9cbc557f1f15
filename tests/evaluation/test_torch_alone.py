"""What `ks.evaluation` does with tensors needs torch alone."""

import os
import subprocess
import sys
from pathlib import Path

import kairostep

TORCH_ALONE = """
import sys
import torch
before = set(sys.modules)
import kairostep.evaluation
new = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert new == {"kairostep"}, new
"""


def test_the_functions_on_tensors_need_torch_alone() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(kairostep.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-c", TORCH_ALONE], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
