"""Whole systems side by side: loops of one file from several calls, other settings refused, verdicts, seeded loops."""

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SMALL = ["--preset=digits", "--network.channels=8", "--network.multipliers=[1]", "--network.attention=[]"]
SMALL += ["--batch_size=16", "--steps=6", "--evaluate_every=2", "--held_out_images=16", "--sample_steps=2"]
PIXELS = "def make():\n    return lambda images: images.float().flatten(1)[:, ::8]\n"

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "speed"))
    return importlib.import_module("time_to_quality")


def run(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, output: str, *arguments: str) -> dict[str, Any]:
    """Return the loops in the file after a call."""
    monkeypatch.setattr(sys, "argv", ["time_to_quality.py", *SMALL, f"--output={output}", *arguments])
    benchmark.main()
    loops: dict[str, Any] = json.loads(Path(output).read_text())["loops"]
    return loops


def test_calls_add_their_loops_to_one_file(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some_pixels.py").write_text(PIXELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    fid = ["--features=some_pixels:make", "--fid_images=24", f"--cache={tmp_path}"]
    before = run(benchmark, monkeypatch, "a.json", "--loops=1e-4", *fid)
    assert "kairostep" not in capsys.readouterr().out.splitlines()[-1]  # no verdict yet
    after = run(benchmark, monkeypatch, "a.json", "--loops=1e-4,0.01,kairostep", "--commit=abc", *fid)
    assert list(after) == ["diffusers, 0.0001", "diffusers, 0.01", "kairostep"]
    assert after["diffusers, 0.0001"] == before["diffusers, 0.0001"]
    assert [point["step"] for point in after["kairostep"]["checkpoints"]] == [2, 4, 6]
    assert all(point["fid"] > 0 for loop in after.values() for point in loop["checkpoints"])
    assert after["kairostep"]["where"]["commit"] == "abc"
    assert after["kairostep"]["where"]["speed"].startswith("plain: ")
    assert len(capsys.readouterr().out.partition("\n\n")[2].strip().splitlines()) == 1 + 1 + 1 + 3 + 1 + 2 * 2
    with pytest.raises(ValueError, match=r"a\.json has other settings \(seed\)"):
        run(benchmark, monkeypatch, "a.json", "--seed=1", *fid)


def test_a_loop_is_the_same_whatever_ran_before(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(*arguments: str) -> float:
        torch.rand(3)  # from the global generator
        loops = run(benchmark, monkeypatch, f"{len(list(Path().iterdir()))}.json", *arguments)
        found: float = loops["diffusers, 0.01"]["checkpoints"][-1]["epsilon_mse"]
        return found

    alone = error("--loops=0.01")
    assert error("--loops=1e-4,0.01") == alone
    assert error("--loops=0.01", "--seed=1") != alone


def test_verdicts_are_on_what_the_example_has_at_its_end(benchmark: ModuleType) -> None:
    def curve(*values: float) -> list[Any]:
        return [benchmark.Checkpoint(step, 10.0 * step, value, None) for step, value in enumerate(values, start=1)]

    ours = {"kairostep": curve(0.4, 0.1)}
    example = {"diffusers, 0.0001": curve(0.1, 0.2), "diffusers, 0.002": curve(0.05), "diffusers, 0.01": curve(0.3)}
    example["diffusers, 1"] = curve(math.nan)  # diverged
    assert benchmark.verdicts(ours) == benchmark.verdicts(example) == []
    own, best, other = benchmark.verdicts(example | ours)
    assert own == (
        "epsilon_mse of diffusers, 0.0001, its own rate: 0.2 after 20.0 s, kairostep 15.0 s, 1.33 times as fast"
    )
    assert best.endswith("diffusers, 0.002, its best rate: 0.05 after 10.0 s, kairostep does not reach it")
    assert "its" not in other


def test_the_example_takes_a_batch_at_once(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(benchmark, monkeypatch, "a.json", "--accumulate=2")
    assert "pass --accumulate=1" in capsys.readouterr().err
