"""Tables of what convergence.py measured: every arm beside uniform, paired by seed."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 0.975, by degrees of freedom
MARKERS = ("<!-- tables: written by convergence.py table -->", "<!-- end of tables -->")
BASE = "uniform"
TITLE = "# Convergence on images\n\nWritten by `python benchmarks/convergence.py table`.\n"
NOTE = """Uniform's row has values, by seed; other rows have ratios to uniform of the same seed: geometric mean over
seeds, 95 % t-interval in parentheses, each seed in brackets. Under 1 is better.

- ε-MSE: squared error of the noise on held-out images over uniform t; VLB: variational bound on them in bits per
  dimension. Both are of averaged weights, with the same noise and times for all arms. FID: by seed, not as a ratio.
- wall-clock and evaluations to uniform's value: what an arm had spent when it first had uniform's final value, over
  what uniform had; between checkpoints linear in log(loss). `>`: it did not get there with what it spent.
- Wall-clock is steps times the seconds per step after the first checkpoint: start-up is left out, probes are not. It
  is compared within one commit alone: loops get faster from one to the next.
  Evaluations of the network count alike in training and in probes, though these have no backward pass."""


@dataclass(frozen=True)
class Log:
    """What one run left."""

    path: Path
    where: dict[str, Any]
    checkpoints: list[dict[str, Any]]
    end: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Log":
        """Return a log."""
        where, *checkpoints, end = map(json.loads, path.read_text().splitlines())
        return cls(path, where, checkpoints, end)

    def final(self, key: str) -> float:
        """Return a figure of the last checkpoint."""
        return float(self.checkpoints[-1][key])

    @property
    def seconds_per_step(self) -> float:
        """Seconds of training between the first and the last checkpoint, per step."""
        first, last = self.checkpoints[0], self.checkpoints[-1]
        if first is last:
            return float(last["seconds"] / last["step"])
        return float((last["seconds"] - first["seconds"]) / (last["step"] - first["step"]))

    def seconds(self) -> list[float]:
        """Return the wall-clock at each checkpoint, start-up left out."""
        return [line["step"] * self.seconds_per_step for line in self.checkpoints]

    def evaluations(self) -> list[float]:
        """Return the network evaluations at each checkpoint, probes among them."""
        return [line["training_evaluations"] + line["probe_evaluations"] for line in self.checkpoints]

    def curve(self, key: str) -> list[float]:
        """Return a figure at each checkpoint."""
        return [float(line[key]) for line in self.checkpoints]


Logs = dict[int, Log]  # by seed


@dataclass(frozen=True)
class Ratio:
    """One seed's ratio to uniform; `reached` is False where it is only known to be larger."""

    value: float
    reached: bool = True

    def __str__(self) -> str:
        return f"{'' if self.reached else '>'}{self.value:.3f}"


def cost_to_reach(costs: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """Return the cost at which a curve first is at the target, linear in log(loss) between checkpoints."""
    before: tuple[float, float] | None = None
    for cost, loss in zip(costs, losses, strict=True):
        if loss <= target:
            if before is None:
                return cost
            share = math.log(before[1] / target) / math.log(before[1] / loss)
            return before[0] + share * (cost - before[0])
        before = (cost, loss)
    return None


def cost_ratio(log: Log, base: Log, key: str, costs: Callable[[Log], list[float]]) -> Ratio:
    """Return the cost of reaching uniform's final value over uniform's own."""
    target = base.final(key)
    own = cost_to_reach(costs(base), base.curve(key), target)
    found = cost_to_reach(costs(log), log.curve(key), target)
    assert own is not None  # the last checkpoint is at the target
    return Ratio(costs(log)[-1] / own, reached=False) if found is None else Ratio(found / own)


def summary(ratios: Sequence[Ratio], *, seeds: bool = True) -> str:
    """Return the geometric mean, its interval and, after it, every seed."""
    if len(ratios) == 1:
        return f"{ratios[0]} (one seed)"
    listed = f" [{', '.join(map(str, ratios))}]" if seeds else ""
    logs = [math.log(ratio.value) for ratio in ratios]
    mean, quantile = statistics.fmean(logs), T_QUANTILES[min(len(logs) - 1, len(T_QUANTILES)) - 1]
    num_reached = sum(ratio.reached for ratio in ratios)
    if num_reached < len(ratios):  # what the others spent is less than what they would have needed
        return f">{math.exp(mean):.3f} ({num_reached} of {len(ratios)} reached it){listed}"
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.3f} ({math.exp(mean - half):.3f}, {math.exp(mean + half):.3f}){listed}"


Figure = Callable[[Log], float]
FIGURES: dict[str, Figure] = {
    "ε-MSE": lambda log: log.final("epsilon_mse"),
    "VLB": lambda log: float(log.end["bits_per_dim"][0]),
    "ε-MSE, t < 0.05": lambda log: float(log.end["epsilon_mse_by_t"][0]),
    "ε-MSE, t > 0.95": lambda log: float(log.end["epsilon_mse_by_t"][-1]),
    "seconds per step": lambda log: log.seconds_per_step,
}
COSTS: dict[str, tuple[str, Callable[[Log], list[float]]]] = {
    "wall-clock to uniform's ε-MSE": ("epsilon_mse", Log.seconds),
    "evaluations to uniform's ε-MSE": ("epsilon_mse", Log.evaluations),
    "wall-clock to uniform's VLB": ("bits_per_dim", Log.seconds),
    "evaluations to uniform's VLB": ("bits_per_dim", Log.evaluations),
}


QUALITY = ("ε-MSE", "VLB", "ε-MSE, t < 0.05", "ε-MSE, t > 0.95", "FID")
COST = ("seconds per step", *COSTS)
TIMED = {"seconds per step", *(column for column in COSTS if column.startswith("wall-clock"))}
SHORT = ("ε-MSE", "VLB", "FID", "wall-clock to uniform's ε-MSE", "evaluations to uniform's ε-MSE")


def cell(column: str, pairs: Sequence[tuple[Log, Log]], *, seeds: bool) -> str:
    """Return the cell of an arm whose logs come with uniform's of the same seed."""
    if column == "FID":
        return listed_fid([log for log, _ in pairs])
    if column in TIMED:
        pairs = [(log, base) for log, base in pairs if log.where.get("commit") == base.where.get("commit")]
    if not pairs:
        return "-"
    if column in COSTS:
        key, costs = COSTS[column]
        return summary([cost_ratio(log, base, key, costs) for log, base in pairs], seeds=seeds)
    figure = FIGURES[column]
    return summary([Ratio(figure(log) / figure(base)) for log, base in pairs], seeds=seeds)


def base_cell(column: str, logs: Sequence[Log]) -> str:
    """Return uniform's cell: values by seed, and 1 for costs."""
    if column == "FID":
        return listed_fid(logs)
    return "1" if column in COSTS else ", ".join(f"{FIGURES[column](log):.4g}" for log in logs)


def listed_fid(logs: Sequence[Log]) -> str:
    """Return the FID of each run, by seed, if any has one."""
    found = [f"{log.end['fid'][0]:.2f}" if "fid" in log.end else "-" for log in logs]
    return "-" if set(found) == {"-"} else ", ".join(found)


def markdown(arms: dict[str, Logs], columns: Sequence[str], *, seeds: bool = True) -> str:
    """Return one table with a row per arm, those without a seed in common with uniform left out."""
    base = arms[BASE]
    values = [base_cell(column, [base[seed] for seed in sorted(base)]) for column in columns]
    rows = [[BASE, str(len(base)), *values]]
    for arm, logs in sorted(arms.items()):
        pairs = [(logs[seed], base[seed]) for seed in sorted(logs.keys() & base.keys())]
        if arm != BASE and pairs:
            rows.append([arm, str(len(pairs)), *(cell(column, pairs, seeds=seeds) for column in columns)])
    return as_markdown(["arm", "seeds", *columns], rows)


def as_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def read_logs(output: Path) -> dict[str, dict[str, Logs]]:
    """Return all logs, by setting, arm and seed, of settings that have uniform."""
    found: dict[str, dict[str, Logs]] = {}
    for path in sorted(output.glob("*/*/seed-*.jsonl")):
        log = Log.read(path)
        found.setdefault(path.parts[-3], {}).setdefault(path.parts[-2], {})[log.where["seed"]] = log
    return {setting: arms for setting, arms in found.items() if BASE in arms}


def provenance_table(arms: dict[str, Logs]) -> str:
    """Return where the runs were made: a row for each command, device and commit."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for arm, logs in sorted(arms.items()):
        for seed, log in sorted(logs.items()):
            where = log.where
            key = (f"`{where['command']}`", f"{where['device']}, torch {where['torch']}", short(where["commit"]))
            groups.setdefault(key, []).append(f"{arm} {seed}")
    rows = [[", ".join(runs), *key] for key, runs in groups.items()]
    return as_markdown(["runs (arm, seed)", "command", "device", "commit"], rows)


def short(commit: str | None) -> str:
    """Return seven digits of a commit, and the sign that files were changed."""
    return "unknown" if commit is None else commit[:7] + commit[40:]


def write_tables(output: Path) -> str:
    """Write all tables beside the logs, the short ones also into the README of all results, and return those."""
    long, brief = tables(output)
    path = output / "README.md"
    if not path.exists():
        path.write_text("\n".join([TITLE, *MARKERS, ""]))
    put(path, long)
    overview = output.parent / "README.md"
    if overview.exists() and MARKERS[0] in overview.read_text():
        put(overview, brief)
    return brief


def tables(output: Path) -> tuple[str, str]:
    """Return all tables of the logs under `output`, and the short ones."""
    long, brief = [NOTE], list[str]()
    settings = read_logs(output)
    if not settings:
        raise ValueError(f"there must be logs of {BASE} to compare with, got none in {output}: run that arm first")
    for setting, arms in settings.items():
        steps = next(iter(arms[BASE].values())).checkpoints[-1]["step"]
        title = f"{setting}, {steps} steps"
        long += [f"## {title}", markdown(arms, QUALITY), markdown(arms, COST), provenance_table(arms)]
        brief += [f"**{title}**", markdown(arms, SHORT, seeds=False)]
    return "\n\n".join(long), "\n\n".join(brief)


def put(path: Path, text: str) -> None:
    """Write the text between the markers of a file."""
    whole = path.read_text()
    if whole.count(MARKERS[0]) != 1 or whole.count(MARKERS[1]) != 1:
        raise ValueError(f"{path} must have the lines {MARKERS[0]} and {MARKERS[1]} once: put them where tables belong")
    before, rest = whole.split(MARKERS[0])
    after = rest.split(MARKERS[1])[1]
    path.write_text(f"{before}{MARKERS[0]}\n\n{text}\n\n{MARKERS[1]}{after}")
