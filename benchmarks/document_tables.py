"""Writes the tables in README.md and docs/ that come from `results/` and from the samplers' classes.

Run it without arguments: `python benchmarks/document_tables.py`. A test checks that documents and results agree.
"""

import inspect
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speed.scaling import STRONG_BATCH, as_markdown, inputs_table, scaling_table

from kairostep.registry import samplers
from kairostep.timesteps import TimestepSampler

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
STUDY = RESULTS / "study" / "linear-8000"
RATES = RESULTS / "study" / "linear-3000"  # a folder of logs for each learning rate
BASE = ("uniform", 128)  # the sampler and the batch that other rows are compared with
COSTS = {"CPU, ms": "cpu_3.log", "H200, ms": "h200.log"}  # column -> log of sampler_cost
CONTROLS = ("permuted",)  # arms that the README leaves to the page of the study
MEASURED = {  # page of a method -> arms of results/convergence
    "root_loss": ("root_loss",),
    "antithetic_pairs": ("root_loss", "root_loss-pairs"),
    "stable_target": ("root_loss-pairs", "root_loss-pairs-stable_target"),
    "adaptive": ("adaptive-loss", "adaptive-vlb"),
    "infonoise": ("infonoise",),
    "logit_normal": ("logit_normal",),
    "speed": ("speed",),
    "weightings": ("min_snr",),
}
LOOPS = {  # loop in a log of train_speed -> row
    "diffusers": "diffusers' example of unconditional training",
    "bare": "a bare PyTorch loop",
    "bare, compiled": "the bare loop, compiled",
    "plain": "kairostep, `--speed=plain`",
    "graph": "kairostep, `--speed=graph`",
    "compile": "kairostep, `--speed=compile`",
}
NETWORKS = {"cifar10-small": "U-Net of 6.5M (`cifar10-small`)", "cifar10-ddpm": "U-Net of 35.7M (`cifar10-ddpm`)"}
GPU_SIZES = (24, 80, 141)  # GB
USABLE = 0.9  # of a GPU's memory: the rest is CUDA's own and lost between blocks
FLAT_GRADIENTS = 4  # bytes per parameter, with several processes
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571)  # 0.975, by degrees of freedom


@dataclass(frozen=True)
class Log:
    """The log of one run: where it ran, its checkpoints, and what was measured at the end."""

    where: dict[str, Any]
    checkpoints: list[dict[str, Any]]
    end: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Log":
        """Read a log: one JSON object per line."""
        where, *checkpoints, end = map(json.loads, path.read_text().splitlines())
        return cls(where, checkpoints, end)

    @property
    def arm(self) -> tuple[str, int]:
        """The sampler and the batch size."""
        last = self.checkpoints[-1]
        return self.where["arm"].split("-")[0], last["training_evaluations"] // last["step"]

    @property
    def error(self) -> float:
        """Held-out squared error of the noise at the end of training."""
        return float(self.checkpoints[-1]["epsilon_mse"])

    @property
    def seconds_per_step(self) -> float:
        """Seconds per step after the first checkpoint, which leaves out start-up."""
        first, last = self.checkpoints[0], self.checkpoints[-1]
        return float((last["seconds"] - first["seconds"]) / (last["step"] - first["step"]))

    def seconds_to(self, target: float) -> float | None:
        """Return the seconds until the held-out error is at the target, linear in log(error) between checkpoints."""
        before: tuple[float, float] | None = None
        for line in self.checkpoints:
            seconds, error = line["step"] * self.seconds_per_step, float(line["epsilon_mse"])
            if error <= target:
                if before is None:
                    return seconds
                share = math.log(before[1] / target) / math.log(before[1] / error)
                return before[0] + share * (seconds - before[0])
            before = (seconds, error)
        return None


def results_table(folder: Path = STUDY) -> str:
    """Return the table of a folder of logs: one row for each sampler and batch size."""
    arms: dict[tuple[str, int], dict[int, Log]] = {}
    for path in sorted(folder.rglob("seed-*.jsonl")):
        log = Log.read(path)
        arms.setdefault(log.arm, {})[log.where["seed"]] = log
    header = ["draws", "batch", "held-out error", "FID, by seed", "time to the first row's error"]
    order = sorted((arm for arm in arms if arm[0] not in CONTROLS), key=lambda arm: (arm != BASE, arm))
    rows = [results_row(arm, arms[arm], arms[BASE]) for arm in order]
    return as_markdown(header, rows)


def results_row(arm: tuple[str, int], logs: dict[int, Log], base: dict[int, Log]) -> list[str]:
    """Return one row of the table; times are ratios to the base arm with the same seed."""
    sampler, batch = arm
    times = [(logs[seed].seconds_to(base[seed].error), base[seed]) for seed in sorted(logs.keys() & base.keys())]
    ratios = [seconds / other.seconds_to(other.error) for seconds, other in times if seconds is not None]
    time = (
        mean_and_interval(ratios)
        if len(ratios) == len(times) > 0
        else "not reached by all"
        if ratios
        else "not reached"
    )
    error = statistics.fmean(log.error for log in logs.values())
    fids = ", ".join(f"{logs[seed].end['fid'][0]:.1f}" for seed in sorted(logs))
    return [f"`{samplers.find(sampler).__name__}`", str(batch), f"{error:.5f}", fids, "1" if arm == BASE else time]


def rates_table(folder: Path = RATES) -> str:
    """Return the table of a sweep: uniform and root-loss draws at each learning rate, on seed 0."""
    rows = []
    for path in sorted(folder.glob("rate-*"), key=lambda path: float(path.name.removeprefix("rate-"))):
        logs = [Log.read(*path.rglob(f"{arm}/seed-0.jsonl")) for arm in ("uniform", "root_loss")]
        errors, fids = [f"{log.error:.5f}" for log in logs], [f"{log.end['fid'][0]:.1f}" for log in logs]
        reached = [log.seconds_to(logs[0].error) for log in logs]
        steps = [seconds / log.seconds_per_step for seconds, log in zip(reached, logs, strict=True) if seconds]
        share = f"{steps[1] / steps[0]:.2f}" if len(steps) == 2 else "not reached"
        rows.append([path.name.removeprefix("rate-"), " / ".join(errors), " / ".join(fids), share])
    names = "`Uniform` / `RootLoss`"
    share = "steps of `RootLoss` to uniform's error, as a share of uniform's"
    return as_markdown(["rate", f"held-out error, {names}", f"FID, {names}", share], rows)


def mean_and_interval(ratios: Sequence[float]) -> str:
    """Return the geometric mean and its 95 % interval by Student's t; of one seed there is no interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return f"{math.exp(mean):.2f} (one seed)"
    half = T_QUANTILES[len(logs) - 2] * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.2f} ({math.exp(mean - half):.2f} to {math.exp(mean + half):.2f})"


def known_samplers() -> dict[str, type[TimestepSampler]]:
    """Return all samplers by name, the fixed ones first."""
    found = {name: samplers.find(name) for name in samplers}
    learning = {name for name, kind in found.items() if kind.observe is not TimestepSampler.observe}
    return dict(sorted(found.items(), key=lambda item: (item[0] != "uniform", item[0] in learning, item[0])))


def samplers_table() -> str:
    """Return the table of samplers: a link to the page, and the first sentence of the class's docstring."""
    rows = []
    for name, sampler in known_samplers().items():
        summary = " ".join(inspect.getdoc(sampler).split("\n\n")[0].split())
        rows.append([f"[`{sampler.__name__}`](docs/methods/{name}.md)", summary])
    return as_markdown(["sampler", "draws"], rows)


def costs_table() -> str:
    """Return milliseconds per step and rows of the network beyond training, for each sampler that was measured."""
    measured = {column: read_costs(RESULTS / "sampler_cost" / log) for column, log in COSTS.items()}
    rows = []
    for sampler in (sampler.__name__ for sampler in known_samplers().values()):
        lines = [costs.get(sampler) for costs in measured.values()]
        if not any(lines):
            continue
        times = [f"{float(line[0]) / 1000:.2f}" if line else "-" for line in lines]
        rows.append([f"`{sampler}`", *times, next(line for line in lines if line)[-1]])
    return as_markdown(["sampler", *COSTS, "rows of the network per step beyond training"], rows)


def read_costs(path: Path) -> dict[str, list[str]]:
    """Return the columns of a log of sampler_cost, by sampler."""
    lines = (line.split() for line in path.read_text().splitlines()[3:])
    return {words[0]: words[1:] for words in lines if words and words[1] != "v1"}


def measured_table(arms: Sequence[str]) -> str:
    """Return the rows of these arms in the tables of results/convergence, beside uniform's FID of the same seeds."""
    parts = (RESULTS / "README.md").read_text().split("<!-- tables")[1].split("**")[1:]
    rows = []
    for setting, table in zip(parts[::2], parts[1::2], strict=True):
        cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
        uniform = next(row for row in cells if row[0] == "uniform")
        for arm, seeds, error, bound, fid, _, evaluations in (row for row in cells if row[0] in arms):
            beside = ", ".join(uniform[4].split(", ")[: int(seeds)])
            name, steps = setting.split(", ")
            rows.append([f"`{name}`, {steps}", f"`{arm}`", seeds, error, bound, fid, beside, evaluations])
    header = ["setting", "arm", "seeds", "error", "bound", "FID", "FID of uniform", "evaluations to uniform's error"]
    return as_markdown(header, rows)


def speeds_table(log: Path = RESULTS / "train_speed" / "h200.log") -> str:
    """Return the images per second of each loop, by network, from the log of train_speed at batch 128."""
    speeds: dict[str, dict[str, str]] = {}
    for line in log.read_text().splitlines():
        if ", batch 128, torch" in line:
            network = speeds.setdefault(line.split(",")[0], {})
        elif (loop := line[:18].strip()) in LOOPS:
            network[loop] = line[18:].split()[0]
    rows = [[text, *(network[loop] for network in speeds.values())] for loop, text in LOOPS.items()]
    return as_markdown(["images per second", *(NETWORKS[name] for name in speeds)], rows)


def peak_bytes(log: str, preset: str, batch: int) -> float:
    """Return the measured peak of memory in graph mode from a log of train_speed."""
    part = (RESULTS / "train_speed" / log).read_text().split(f"{preset}, batch {batch}, torch")[1]
    return 2**30 * float(next(line for line in part.splitlines() if line.startswith("graph ")).split()[3])


def measured_to_counted(counted: dict[str, Any]) -> float:
    """Return how much more memory an image took on a GPU than what is counted for it, at most, over two networks."""
    logs = {"cifar10-small": "h200_3.log", "cifar10-ddpm": "h200_2.log"}
    measured = {
        name: (peak_bytes(log, name, 512) - peak_bytes("h200.log", name, 128)) / (512 - 128)
        for name, log in logs.items()
    }
    return max(value / counted["networks"][name]["bytes per image"] for name, value in measured.items())


def memory_table() -> str:
    """Return what a step needs of a GPU's memory, and how many images fit, for each network that was counted."""
    counted = json.loads((RESULTS / "memory" / "cpu.json").read_text())
    factor, rows = measured_to_counted(counted), []
    for name, network in counted["networks"].items():
        copies = network["bytes per parameter of copies"]
        each = sum(counted["bytes per parameter"].values()) + FLAT_GRADIENTS + copies
        state, image = each * network["parameters"], factor * network["bytes per image"]
        fits = [f"{(USABLE * size * 1e9 - state) / image:,.0f}" for size in GPU_SIZES]
        parameters = f"{network['parameters'] / 1e6:,.1f}M"
        rows.append([f"`{name}`", parameters, f"{state / 1e9:.1f} GB", f"{image / 1e6:,.0f} MB", *fits])
    sizes = [f"images at once on {size} GB" for size in GPU_SIZES]
    return as_markdown(["preset", "parameters", "whatever the batch", "per image", *sizes], rows)


def bytes_table() -> str:
    """Return the bytes of each parameter in training."""
    counted = json.loads((RESULTS / "memory" / "cpu.json").read_text())["bytes per parameter"]
    rows = [[name, f"{value:g}"] for name, value in counted.items()]
    rows += [["flat gradients, which processes exchange", str(FLAT_GRADIENTS)], ["copies in bf16, by autocast", "2"]]
    total = sum(float(row[1]) for row in rows)
    limits = " / ".join(f"{size / total:.1f}" for size in GPU_SIZES)
    rows.append(
        [f"**together**: {' / '.join(map(str, GPU_SIZES))} GB are full at {limits} billion parameters", f"{total:g}"]
    )
    return as_markdown(["what", "bytes per parameter"], rows)


def put_between(text: str, name: str, table: str) -> str:
    """Replace what stands between the markers of this name."""
    begin, end = f"<!-- {name}: written by benchmarks/document_tables.py -->", f"<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the document must have the lines {begin} and {end} once: put them where the table belongs")
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"


def documents() -> dict[Path, dict[str, str]]:
    """Return the tables of each document, by name."""
    found = {
        ROOT / "README.md": {"results": results_table(), "samplers": samplers_table()},
        ROOT / "docs" / "choosing.md": {"costs": costs_table()},
        ROOT / "docs" / "noise.md": {"rates": rates_table(), "batches": results_table()},
        ROOT / "docs" / "performance.md": {
            "speeds": speeds_table(),
            "scaling inputs": inputs_table(),
            "weak scaling": scaling_table(),
            "strong scaling": scaling_table(STRONG_BATCH),
        },
        ROOT / "docs" / "several_gpus.md": {"bytes": bytes_table(), "memory": memory_table()},
    }
    for page, arms in MEASURED.items():
        found[ROOT / "docs" / "methods" / f"{page}.md"] = {"measured": measured_table(arms)}
    return found


def with_tables(text: str, tables: dict[str, str]) -> str:
    """Return a document with its tables as they are now."""
    for name, table in tables.items():
        text = put_between(text, name, table)
    return text


if __name__ == "__main__":
    for document, tables in documents().items():
        document.write_text(with_tables(document.read_text(), tables))
