"""The document shows code that runs."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "analysing.md"


def test_python_code_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(compile(block, str(DOCUMENT), "exec"), {})
