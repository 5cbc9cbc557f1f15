"""Reads a run directory for reports, in any state: running, empty, crashed, damaged or from an older version."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kairostep.bounded_files import MAX_YAML, Unreadable, parse_yaml, read_bytes
from kairostep.renamed_options import with_new_names
from kairostep.runs.evaluations import EVALUATIONS, read_evaluations, reason_of
from kairostep.runs.metrics import Metrics, number
from kairostep.version import __version__

MAX_DEVICE = 100  # characters
QUIET_SECONDS = 600  # without a write for this long, a run counts as dead
MAX_RANGES = 8  # ranges of t with a held-out loss each
MEASURED = ("fid", "kid", "precision", "recall")  # measured on generated images during training
FILES = ("config.yaml", "metrics.jsonl", EVALUATIONS)


@dataclass(frozen=True)
class HeldOutPoint:
    """The held-out losses at one step, and the cost up to it."""

    step: float
    seconds: float | None
    evaluations: float | None  # of the network, including probes
    loss: float | None
    loss_error: float | None
    vlb: float | None
    vlb_error: float | None
    weighted_loss: float | None = None  # under the weights of the objective; runs of version 0.1 have none
    weighted_loss_error: float | None = None
    loss_ranges: tuple[float | None, ...] = ()  # in equal ranges of t, low noise first

    @property
    def is_weighted(self) -> bool:
        """Whether the run trains another loss than the unweighted one."""
        loss, weighted = self.loss, self.weighted_loss
        return loss is not None and weighted is not None and not math.isclose(loss, weighted, rel_tol=1e-4)


@dataclass(frozen=True)
class RunHistory:
    """Everything that a report shows of one run."""

    directory: Path
    config: Mapping[str, Any]
    config_text: str
    metrics: Metrics  # thinned
    held_out: list[HeldOutPoint]
    generated: list[dict[str, Any]]  # measurements of images that training generated, sorted by step
    evaluations: list[dict[str, Any]]  # these, then the lines of evaluations.jsonl
    grids: list[Path]  # sorted by step
    state: str  # finished, running, stopped or empty
    state_text: str
    problems: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, directory: Path) -> "RunHistory":
        """Return the run, with a description of its problems. Never raises, whatever the directory holds."""
        problems: list[str] = []
        config, text = _config(directory, problems)
        metrics = Metrics.read(directory / "metrics.jsonl")
        generated = _image_measurements(metrics)
        evaluations = [*generated, *read_evaluations(directory / EVALUATIONS, problems)]
        state, state_text = _state(directory, config, metrics)
        held_out = _held_out(metrics)
        problems = [*problems, *metrics.problems, *_version_problems(config)]
        grids = _grids(directory)
        return cls(
            directory,
            config,
            text,
            metrics.thin(),
            held_out,
            generated,
            evaluations,
            grids,
            state,
            state_text,
            problems,
        )

    @property
    def seed(self) -> Any:
        """The seed, None if unknown."""
        seed = self.config.get("seed")
        return seed if isinstance(seed, int | str) else None

    def part(self, name: str) -> str:
        """Return the name of a part, such as the sampler, or an empty string."""
        value = self.config.get(name)
        return str(value.get("name", "") if isinstance(value, Mapping) else value or "")

    def option(self, part: str, name: str) -> Any:
        """Return an option of a part, None if it is not set."""
        value = self.config.get(part)
        return value.get(name) if isinstance(value, Mapping) else None

    @cached_property
    def last(self) -> HeldOutPoint | None:
        """The last point with a held-out loss."""
        return next((point for point in reversed(self.held_out) if point.loss is not None), None)

    @cached_property
    def seconds_per_step(self) -> float | None:
        """Seconds that a step trains for, the start of a run left out, in which code is compiled; None if unknown."""
        series = self.metrics.get("seconds")
        if not series.steps:
            return None
        steps, seconds = series.steps[-1] - series.steps[0], series.values[-1] - series.values[0]
        return seconds / steps if steps > 0 and seconds > 0 else None

    @property
    def provenance(self) -> Mapping[str, Any]:
        """What the config says about versions, device, processes and commit."""
        facts = self.config.get("provenance")
        return facts if isinstance(facts, Mapping) else {}

    @property
    def devices(self) -> str:
        """The device, with the number of processes if there are several, such as `8 x cuda: NVIDIA H200`."""
        num_processes = number(self.provenance.get("processes"))
        device = str(self.provenance.get("device", "unknown"))[:MAX_DEVICE]
        return f"{num_processes:.0f} x {device}" if num_processes is not None and num_processes > 1 else device

    @property
    def place(self) -> str:
        """Devices and commit: seconds compare within one."""
        return f"{self.devices} {self.provenance.get('commit')}"

    def costs_at(self, step: float) -> dict[str, float]:
        """Return what was spent up to a step, as far as it is known, by the costs that runs are compared in."""
        size, each = number(self.config.get("batch_size")), self.seconds_per_step
        known = {
            "steps": step,
            "images": None if size is None else step * size,
            "evaluations": evaluations_at(self.metrics, step),
            "seconds": None if each is None else step * each,
        }
        return {cost: float(value) for cost, value in known.items() if value is not None}

    def spent(self, name: str) -> float | None:
        """Return the last value of a series, such as `seconds`."""
        values = self.metrics.get(name).values
        return values[-1] if values else None

    def measured(self, what: str) -> dict[str, Any] | None:
        """Return one measurement of a kind, such as `fid`.

        The last checkpoint counts, of its measurements those of averaged weights, and of these the latest.
        """
        found = [line for line in self.evaluations if line.get("what") == what]
        return max(
            reversed(found),  # of equal ones the first counts
            key=lambda line: (number(line.get("checkpoint")) or 0.0, line.get("weights") != "model"),
            default=None,
        )


def fingerprint(directory: Path) -> tuple[Any, ...]:
    """Return a value that changes whenever the run writes something, or counts as dead."""
    paths = [*(directory / name for name in FILES), directory / ".lock", *_grids(directory)]
    return (*((str(path), *_stamp(path)) for path in paths), time.time() - _last_sign(directory) < QUIET_SECONDS)


def _last_sign(directory: Path) -> float:
    """Return when a run last wrote anything, in seconds since 1970."""
    return max(_stamp(directory / name)[1] for name in (*FILES, ".lock")) / 1e9


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_size, found.st_mtime_ns)


def _config(directory: Path, problems: list[str]) -> tuple[Mapping[str, Any], str]:
    try:
        text = read_bytes(directory / "config.yaml", MAX_YAML).decode("utf-8", errors="replace")
    except (OSError, Unreadable) as error:
        problems.append(f"config.yaml cannot be read: {reason_of(error)}")
        return {}, ""
    try:
        config = parse_yaml(text)
    except Unreadable as error:
        problems.append(f"config.yaml cannot be read: {error}")
        return {}, text
    if not isinstance(config, Mapping):
        problems.append("config.yaml holds no settings")
        return {}, text
    return with_new_names({str(key): value for key, value in config.items()}), text


def _grids(directory: Path) -> list[Path]:
    try:
        return sorted((directory / "samples").glob("step-*.png"))
    except OSError:
        return []


def _held_out(metrics: Metrics) -> list[HeldOutPoint]:
    names = ("loss", "loss_error", "vlb", "vlb_error", "weighted_loss", "weighted_loss_error")
    exact = {name: _exact(metrics, f"held_out/{name}") for name in names}
    steps = sorted({*exact["loss"], *exact["vlb"]})
    seconds = metrics.get("seconds")
    ranges = [_exact(metrics, f"held_out/loss_ranges/{i}") for i in range(MAX_RANGES)]
    ranges = [values for values in ranges if values]
    return [
        HeldOutPoint(
            step,
            seconds.at(step),
            evaluations_at(metrics, step),
            **{name: exact[name].get(step) for name in names},
            loss_ranges=tuple(values.get(step) for values in ranges),
        )
        for step in steps
    ]


def _exact(metrics: Metrics, name: str) -> dict[float, float]:
    """Return a series as a mapping from steps to values."""
    series = metrics.get(name)
    return dict(zip(series.steps, series.values, strict=True))


def _image_measurements(metrics: Metrics) -> list[dict[str, Any]]:
    """Return the image quality measured during training, as lines of evaluations.jsonl, sorted by step."""
    num, found = _exact(metrics, "generated/num"), []
    for what in MEASURED:
        errors = _exact(metrics, f"generated/{what}_error")
        for step, value in _exact(metrics, f"generated/{what}").items():
            line = {"what": what, "checkpoint": step, "value": value, "standard_error": errors.get(step)}
            found.append({**line, "n": num.get(step), "weights": "ema"})
    return sorted(found, key=lambda line: line["checkpoint"])


def evaluations_at(metrics: Metrics, step: float) -> float | None:
    """Return the evaluations of the network up to a step, including probes."""
    spent = metrics.get("training_evaluations").at(step)
    return None if spent is None else spent + (metrics.get("probe_evaluations").at(step) or 0.0)


def _state(directory: Path, config: Mapping[str, Any], metrics: Metrics) -> tuple[str, str]:
    steps = number(config.get("steps"))
    locked = (directory / ".lock").exists()
    quiet = time.time() - _last_sign(directory)
    at = "nothing recorded yet" if metrics.last_step is None else f"at step {metrics.last_step:,.0f}"
    of = f" of {steps:,.0f}" if steps is not None and metrics.last_step is not None else ""
    if steps is not None and metrics.last_step is not None and metrics.last_step >= steps:
        return "finished", f"finished, {steps:,.0f} steps"
    if locked and quiet < QUIET_SECONDS:
        return "running", f"running, {at}{of}"
    if metrics.last_step is None:
        return "empty", "nothing recorded yet"
    if locked:
        return "stopped", f"no sign of life for {_duration(quiet)}, {at}{of}: killed or crashed"
    return "stopped", f"stopped {at}{of}"


def _duration(seconds: float) -> str:
    for size, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'s' * (count > 1)}"
    return "less than a minute"


def _version_problems(config: Mapping[str, Any]) -> list[str]:
    provenance = config.get("provenance")
    version = provenance.get("kairostep") if isinstance(provenance, Mapping) else None
    if not config or version == __version__:
        return []
    if version is None:
        return ["config.yaml names no version: it was cut short, or `train` did not write it"]
    return [f"written by kairostep {version}, this is {__version__}"]
