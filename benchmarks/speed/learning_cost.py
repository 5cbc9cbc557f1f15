"""What samplers that learn cost per training step, beside uniform, through the trainer, in one run.

    python benchmarks/speed/learning_cost.py  # digits, on a CPU
    python benchmarks/speed/learning_cost.py --preset cifar10-ddpm --speed=graph --data.path=cifar10.npz  # its U-Net

Each sampler trains a network of its own. They take turns of 40 steps, which hold one probe of those that probe, in
another order in every round; ratios are of a turn to uniform's turn in the same round, geometric means ± 1.96
standard errors, after the turns in which probes are recorded. A second uniform says how much of it is noise.
`LeastNoise` probes ever more rarely: what it costs follows from an arm with a probe in every step. The first probes
of a process, which are not replayed yet, are timed one by one.
"""

import argparse
import platform
import statistics
from collections.abc import Callable
from unittest.mock import patch

import torch
from side_by_side import TURNS_TO_SETTLE, Turn, ratio_of_speeds, seconds_of, take_turns

from kairostep.experiments import build, preset
from kairostep.experiments.config import with_overrides
from kairostep.timesteps import LeastNoise, least_noise
from kairostep.training.assembly import make_accelerator, make_batches, make_trainer
from kairostep.training.trainer import Trainer

STEPS_PER_TURN = 40
PROBING = "least_noise, probing"
NUM_FIRST = 8  # probes timed one by one: three run eagerly, one is recorded, the rest are replayed
ARMS: dict[str, tuple[str, ...]] = {
    "uniform": ("--sampler=uniform",),
    "uniform again": ("--sampler=uniform",),
    "root_loss": ("--sampler=root_loss",),
    "root_loss, pairs": ("--sampler=root_loss", "--pairs=true"),
    "infonoise": ("--sampler=infonoise",),
    PROBING: ("--sampler=least_noise",),
    "adaptive": ("--sampler=adaptive",),
    "adaptive, one pair": ("--sampler=adaptive", "--sampler.policy=pair"),
    "adaptive, all T, all x0": ("--sampler=adaptive", "--sampler.sweep=1000", "--sampler.reward_rows=128"),
}


def prepare(name: str, settings: list[str]) -> tuple[Trainer, Callable[[], None]]:
    """Return the trainer of an arm, and what takes a step."""
    config = with_overrides(preset(name), [*settings, "--held_out_images=0"])
    accelerator = make_accelerator(config)
    experiment = build(config, accelerator.device)
    trainer = make_trainer(experiment, accelerator)
    batches = make_batches(experiment, accelerator).from_step(0)

    return trainer, lambda: trainer.step([next(batches)])


def turn_of(trainer: Trainer, step: Callable[[], None], num_steps: int = STEPS_PER_TURN) -> Turn:
    """Return a turn of so many steps, each with a probe if the sampler is `LeastNoise`."""

    def turn() -> None:
        for _ in range(num_steps):
            step()

    def probing_turn() -> None:
        with patch.object(least_noise, "probe_number", lambda step, warmup: step if step >= warmup else None):
            turn()

    return probing_turn if isinstance(trainer.sampler, LeastNoise) else turn


def seconds_of_first_probes(trainer: Trainer, step: Callable[[], None], device: torch.device) -> list[float]:
    """Return what each of the first probes of a process takes, beyond a step without one."""
    for _ in range(LeastNoise().warmup):  # steps are recorded in it, and no step has a probe
        step()
    plain = statistics.median(seconds_of(step, device) for _ in range(NUM_FIRST))
    probing = turn_of(trainer, step, num_steps=1)
    return [seconds_of(probing, device) - plain for _ in range(NUM_FIRST)]


def share_of_probes(num_steps: int) -> float:
    """Return the share of steps in which `LeastNoise` probes."""
    warmup = LeastNoise().warmup
    return sum(least_noise.probe_number(step, warmup) is not None for step in range(num_steps)) / num_steps


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--arms", default=";".join(ARMS), help="separated by ;")
    arguments, settings = parser.parse_known_args()
    chosen = {name: ARMS[name] for name in arguments.arms.split(";")}
    trained = {name: prepare(arguments.preset, [*settings, *arm]) for name, arm in chosen.items()}
    trainers = {name: trainer for name, (trainer, _) in trained.items()}
    device = trainers["uniform"].accelerator.device
    first = seconds_of_first_probes(*trained[PROBING], device) if PROBING in trained else []
    turns = {name: turn_of(*each) for name, each in trained.items()}
    seconds = take_turns(turns, arguments.rounds, device, warm_up=TURNS_TO_SETTLE)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    num_parameters = sum(p.numel() for p in trainers["uniform"].network.parameters()) / 1e6
    print(
        f"{arguments.preset} {' '.join(s for s in settings if 'path' not in s)}: U-Net of {num_parameters:.1f}M, "
        f"torch {torch.__version__}, {where}, {arguments.rounds} rounds\n"
    )
    print(f"{'sampler':23} {'ms per step':>11}   {'x uniform (95 %)':24} {'probe evaluations per step':>26}")
    for name, taken in seconds.items():
        sampler, num_steps = trainers[name].sampler, trainers[name].step_number
        probes = float(sampler.diagnostics().get("probe_evaluations", 0)) / num_steps
        milliseconds = 1e3 * statistics.median(taken) / STEPS_PER_TURN
        print(
            f"{name:23} {milliseconds:11.2f}   {ratio_of_speeds(taken, seconds['uniform'], digits=4):24} {probes:26.1f}"
        )
    if first:
        plain = statistics.median(seconds["uniform"]) / STEPS_PER_TURN
        probing = statistics.median(seconds[PROBING]) / STEPS_PER_TURN - plain
        beyond = sum(first) - NUM_FIRST * probing  # what the first probes cost more than later ones
        runs = (1000, 3000, 10_000)
        shares = {num: (probing * num * share_of_probes(num), plain * num) for num in runs}
        later = (f"{probes / run:.2%} in {num:,} steps" for num, (probes, run) in shares.items())
        whole = (f"{(probes + beyond) / run:.2%}" for probes, run in shares.values())
        print(f"\nFirst probes of least_noise in a process, ms: {', '.join(f'{1e3 * each:.1f}' for each in first)}")
        print(f"Probes, of the time of a run: {', '.join(later)}; with the first ones as timed {', '.join(whole)}")


if __name__ == "__main__":
    main()
