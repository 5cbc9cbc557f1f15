"""What nobody's code is to blame for is told in one line, what is has its traceback."""

from pathlib import Path
from typing import Any

import pytest
import torch

import kairostep.cli
from kairostep.commands.failures import words_for
from kairostep.training import Run


def allocate_too_much(*_: Any, **__: Any) -> None:
    torch.empty(2**55, dtype=torch.uint8)


def raise_memory_error(*_: Any, **__: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize("fail", [allocate_too_much, raise_memory_error])
def test_memory_that_runs_out_is_told_with_what_to_lower(
    fail: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Run, "__init__", fail)
    with pytest.raises(SystemExit) as ended:
        kairostep.cli.main(["train", "digits", f"--output={tmp_path}"])
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert told.startswith("kairostep: error: memory ran out (")
    assert told.endswith("): lower --batch_size, raise --accumulate, or take a smaller network\n")
    assert told.count("\n") == 1


def test_the_memory_of_a_gpu_too() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nof which none is free")
    assert str(words_for(error)).startswith("memory ran out (CUDA out of memory. Tried to allocate 2.00 GiB): lower")


def test_a_mistake_in_the_code_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(Run, "__init__", fail)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        kairostep.cli.main(["train", "digits", f"--output={tmp_path}"])


def test_an_option_without_a_value_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        kairostep.cli.main(["preview", "--output=--"])
    assert ended.value.code == 2
    assert "an option must have a value, got --" in capsys.readouterr().err


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("line", "where", "told"),
    [
        ("analyse noise run", "noise_analysis.Study.of", "interrupted: nothing was written; the same command measures"),
        ("analyse interdependence run", "checkpoint_analyses.Study.of", "interrupted: nothing was written; the same"),
        ("evaluate run", "evaluate.open_processes", "interrupted: what was printed is in RUN/evaluations.jsonl, the"),
        ("preview", "run_or_preset.find_run_or_preset", "interrupted\n"),
    ],
)
def test_what_an_interrupted_command_leaves_is_told(
    line: str, where: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"kairostep.commands.{where}", interrupt)
    with pytest.raises(SystemExit) as ended:
        kairostep.cli.main(line.split())
    assert ended.value.code == 130
    assert capsys.readouterr().err.startswith(f"kairostep: error: {told}")
