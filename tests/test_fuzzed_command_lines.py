"""Wild values on the command line end in a message or in what was asked for: no traceback, no long wait before work.

KAIROSTEP_FUZZ=2000 runs all lines; the suite runs every 20th of them.
"""

import contextlib
import io
import os
import resource
import runpy
import signal
import sys
import time
import traceback
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from command_lines import NUM_LINES, SMALL, line

import kairostep.cli
from kairostep.analysis import interdependence, variance_profile
from kairostep.commands import checkpoint_analyses
from kairostep.data import cifar10_obtain
from kairostep.evaluation.evaluation import Evaluation
from kairostep.generation import image_folder
from kairostep.training.run import Run

SHARE = int(os.environ.get("KAIROSTEP_FUZZ", "100"))  # of the lines, evenly spaced
LONGEST = 60  # seconds until the work that was asked for begins
WORK = 2  # seconds of that work, after which it is told to stop
MEMORY = 6 * 2**30  # bytes more than there are in use: what is beyond cannot be had
FINE = {0, 1, 2, 128 + signal.SIGTERM}


class TooLong(BaseException):
    """Nothing began for a minute."""


class AskedFor(BaseException):
    """The work that was asked for has begun, and does not heed a signal."""


@dataclass(frozen=True)
class Ending:
    """How a command line ended."""

    line: list[str]
    code: int | None  # None: by an exception
    seconds: float
    output: str

    @property
    def fault(self) -> str | None:
        """What must not be, None if all is well."""
        if self.code is None or "Traceback" in self.output:
            return "a traceback"
        if self.code not in FINE:
            return f"exit code {self.code}"
        told = self.output.partition("kairostep: error: ")[2].strip()
        if self.code in (1, 2) and not told:
            return "no message"
        return None


class Clock:
    """Interrupts what takes long: nothing to show for a minute is a fault, work is told to stop as by a person."""

    def __init__(self) -> None:
        self.working = False

    def start(self) -> None:
        """Wait for work to begin."""
        self.working = False
        signal.signal(signal.SIGALRM, self.ring)
        signal.setitimer(signal.ITIMER_REAL, LONGEST)

    def begin_work(self) -> None:
        """Let it work for a moment, whatever else it begins meanwhile."""
        if not self.working:
            self.working = True
            signal.setitimer(signal.ITIMER_REAL, WORK, WORK)

    def ring(self, _: int, frame: FrameType | None) -> None:
        """Time is up, or will be in a moment if it rings in a finaliser, out of which nothing can be raised."""
        if in_finaliser(frame):
            signal.setitimer(signal.ITIMER_REAL, 0.01, WORK)
            return
        if not self.working:
            raise TooLong
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            raise AskedFor
        os.kill(os.getpid(), signal.SIGTERM)

    def stop(self) -> None:
        """All is done; an alarm that rings at this moment comes too late."""
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)

    def marks(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, which says when it begins."""

        def marked(*arguments: Any, **options: Any) -> Any:
            self.begin_work()
            return work(*arguments, **options)

        return marked


def in_finaliser(frame: FrameType | None) -> bool:
    """Return whether a frame was called by an object's `__del__`."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Let allocations fail that are far beyond what small runs take, as on a machine that has no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def end_of(command: list[str], clock: Clock) -> Ending:
    """Run a command line here."""
    shown = io.StringIO()
    began, code = time.monotonic(), 0
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clock.start()
            with little_memory():
                kairostep.cli.main(command)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except AskedFor:
        code = 0
    except BaseException:
        return Ending(command, None, time.monotonic() - began, shown.getvalue() + traceback.format_exc())
    finally:
        clock.stop()
        forget()
    return Ending(command, code, time.monotonic() - began, shown.getvalue())


def forget() -> None:
    """Undo what a command leaves in its process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


def no_network(*_: Any, **__: Any) -> None:
    raise OSError("there is no network in tests")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, settings in {"run": ["--label_dropout=0.1"], "flow": ["--process=flow"]}.items():
        kairostep.cli.main(["train", "digits", f"--output={folder / name}", *SMALL, *settings])
        forget()
    scripts = runpy.run_path(str(Path(__file__).parent / "integrations" / "training_scripts.py"))["SCRIPTS"]
    (folder / "script.py").write_text(scripts["snr"])
    return folder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which `evaluate --features` adds
    monkeypatch.setattr(Run, "_take_steps", clock.marks(Run._take_steps))
    monkeypatch.setattr(Run, "_finish", clock.marks(Run._finish))
    monkeypatch.setattr(image_folder, "make_missing", clock.marks(image_folder.make_missing))
    monkeypatch.setattr(Evaluation, "measure", clock.marks(Evaluation.measure))
    monkeypatch.setattr(checkpoint_analyses, "variance_profile", clock.marks(variance_profile))
    monkeypatch.setattr(checkpoint_analyses, "range_effects", clock.marks(interdependence.range_effects))
    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    monkeypatch.setattr(cifar10_obtain.subprocess, "run", no_network)
    return clock


def test_wild_values_end_in_a_message_or_in_what_was_asked_for(
    runs: Path, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = []
    for number in range(0, NUM_LINES, NUM_LINES // SHARE):
        here = tmp_path / str(number) / "deep" / "down"  # `..` stays within
        here.mkdir(parents=True)
        monkeypatch.chdir(here)
        ending = end_of(line(runs, number), clock)
        if ending.fault:
            faults.append(f"line {number}, {ending.fault} after {ending.seconds:.0f} s: {ending.line}\n{ending.output}")
            print(faults[-1], file=sys.__stderr__, flush=True)
    assert not faults, "\n\n".join(faults)
