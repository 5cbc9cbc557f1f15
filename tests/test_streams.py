"""Streams whose reader is gone."""

import io
import sys
from pathlib import Path

import pytest

from kairostep.commands.streams import lossy_output


def test_what_cannot_be_written_is_told_once_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with lossy_output():
            for _ in range(3):
                print("a table", flush=True)
        assert sys.stdout is full
        full.flush()  # as the interpreter does in the end: it goes nowhere
    assert capsys.readouterr().err == (
        "kairostep: note: output was lost, the work was not: [Errno 28] No space left on device\n"
    )


def test_other_errors_than_of_writing_are_not_hidden() -> None:
    with pytest.raises(OSError, match="of the work"), lossy_output():
        raise OSError("of the work")


def test_what_can_be_written_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    with lossy_output():
        print("a table")
        assert not sys.stdout.isatty()
    assert shown.getvalue() == "a table\n"
