"""How far a loop is: lines without a terminal, a bar on one, and the time that is left."""

import io
from typing import Any

import pytest
import torch
from torch import nn

from kairostep import progress_meter
from kairostep.progress_meter import ProgressMeter, duration


class Clock:
    """Stands in for `time`; moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_meter, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.04 s"),
        (1.2, "1 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (86400, "1 d"),
        (273600.4, "3 d 4 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_without_a_terminal_there_is_a_line_at_least_every_minute(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    with ProgressMeter(400, "encoding", unit="image") as meter:
        for _ in range(400):
            clock.now += 1.0
            meter.update()
            if line := capsys.readouterr().err:
                told.append((clock.now - 100, line))
    assert [seconds for seconds, _ in told] == [10, 70, 130, 190, 250, 310, 370]
    assert told[1][1] == "encoding: 70 of 400 images, 1 images/s, 5 min 30 s left\n"


def test_what_takes_less_than_ten_seconds_is_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressMeter(9, "encoding", unit="image") as meter:
        for _ in range(9):
            clock.now += 1.0
            meter.update()
    assert capsys.readouterr() == ("", "")


def test_what_was_done_before_does_not_make_the_rest_look_fast(clock: Clock) -> None:
    meter = ProgressMeter(100, "making", unit="image", done=80)
    clock.now += 10
    meter.advance(10)
    assert meter.seconds_left == 10
    meter.restart()
    assert meter.seconds_left is None
    clock.now += 30
    meter.advance(5)
    assert meter.left == ", 30 s left"


def test_another_process_tells_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressMeter(9, "making", unit="image", shown=False) as meter:
        clock.now += 1000
        meter.update()
        meter.tell("a line")
    assert capsys.readouterr() == ("", "")


def test_calls_of_a_network_are_counted_by_their_rows_and_change_nothing() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(5, 3)
    expected = model(x)
    meter = ProgressMeter(10, "making", unit="image")
    with meter.watching(model, lambda rows: rows / 2):
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x[:2]), expected[:2])
    model(x)
    assert meter.done == 3.5


def test_on_a_terminal_there_is_a_bar_of_whole_numbers_and_lines_stand_above_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal: Any = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with ProgressMeter(4, "making", unit="image") as meter:
        assert not meter.due
        for _ in range(6):
            meter.update(0.5)
        assert meter.bar.n == 3
        meter.tell("half a line")
    assert "half a line\n" in terminal.getvalue()
    assert "/4 [" in terminal.getvalue()
