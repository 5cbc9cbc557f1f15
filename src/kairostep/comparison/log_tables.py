"""Markdown tables of the logs of a study: each arm against uniform draws, paired by seed."""

from collections.abc import Callable, Sequence
from pathlib import Path

from kairostep.comparison.logs import BASE, Log, Logs, read_logs
from kairostep.files import whole_file
from kairostep.seed_statistics import PairedRatio, Ratio, cost_ratio

MARKERS = ("<!-- tables: written by kairostep compare --table -->", "<!-- end of tables -->")
NOTE = """Uniform's row has values, by seed; other rows have ratios to uniform of the same seed: geometric mean over
seeds, 95 % t-interval in parentheses, each seed in brackets. Under 1 is better.

- ε-MSE: squared error of the noise on held-out images over uniform t; VLB: variational bound on them in bits per
  dimension. Both are of averaged weights, with the same noise and times for all arms. FID: by seed, not as a ratio.
- wall-clock and evaluations to uniform's value: what an arm had spent when it first had uniform's final value, over
  what uniform had; between checkpoints linear in log(loss). `>`: it did not get there with what it spent.
- Wall-clock is steps times the seconds per step after the first checkpoint: start-up is left out, probes are not. It
  is compared within one commit alone: loops get faster from one to the next.
  Evaluations of the network count alike in training and in probes, though these have no backward pass."""

Measurement = Callable[[Log], float]
MEASUREMENTS: dict[str, Measurement] = {
    "ε-MSE": lambda log: log.final("epsilon_mse"),
    "VLB": lambda log: float(log.end["bits_per_dim"][0]),
    "ε-MSE, t < 0.05": lambda log: float(log.end["epsilon_mse_by_t"][0]),
    "ε-MSE, t > 0.95": lambda log: float(log.end["epsilon_mse_by_t"][-1]),
    "seconds per step": lambda log: log.seconds_per_step,
}
COSTS: dict[str, tuple[str, str]] = {
    "wall-clock to uniform's ε-MSE": ("epsilon_mse", "seconds"),
    "evaluations to uniform's ε-MSE": ("epsilon_mse", "evaluations"),
    "wall-clock to uniform's VLB": ("bits_per_dim", "seconds"),
    "evaluations to uniform's VLB": ("bits_per_dim", "evaluations"),
}
QUALITY = ("ε-MSE", "VLB", "ε-MSE, t < 0.05", "ε-MSE, t > 0.95", "FID")
COST = ("seconds per step", *COSTS)
TIMED = {"seconds per step", *(column for column in COSTS if column.startswith("wall-clock"))}
SHORT = ("ε-MSE", "VLB", "FID", "wall-clock to uniform's ε-MSE", "evaluations to uniform's ε-MSE")


def summary(ratios: Sequence[Ratio], *, seeds: bool = True) -> str:
    """Return the geometric mean, its interval and, if `seeds`, the ratio of each seed."""
    if len(ratios) == 1:
        return f"{ratios[0]} (one seed)"
    paired = PairedRatio(dict(enumerate(ratios)))
    listed = f" [{', '.join(map(str, ratios))}]" if seeds else ""
    if paired.interval is None:  # some did not reach it: their true ratio is larger
        return f"> {paired.mean:.3f} ({paired.num_reached} of {len(ratios)} reached it){listed}"
    low, high = paired.interval
    return f"{paired.mean:.3f} ({low:.3f}, {high:.3f}){listed}"


def cell(column: str, pairs: Sequence[tuple[Log, Log]], *, seeds: bool) -> str:
    """Return the cell of an arm, from pairs of its log and uniform's log of the same seed."""
    if column == "FID":
        return fid_cell([log for log, _ in pairs])
    if column in TIMED:
        pairs = [(log, base) for log, base in pairs if log.where.get("commit") == base.where.get("commit")]
    if not pairs:
        return "-"
    if column not in COSTS:
        measured = MEASUREMENTS[column]
        return summary([Ratio(measured(log) / measured(base)) for log, base in pairs], seeds=seeds)
    key, cost = COSTS[column]
    found = [cost_ratio(log.curve(key, cost), base.curve(key, cost), base.final(key)) for log, base in pairs]
    return summary([ratio for ratio in found if ratio is not None], seeds=seeds)


def base_cell(column: str, logs: Sequence[Log]) -> str:
    """Return uniform's cell: values by seed, and 1 for costs."""
    if column == "FID":
        return fid_cell(logs)
    return "1" if column in COSTS else ", ".join(f"{MEASUREMENTS[column](log):.4g}" for log in logs)


def fid_cell(logs: Sequence[Log]) -> str:
    """Return the FID of each run, a dash for runs without."""
    found = [f"{log.end['fid'][0]:.2f}" if "fid" in log.end else "-" for log in logs]
    return "-" if set(found) == {"-"} else ", ".join(found)


def markdown(arms: dict[str, Logs], columns: Sequence[str], *, seeds: bool = True) -> str:
    """Return one table with a row per arm. An arm that shares no seed with uniform is left out."""
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


def provenance_table(arms: dict[str, Logs]) -> str:
    """Return a table of where the runs were made: a row for each command, device and commit."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for arm, logs in sorted(arms.items()):
        for seed, log in sorted(logs.items()):
            where = log.where
            key = (f"`{where['command']}`", f"{where['device']}, torch {where['torch']}", _short(where["commit"]))
            groups.setdefault(key, []).append(f"{arm} {seed}")
    rows = [[", ".join(runs), *key] for key, runs in groups.items()]
    return as_markdown(["runs (arm, seed)", "command", "device", "commit"], rows)


def _short(commit: str | None) -> str:
    return "unknown" if commit is None else commit[:7] + commit[40:]


def tables(folder: Path) -> tuple[str, str]:
    """Return the full tables of the logs in a folder, and the short tables."""
    long, brief = [NOTE], list[str]()
    tasks = read_logs(folder)
    if not tasks:
        raise ValueError(f"there must be logs of {BASE} to compare with, got none in {folder}: run that arm first")
    for task, arms in tasks.items():
        steps = next(iter(arms[BASE].values())).checkpoints[-1]["step"]
        title = f"{task}, {steps} steps"
        long += [f"## {title}", markdown(arms, QUALITY), markdown(arms, COST), provenance_table(arms)]
        brief += [f"**{title}**", markdown(arms, SHORT, seeds=False)]
    return "\n\n".join(long), "\n\n".join(brief)


def write_tables(folder: Path) -> str:
    """Return the short tables, and write the tables into READMEs that have the markers for them.

    README.md beside the logs gets the full tables, README.md in the folder above gets the short ones.
    """
    long, brief = tables(folder)
    for path, text in ((folder / "README.md", long), (folder.parent / "README.md", brief)):
        if path.is_file() and MARKERS[0] in path.read_text():
            put(path, text)
    return brief


def put(path: Path, text: str) -> None:
    """Write the text between the markers of a file."""
    whole = path.read_text()
    if whole.count(MARKERS[0]) != 1 or whole.count(MARKERS[1]) != 1:
        raise ValueError(f"{path} must have the lines {MARKERS[0]} and {MARKERS[1]} once: put them where tables belong")
    before, rest = whole.split(MARKERS[0])
    after = rest.split(MARKERS[1])[1]
    with whole_file(path) as temporary:
        temporary.write_text(f"{before}{MARKERS[0]}\n\n{text}\n\n{MARKERS[1]}{after}")
