"""The drop-in example: both loops run, they differ in seven lines, and the README shows exactly these."""

import difflib
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAIN, WITH_SAMPLER = (ROOT / "examples" / "drop_in" / name for name in ("plain.py", "with_sampler.py"))


def changes() -> list[str]:
    """Return the added and removed lines between the two loops, with their sign."""
    before, after = (path.read_text().splitlines() for path in (PLAIN, WITH_SAMPLER))
    return [line for line in difflib.ndiff(before, after) if line.startswith(("+ ", "- "))]


@pytest.mark.parametrize("path", [PLAIN, WITH_SAMPLER], ids=lambda path: path.stem)
def test_loop_runs_and_learns(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "500"])
    variables = runpy.run_path(str(path))
    assert capsys.readouterr().out.startswith("step 500: loss 0.")
    assert float(variables["loss"].detach()) < 0.7  # 1 is what predicting nothing costs
    assert len(path.read_text().splitlines()) <= 40


def test_at_most_seven_lines_change() -> None:
    assert len([line for line in changes() if line.startswith("+ ")]) <= 7
    assert len([line for line in changes() if line.startswith("- ")]) <= 7


def test_the_readme_shows_the_same_lines() -> None:
    shown = (ROOT / "README.md").read_text().split("```diff\n")[1].split("```")[0].splitlines()
    shown = [line for line in shown if line.startswith(("+", "-"))]
    assert sorted(shown) == sorted(line[0] + line[2:] for line in changes())
