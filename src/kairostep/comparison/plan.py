"""The plan of a comparison: its runs, their directories, and checks that they can be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kairostep.comparison.arms import Arm
from kairostep.experiments import Config, preset
from kairostep.experiments.command_line import settle
from kairostep.experiments.config import to_dict, with_overrides
from kairostep.experiments.experiment import check, make_objective, resolve
from kairostep.registry import unknown

NAME = "comparison.yaml"
NUM_MEASUREMENTS = 20  # of the held-out loss in a run, unless evaluate_every is set
# Settings that all arms must share to be paired: data, initial weights and measurements
SHARED = (
    *("data", "autoencoder", "network", "initial_weights", "label_dropout", "process", "prediction"),
    *("held_out_images", "sample_steps"),
    *("fid_every", "fid_images", "inception", "inception_sha256", "features", "precision", "deterministic", "trackers"),
)
PER_RUN = {  # set by the comparison: what to do instead
    "seed": "pass --seeds, such as --seeds 0,1,2 or --seeds 7,",
    "output": "pass --output of the comparison on the command line",
    "resume": "leave it out, the same command goes on",
}
PLACES = ("output", "resume", "cache", "workers", "seed", "inception", "trackers")  # may change between calls
DATA = "data.sha256"  # fingerprint of the data that the runs of a comparison share
DIVERGED = "diverged.json"  # in the directory of a run that was given up
UNWEIGHTED, WEIGHTED = "loss", "weighted_loss"  # held-out losses
FALLING = (UNWEIGHTED, WEIGHTED, "bound", "fid", "kid")  # less is better: these can be reached, and choose rates


@dataclass(frozen=True)
class PlannedRun:
    """An arm with a seed and a learning rate."""

    arm: str
    seed: int
    rate: float
    config: Config  # with its output directory

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(str(self.config.output))

    @property
    def comparison(self) -> Path:
        """The folder of the comparison."""
        return self.directory.parents[3]  # runs/ARM/rate-RATE/seed-SEED

    @property
    def name(self) -> str:
        """Its name in lists."""
        return f"{self.arm}/seed-{self.seed}"

    @property
    def finished(self) -> bool:
        """Whether all files are on disk. The last samples are written after everything else."""
        return (self.directory / "samples" / f"step-{self.config.steps:08d}.png").is_file()

    @property
    def diverged(self) -> bool:
        """Whether its loss was no longer finite, so that it was given up."""
        return (self.directory / DIVERGED).is_file()


@dataclass(frozen=True)
class Plan:
    """A comparison: arms and their baseline on one task."""

    output: Path
    arms: list[Arm]
    baseline: str
    seeds: tuple[int, ...]
    rates: tuple[float, ...]  # to try; none: one for all arms, that of the settings
    configs: Mapping[str, Config]  # by arm, with every default filled in and seed 0
    choose_by: str = UNWEIGHTED  # the metric by whose end on the first seed an arm gets its rate

    def runs(self, arm: str, seed: int) -> list[PlannedRun]:
        """Return the runs of an arm and a seed, one for each rate."""
        return [self.run(arm, seed, rate) for rate in self.rates or (self.configs[arm].learning_rate,)]

    def run(self, arm: str, seed: int, rate: float) -> PlannedRun:
        """Return the run of an arm, a seed and a rate."""
        folder = self.output / "runs" / arm / f"rate-{rate:g}" / f"seed-{seed}"
        config = replace(self.configs[arm], seed=seed, learning_rate=rate, output=str(folder))
        return PlannedRun(arm, seed, rate, config)

    @property
    def names(self) -> list[str]:
        """The arms, the baseline first."""
        return [self.baseline, *(arm.name for arm in self.arms if arm.name != self.baseline)]

    @property
    def record(self) -> dict[str, Any]:
        """What is stored on disk: enough to read the runs without the command that made them."""
        return {
            "baseline": self.baseline,
            "seeds": list(self.seeds),
            "learning_rates": list(self.rates),
            "choose_by": self.choose_by,
            "arms": {arm.name: list(arm.settings) for arm in self.arms},
            "configs": {name: stored_settings(config) for name, config in self.configs.items()},
        }


def stored_settings(config: Config) -> dict[str, Any]:
    """Return the settings that a later command must share: all but places."""
    return {key: value for key, value in to_dict(config).items() if key not in PLACES}


def make_plan(
    output: Path,
    base: str | Config,
    arms: Sequence[Arm],
    settings: Sequence[str],
    *,
    seeds: Sequence[int],
    rates: Sequence[float] = (),
    baseline: str | None = None,
) -> Plan:
    """Return the plan of a comparison.

    Args:
        output: The folder of the comparison.
        base: The name of a preset, or a config.
        arms: What is compared.
        settings: Shared by all arms.
        seeds: Of each arm.
        rates: Learning rates to choose from for each arm.
        baseline: The arm that the others are compared with. Default: the first.

    Raises:
        ValueError: An arm cannot be trained, or arms cannot be compared.
    """
    check_arms(arms)
    _check_per_run(settings, "the settings")
    baseline = arms[0].name if baseline is None else baseline
    if baseline not in [arm.name for arm in arms]:
        raise ValueError(f"the baseline must be one of the arms: {unknown('arm', baseline, [a.name for a in arms])}")
    configs = {arm.name: config_of(base, arm, settings) for arm in arms}
    check_shared(configs, baseline)
    if rates and any(has_setting(arm.settings, "learning_rate") for arm in arms):
        raise ValueError(
            "the rate of an arm is one of --learning_rates, got an arm with its own: leave one of them out"
        )
    first, *others = configs.values()
    one_weighting = all(config.weighting == first.weighting for config in others)
    choose_by = WEIGHTED if one_weighting and is_weighted(first) else UNWEIGHTED
    return Plan(output, list(arms), baseline, tuple(seeds), tuple(rates), configs, choose_by)


def check_arms(arms: Sequence[Arm]) -> None:
    """Raise ValueError unless there are at least two arms, with different names."""
    names = [arm.name for arm in arms]
    if len(arms) < 2:
        raise ValueError(f"a comparison needs two arms or more, got {names or 'none'}: pass --arms uniform,root_loss")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"each arm must have a name of its own, got {twice[0]!r} twice: name them in a YAML file")
    for arm in arms:
        _check_per_run(arm.settings, f"arm {arm.name}")


def _check_per_run(settings: Sequence[str], where: str) -> None:
    for key, fix in PER_RUN.items():
        if has_setting(settings, key):
            raise ValueError(f"the comparison sets --{key} of each run, got it in {where}: {fix}")


def has_setting(settings: Sequence[str], key: str) -> bool:
    """Whether settings such as `--key=value` have one of this key."""
    return any(word.partition("=")[0].replace("-", "_") == f"__{key}" for word in settings)


def config_of(base: str | Config, arm: Arm, settings: Sequence[str]) -> Config:
    """Return the config of an arm with all defaults filled in, and with frequent measurements."""
    changes = [*settings, *arm.settings]
    try:
        whole = preset(base) if isinstance(base, str) else base
        config = with_overrides(replace(whole, sample_every=0, keep_checkpoints=1, output=None, seed=0), changes)
        chosen = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in changes}
        every = -(-config.steps // NUM_MEASUREMENTS)
        often = {key: every for key in ("evaluate_every", "log_every") if key not in chosen}
        config = replace(config, **often)  # type: ignore[arg-type]
        if isinstance(base, str):
            config = settle(config, changes)
        config, objective = make_objective(resolve(config))
        check(config, objective.process, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return config
    except ValueError as error:
        raise ValueError(f"{error} (in arm {arm.name})") from error


def is_weighted(config: Config) -> bool:
    """Return whether a run trains another loss than the squared error of its prediction."""
    return make_objective(config)[1].is_weighted()


def check_shared(configs: Mapping[str, Config], baseline: str) -> None:
    """Raise ValueError for arms that cannot be compared, naming the difference, and for two equal arms."""
    first = to_dict(configs[baseline])
    for name, config in configs.items():
        own = to_dict(config)
        other = [key for key in SHARED if own[key] != first[key]]
        if other:
            key = other[0]
            raise ValueError(
                f"arms must share data, network, process and measurements to be compared, got {key} {own[key]} in arm "
                f"{name} and {first[key]} in {baseline}: pass --{key} for all arms, or compare them apart"
            )
    names = list(configs)
    for i, name in enumerate(names):
        for earlier in names[:i]:
            if to_dict(configs[name]) == to_dict(configs[earlier]):
                raise ValueError(f"arms must differ, got {earlier} and {name} with the same settings: leave one out")
