"""The table of results: each seed, the mean and spread of each arm, and the cost to reach the baseline's quality."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kairostep.reports.arms import Arm, ShownRun, same_task
from kairostep.reports.rounding import MISSING, count_text, seconds, with_error
from kairostep.reports.target import Cost, is_paired, paired_ratio_to, partner, ratio_to
from kairostep.runs.history import RunHistory
from kairostep.runs.metrics import number
from kairostep.seed_statistics import ratio_text, spread_of

HOW_TO_READ = (
    "Every run with its last held-out figures ± standard error over images, and each arm's mean ± standard deviation "
    "over seeds."
)
HOW_TO_COMPARE = "A ratio to target below 1 says that a run gets to the baseline's final held-out loss for less."
RATIOS: dict[str, Cost] = {"seconds to target, ratio": "seconds", "evaluations to target, ratio": "evaluations"}
MEASURED = {"fid": "FID", "kid": "KID", "precision": "precision", "recall": "recall", "vlb_bits_per_dim": "bits/dim"}


@dataclass(frozen=True)
class Column:
    """A heading, and functions that return the cells of a run and of an arm."""

    title: str
    of_run: Callable[[RunHistory], str]
    of_arm: Callable[[Sequence[RunHistory]], str]
    text: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kind: str  # single, mean or seed
    group: str
    cells: list[str]
    settings: str  # of the run or the arm, for a tooltip
    note: str = ""  # beside the name


@dataclass(frozen=True)
class ArmRows:
    """The lines of one arm."""

    arm: str
    rows: list[Row]


@dataclass(frozen=True)
class Table:
    """What the page shows as a table."""

    columns: list[Column]
    blocks: list[ArmRows]
    notes: list[str]
    how_to_read: str


def results_table(arms: Sequence[Arm]) -> Table:
    """Return the table of all arms."""
    baseline = next(arm for arm in arms if arm.baseline)
    histories = [run.history for arm in arms for run in arm.runs]
    is_weighted = any(run.last is not None and run.last.is_weighted for run in histories)
    columns = [
        _held_out("held-out loss", "loss"),
        *([_held_out("weighted held-out loss", "weighted_loss")] if is_weighted else []),
        *(_ratio(title, baseline, cost) for title, cost in RATIOS.items() if len(arms) > 1),
        _held_out("held-out bound", "vlb"),
        *(_quality(what, title) for what, title in MEASURED.items() if any(run.measured(what) for run in histories)),
        _spent("seconds", "seconds", seconds),
        _spent("training evaluations", "training_evaluations", count_text),
    ]
    if any(run.spent("probe_evaluations") for run in histories):
        columns.append(_spent("probe evaluations", "probe_evaluations", count_text))
    if any(run.state != "finished" for run in histories):
        columns.append(Column("state", lambda run: run.state, lambda runs: "", text=True))
    head = Column("run", lambda run: "", lambda runs: "", text=True)
    blocks = [_block(arm, columns, alone=len(arms) == 1) for arm in arms]
    if len(arms) == 1:
        return Table([head, *columns], blocks, [], HOW_TO_READ)
    return Table([head, *columns], blocks, _notes(arms, baseline), f"{HOW_TO_READ} {HOW_TO_COMPARE}")


def _block(arm: Arm, columns: Sequence[Column], *, alone: bool) -> ArmRows:
    notes = ["baseline"] if arm.baseline and not alone else []
    if len(arm.runs) == 1:
        return ArmRows(arm.name, [_row("single", arm.runs[0], columns, *notes)])
    histories = [run.history for run in arm.runs]
    cells = [arm.name, *(column.of_arm(histories) for column in columns)]
    mean = Row("mean", "", cells, arm.settings, f"({', '.join([*notes, f'mean of {len(arm.runs)}'])})")
    return ArmRows(arm.name, [mean, *(_row("seed", run, columns) for run in arm.runs)])


def _row(kind: str, run: ShownRun, columns: Sequence[Column], note: str = "") -> Row:
    cells = [run.name, *(column.of_run(run.history) for column in columns)]
    return Row(kind, run.key, cells, run.settings, f"({note})" if note else "")


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return MISSING
    spread = spread_of(known)
    return with_error(spread.mean, spread.deviation)


def _held_out(title: str, name: str) -> Column:
    def value(run: RunHistory) -> float | None:
        return getattr(run.last, name) if run.last else None

    def cell(run: RunHistory) -> str:
        return with_error(value(run), getattr(run.last, f"{name}_error") if run.last else None)

    return Column(title, cell, lambda runs: _mean([value(run) for run in runs]))


def _spent(title: str, name: str, text: Callable[[float | None], str]) -> Column:
    def mean(runs: Sequence[RunHistory]) -> str:
        known = [value for run in runs if (value := run.spent(name)) is not None]
        return text(spread_of(known).mean) if known else MISSING

    return Column(title, lambda run: text(run.spent(name)), mean)


def _ratio(title: str, baseline: Arm, cost: Cost) -> Column:
    def cell(run: RunHistory) -> str:
        ratio = ratio_to(run, baseline, cost)
        return MISSING if ratio is None else str(ratio)

    def mean(runs: Sequence[RunHistory]) -> str:
        ratio = paired_ratio_to(runs, baseline, cost)
        return MISSING if ratio is None else ratio_text(ratio)

    return Column(title, cell, mean)


def _quality(what: str, title: str) -> Column:
    def value(run: RunHistory) -> float | None:
        return number((run.measured(what) or {}).get("value"))

    def cell(run: RunHistory) -> str:
        return with_error(value(run), number((run.measured(what) or {}).get("standard_error")))

    return Column(title, cell, lambda runs: _mean([value(run) for run in runs]))


def _notes(arms: Sequence[Arm], baseline: Arm) -> list[str]:
    notes = [
        f"Target: the last held-out loss of {baseline.name}, paired by seed; the loss is interpolated in its logarithm "
        "between measurements, probes count as evaluations, and “>” means that the run ended before it got there. "
        "Seconds leave out the start of a run. Means of ratios are geometric, with the 95 % interval of Student's t of "
        "their logarithms; runs that have not finished are left out."
    ]
    others = [arm.name for arm in arms if not same_task(arm.first, baseline.first)]
    if others:
        notes.append(
            f"Not compared, because data, process or prediction differ from the baseline's: {', '.join(others)}."
        )
    unpaired = [arm.name for arm in arms if arm.name not in others and not is_paired(arm, baseline)]
    if unpaired:
        notes.append(f"Not compared where the baseline lacks their seeds: {', '.join(unpaired)}.")
    elsewhere = [arm.name for arm in arms if _is_elsewhere(arm, baseline)]
    if elsewhere:
        notes.append(f"No ratio of seconds where device or commit differ from the baseline's: {', '.join(elsewhere)}.")
    return notes


def _is_elsewhere(arm: Arm, baseline: Arm) -> bool:
    """Whether the seconds of any run do not compare with the baseline's."""
    pairs = [(run.history, partner(run.history, baseline)) for run in arm.runs]
    return any(other is not None and run.place != other.place for run, other in pairs)
