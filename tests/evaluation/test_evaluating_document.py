"""What docs/evaluating.md shows, runs, without more than torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kairostep

TEXT = (Path(__file__).parents[2] / "docs" / "evaluating.md").read_text()


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "evaluating.md", "exec"), {})
    assert "PrecisionRecall(precision=" in capsys.readouterr().out


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
