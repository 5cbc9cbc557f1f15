"""The rules of the watch, of process 0 in this process; the test speaks for process 1."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from kairostep import stopping
from kairostep.training import process_links, process_losses, process_watch
from kairostep.training.process_links import Links
from kairostep.training.process_losses import Loss, reason_of
from kairostep.training.process_watch import ProcessWatch, Watch, watch_processes
from kairostep.training.run_errors import RunError

TOKEN, TIMEOUT = 1234, 1.0  # seconds
Left = list[tuple[int, str]]


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch) -> Left:
    """Exit codes and messages with which the watch would have ended this process."""
    ended: Left = []
    for module in (process_links, process_losses, process_watch):
        monkeypatch.setattr(module, "world_size", lambda: 2)
    monkeypatch.setattr(process_watch, "SECONDS_TO_END", 0.1)
    monkeypatch.setattr(process_watch, "SUSPICIOUS_SILENCE", 0.1)
    monkeypatch.setattr(process_watch, "SECONDS_TO_TELL", 0.2)
    monkeypatch.setattr(ProcessWatch, "_leave", lambda self, code, message, lost: ended.append((code, message)))
    return ended


@pytest.fixture
def watch(left: Left) -> Iterator[ProcessWatch]:
    watch = ProcessWatch(Links(TOKEN, socket.create_server(("127.0.0.1", 0)), None), TIMEOUT, lambda: "go on so")
    yield watch
    watch.close()


@pytest.fixture
def other(watch: ProcessWatch) -> Iterator[Callable[..., None]]:
    """Send messages of process 1."""
    assert watch.links.listener is not None
    with socket.create_connection(watch.links.listener.getsockname()) as connected:

        def send(**message: Any) -> None:
            connected.sendall(json.dumps(message).encode() + b"\n")

        send(token=TOKEN, rank=1, name="pid 5 on there")
        assert eventually(lambda: bool(watch.links.known))
        yield send
        watch.close()  # before the connection ends


def eventually(holds: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def beat(send: Callable[..., None], seconds: float, work: tuple[str | None, float, float] = (None, 0.0, 0.0)) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        send(beat=work, silence=(0.0, 0, ""))
        time.sleep(0.02)


def test_silence_is_a_loss_and_a_heartbeat_is_none(watch: ProcessWatch, other: Callable[..., None], left: Left) -> None:
    beat(other, 2 * TIMEOUT)
    assert watch.loss is None
    assert eventually(lambda: bool(left))
    code, message = left[0]
    assert code == 1
    assert message.startswith("process 1 of 2 (pid 5 on there) has been silent for ")
    assert message.endswith("; go on so")


def test_a_process_that_writes_may_be_silent_for_long(watch: ProcessWatch, other: Callable[..., None]) -> None:
    other(beat=("writing a checkpoint", 0.0, 0.0), silence=(0.0, 0, ""))
    time.sleep(1.5 * TIMEOUT)
    assert watch.loss is None
    other(beat=("writing a checkpoint", 31 * TIMEOUT, 0.0), silence=(0.0, 0, ""))
    assert eventually(lambda: watch.loss is not None)
    assert "has been writing a checkpoint for 31 s: its disk hangs, or is slow" in str(watch.loss)


def test_a_step_that_does_not_end_is_a_loss(watch: ProcessWatch, other: Callable[..., None]) -> None:
    other(beat=(None, 0.0, 29 * TIMEOUT), silence=(0.0, 0, ""))
    time.sleep(0.2)
    assert watch.loss is None
    other(beat=(None, 0.0, 31 * TIMEOUT), silence=(0.0, 0, ""))
    assert eventually(lambda: watch.loss is not None)
    assert "has been at one step for 31 s: it, or a process that it waits for, is stuck in its data" in str(watch.loss)


def test_the_first_step_and_what_comes_between_steps_may_take_long(watch: ProcessWatch) -> None:
    with watch.one_step():
        assert watch.step_began == float("inf")
    with watch.one_step():
        assert watch.step_began <= time.monotonic()
    assert watch.step_began == float("inf")


def test_this_process_writes_to_the_end(watch: ProcessWatch, other: Callable[..., None], left: Left) -> None:
    with watch.busy("writing a checkpoint"):
        other(end="memory ran out")
        assert eventually(lambda: watch.loss is not None)
        time.sleep(0.5)
        assert not left
    assert eventually(lambda: bool(left))
    assert left[0] == (1, "process 1 of 2 (pid 5 on there) ended: memory ran out; go on so")


def test_the_first_loss_is_the_cause_and_a_good_end_is_none(watch: ProcessWatch, other: Callable[..., None]) -> None:
    other(end=None)
    assert eventually(lambda: not watch.links.known)
    time.sleep(1.5 * TIMEOUT)
    assert watch.loss is None
    watch._conclude(Loss(1, "", "first"))
    watch._conclude(Loss(1, "", "second"))
    assert str(watch.loss) == "process 1 of 2 first"


def test_a_process_that_never_came_is_lost(watch: ProcessWatch, left: Left) -> None:
    assert eventually(lambda: bool(left))
    assert "process 1 of 2 has not been heard of for" in left[0][1]


def test_strangers_are_sent_away(watch: ProcessWatch, other: Callable[..., None]) -> None:
    assert watch.links.listener is not None
    watch.timeout = 1000.0
    for message in (b'{"token": 1, "rank": 1, "name": ""}\n', b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"x" * 20_000):
        with socket.create_connection(watch.links.listener.getsockname(), timeout=5) as stranger:
            stranger.sendall(message)
            with suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
    assert watch.loss is None
    assert [link.rank for link in watch.links.known] == [1]


def test_a_signal_ends_a_process_that_waits_for_a_silent_one(
    watch: ProcessWatch, other: Callable[..., None], left: Left
) -> None:
    watch.timeout = 1000.0
    watch.links.waker.send(bytes([signal.SIGTERM]))
    assert eventually(lambda: bool(left))
    assert left[0][0] == 128 + signal.SIGTERM
    assert "SIGTERM came, but nothing can be saved, since process 1 of 2 (pid 5 on there) has" in left[0][1]


@pytest.fixture
def patient(watch: ProcessWatch, monkeypatch: pytest.MonkeyPatch) -> ProcessWatch:
    """A watch to which no silence is suspicious."""
    monkeypatch.setattr(process_watch, "SUSPICIOUS_SILENCE", 1000.0)
    watch.timeout = 1000.0
    return watch


def test_a_signal_waits_for_the_agreement_of_processes_that_are_not_silent(
    patient: ProcessWatch, other: Callable[..., None], left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient.links.waker.send(bytes([signal.SIGTERM]))
    assert eventually(lambda: bool(patient.signals))
    time.sleep(0.3)
    assert not left
    patient.end_agreed()
    assert patient.signals == []
    patient.links.waker.send(bytes([signal.SIGTERM, signal.SIGINT]))  # while they save
    monkeypatch.setattr(process_watch, "SUSPICIOUS_SILENCE", 0.0)
    time.sleep(0.8)
    assert not left


def test_a_copy_of_a_signal_is_the_same_event_and_a_later_one_another(
    patient: ProcessWatch, other: Callable[..., None], left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient.links.waker.send(bytes([signal.SIGTERM, signal.SIGTERM]))  # to the group, and from the launcher
    assert eventually(lambda: bool(patient.signals))
    time.sleep(0.8)
    assert not left
    monkeypatch.setattr(stopping, "SECONDS_OF_ONE_EVENT", 0.7)
    patient.links.waker.send(bytes([signal.SIGTERM]))
    assert eventually(lambda: bool(left))
    assert left[0] == (128 + signal.SIGTERM, "SIGTERM came twice, nothing is saved")


def test_another_signal_acts_at_once(patient: ProcessWatch, other: Callable[..., None], left: Left) -> None:
    patient.links.waker.send(bytes([signal.SIGHUP, signal.SIGHUP]))  # a lost terminal sends two
    time.sleep(0.8)
    assert not left
    patient.links.waker.send(bytes([signal.SIGINT]))
    assert eventually(lambda: bool(left))
    assert left[0] == (128 + signal.SIGHUP, "SIGHUP came twice, nothing is saved")


@pytest.mark.filterwarnings("ignore:.*fork")
def test_signals_to_workers_do_not_count(patient: ProcessWatch, other: Callable[..., None]) -> None:
    before = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C in a terminal goes to workers too
    patient.hear_signals()
    try:
        worker = os.fork()
        if worker == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(0)
        os.waitpid(worker, 0)
        time.sleep(0.3)
        assert patient.signals == []
        os.kill(os.getpid(), signal.SIGINT)
        assert eventually(lambda: len(patient.signals) == 1)
    finally:
        patient.ignore_signals()
        signal.signal(signal.SIGINT, before)


def test_a_fault_of_the_watch_ends_nothing(
    watch: ProcessWatch, other: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    other(beat=1)
    assert eventually(lambda: "processes are no longer watched: " in caplog.text)
    assert watch.loss is None


def test_one_process_has_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(watch_processes(0, None, lambda: "")) is Watch  # type: ignore[arg-type]
    monkeypatch.setattr(process_watch, "world_size", lambda: 1)
    assert type(watch_processes(60, None, lambda: "")) is Watch  # type: ignore[arg-type]


def test_reasons_are_one_line_without_advice() -> None:
    assert reason_of(RunError("no space; go on with: this")) == "no space"
    assert reason_of(ValueError("one\ntwo")) == "one"
    assert reason_of(KeyError("x")) == "KeyError: 'x'"
    assert reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert reason_of(SystemExit(128 + signal.SIGTERM)) == "stopped by SIGTERM"
    assert reason_of(SystemExit(2)) == "SystemExit: 2"


@pytest.mark.parametrize(
    ("local", "own", "lost", "expected"),
    [(0, 0, 1, True), (1, 1, 0, True), (1, 1, 2, False), (2, 2, 0, False), (0, 8, 0, True), (1, 9, 0, False)],
)
def test_one_process_of_each_machine_speaks(
    local: int, own: int, lost: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setattr(process_losses, "rank", lambda: own)
    assert process_losses.speaks(lost) is expected
