"""What the adaptive sampler measures before and after a step: how often, at which timesteps, on which rows."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kairostep.checks import choice, count
from kairostep.counters import mix_seed
from kairostep.ranks import rank, spread_rows, world_size
from kairostep.timesteps.representation import represent
from kairostep.timesteps.selection import DropQueue, SelectionRule, f_statistic

DEFAULT_REWARD_ROWS = 64
SWEPT_ROWS = 1  # what a seed is for
DEFAULT_SWEEP = 128  # selects as well as all 1000 do: results/selection_quality


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Probing:
    """What `Adaptive` measures around a training step, how often, and how draws are paid for it.

    A probe evaluates the loss before and after the optimizer's step, with the same noise: `reward_rows` rows at the
    `num_selected` timesteps that pay, and one loss at each timestep of the sweep, which selects those that pay next.
    It costs 2 (num_selected * reward_rows + sweep) network evaluations.

    Args:
        every: Training steps from one probe to the next.
        sweep: Timesteps in the sweep. Default: 128, or all if there are fewer. The paper sweeps all.
        sweep_x0: Rows that share the sweep. The rank that has a row evaluates its part: more rows share the cost out
            between ranks. Default: 1, as in the paper.
        reward_rows: Rows of the batch, over all ranks, that are rewarded. Default: 64. The paper rewards all.
        num_selected: Timesteps at which rows are rewarded, |S| in the paper.
        queue_size: Sweeps that the selection looks back on, |Q| in the paper.
        rule: Scores timesteps by how well they explain the whole objective; see `SelectionRule`.
        credit: "sample" pays each draw for the drop on its own row. "batch" pays all draws for the mean drop, compared
            with a running mean. That is slower, but it also sees what a step does for other rows, and it alone can
            learn from batches of one row.
        standardised: With "sample", subtract the mean of the batch's rewards and divide by their spread. False pays
            the drop as it is, as the paper writes it, with either credit.
    """

    every: int = 40
    sweep: int | None = None
    sweep_x0: int | None = None
    reward_rows: int | None = None
    num_selected: int = 3
    queue_size: int = 20
    rule: SelectionRule = f_statistic
    credit: str = "sample"
    standardised: bool = True

    def __repr__(self) -> str:
        return represent(self)

    def __post_init__(self) -> None:
        """Check every option."""
        count("num_selected", self.num_selected, at_most=10**5)
        count("queue_size", self.queue_size, at_least=3, at_most=10**5, example=20)
        count("every", self.every, example=40)
        if self.sweep_x0 is not None:
            count("sweep_x0", self.sweep_x0, at_most=10**6)
        if self.reward_rows is not None:
            count("reward_rows", self.reward_rows, at_most=10**6, example=64)
        choice("credit", self.credit, ("sample", "batch"))


PROBING_OPTIONS = tuple(field.name for field in fields(Probing))


def check_probing(probing: Probing, moved: dict[str, Any]) -> None:
    """Raise unless `probing` is a `Probing`, and for keywords that `Adaptive` does not take or takes no longer."""
    if not isinstance(probing, Probing):
        raise ValueError(f"probing must be a Probing, got {probing!r}: pass for instance ks.Probing(every=40)")
    for name, value in moved.items():
        if name in PROBING_OPTIONS:
            raise TypeError(
                f"{name} is an option of Probing, got Adaptive({name}={value!r}): "
                f"pass Adaptive(..., probing=ks.Probing({name}={value!r}))"
            )
        raise TypeError(f"Adaptive.__init__() got an unexpected keyword argument {name!r}")


@dataclass(frozen=True, slots=True)
class Probe:
    """Where to evaluate the loss before and after a step: first the sweep, then the paid rows at each selected time."""

    rows: Tensor  # (n + |S| R,) of the batch
    t: Tensor  # (n + |S| R,)
    paid: Tensor  # (R,) the rows that are rewarded
    swept: Tensor  # (n,) this rank's positions in the sweep


def plan_probe(queue: DropQueue, num_rows: int, num_paid: int, sweep_x0: int, seed: int, update: int) -> Probe:
    """Return what this rank evaluates: of the whole batch's swept and paid rows those that it holds, maybe none.

    Args:
        queue: Holds the timesteps of the sweep and the selected ones.
        num_rows: Rows of this rank's batch.
        num_paid: Rows that are rewarded, over all ranks.
        sweep_x0: As in `Probing`.
        seed: Picks the swept rows.
        update: Number of this probe, which the picked rows depend on as well.
    """
    num_swept, device = len(queue.sweep_t), queue.sweep_t.device
    held = own_swept_rows(num_rows, min(sweep_x0, num_swept), seed, update)
    dealt = {part: torch.arange(part, num_swept, sweep_x0, device=device) for part in held}
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    swept = torch.cat([nothing, *dealt.values()])
    sweep_rows = torch.cat([nothing, *(torch.full_like(dealt[part], row) for part, row in held.items())])
    paid = spread_rows(num_paid, num_rows, device)  # (R,)
    return Probe(
        rows=torch.cat([sweep_rows, paid.repeat(len(queue.selected))]),
        t=torch.cat([queue.sweep_t[swept], queue.sweep_t[queue.selected].repeat_interleave(len(paid))]),
        paid=paid,
        swept=swept,
    )


def own_swept_rows(num_rows: int, num_parts: int, seed: int, update: int) -> dict[int, int]:
    """Return the swept rows that this rank holds, by the number of their part, one from each equal part of the batch.

    Whole numbers on the host, so that all ranks agree to the last bit and nothing waits for the device.
    """
    rows, denominator = {}, num_parts << 31
    for part in range(num_parts):
        place = (part << 31) + (
            mix_seed(seed, SWEPT_ROWS, update, part) >> 33
        )  # in the whole batch, over `denominator`
        if place * world_size() // denominator == rank():
            rows[part] = place * (num_rows * world_size()) // denominator - rank() * num_rows
    return rows
