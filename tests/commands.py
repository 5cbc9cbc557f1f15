"""Commands as a person types them: refused in one line that leaves every file as it was, or as a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kairostep
from kairostep.cli import main


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder by its path in it, but for what Python compiled."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 2) -> str:
    """Return the one line with which a command is refused, all files of the working directory being as they were."""
    before = contents(Path())
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert ended.value.code == code
    assert captured.err.startswith("kairostep: error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert contents(Path()) == before
    return captured.err.removeprefix("kairostep: error: ").strip()


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with this kairostep, in the working directory."""
    environment = os.environ | {"PYTHONPATH": str(Path(kairostep.__file__).parents[1])}  # absolute: we are elsewhere
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
