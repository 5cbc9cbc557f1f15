"""The plan of a comparison: its runs, their directories, and checks that they can be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from kairostep.bounded_files import Unreadable, read_yaml
from kairostep.comparison.arms import Arm
from kairostep.experiments import Config, preset
from kairostep.experiments.command_line import settle
from kairostep.experiments.config import UNSET, from_dict, to_dict, with_overrides
from kairostep.experiments.experiment import check, make_objective, resolve
from kairostep.files import whole_file
from kairostep.registry import unknown

NAME = "comparison.yaml"
NUM_MEASUREMENTS = 20  # of the held-out loss in a run, unless evaluate_every is set
# Settings that all arms must share to be paired: data, initial weights and measurements
SHARED = (
    *("data", "autoencoder", "network", "initial_weights", "label_dropout", "process", "prediction"),
    *("held_out_images", "sample_steps"),
    *("fid_every", "fid_images", "inception", "inception_sha256", "features", "precision", "deterministic", "trackers"),
)
PER_RUN = ("seed", "output", "resume")  # set by the comparison
PLACES = ("output", "resume", "cache", "workers", "seed", "inception", "trackers")  # may change between calls
DATA_PLACES = ("data.path", "data.folder")
DIVERGED = "diverged.json"  # in the directory of a run that was given up
FALLING = ("loss", "weighted_loss", "bound", "fid", "kid")  # less is better: these can be reached, and choose rates
MAIN, WEIGHTED = FALLING[:2]  # metrics of verdicts: the second where all arms share a weighting


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
    choose_by: str = MAIN  # the metric by whose end on the first seed an arm gets its rate

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
            "configs": {name: _stored_settings(config) for name, config in self.configs.items()},
        }


def _stored_settings(config: Config) -> dict[str, Any]:
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
    baseline = arms[0].name if baseline is None else baseline
    if baseline not in [arm.name for arm in arms]:
        raise ValueError(f"the baseline must be one of the arms: {unknown('arm', baseline, [a.name for a in arms])}")
    configs = {arm.name: config_of(base, arm, settings) for arm in arms}
    check_shared(configs, baseline)
    if rates and any(_sets(arm, "learning_rate") for arm in arms):
        raise ValueError(
            "the rate of an arm is one of --learning_rates, got an arm with its own: leave one of them out"
        )
    first, *others = configs.values()
    one_weighting = all(config.weighting == first.weighting for config in others)
    choose_by = WEIGHTED if one_weighting and is_weighted(first) else MAIN
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
        for key in PER_RUN:
            if _sets(arm, key):
                raise ValueError(f"--{key} is the same for all arms, got it in arm {arm.name}: pass it for all")


def _sets(arm: Arm, key: str) -> bool:
    return any(word.partition("=")[0].replace("-", "_") == f"__{key}" for word in arm.settings)


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


def read_plan(output: Path) -> Plan:
    """Return the plan of a comparison that was begun. Raise ValueError if there is none."""
    path = output / NAME
    try:
        raw = read_yaml(path)
        arms = [Arm(name, tuple(settings)) for name, settings in raw["arms"].items()]
        configs = {name: from_dict(config) for name, config in raw["configs"].items()}
        seeds, rates, choose_by = tuple(raw["seeds"]), tuple(raw["learning_rates"]), raw.get("choose_by", MAIN)
        if choose_by not in FALLING:
            raise ValueError(unknown("metric", str(choose_by), FALLING))
        plan = Plan(output, arms, raw["baseline"], seeds, rates, configs, choose_by)
    except FileNotFoundError:
        raise ValueError(f"a comparison must hold {NAME}, got {output}: name what `kairostep compare` wrote") from None
    except (OSError, Unreadable, TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} must be what `kairostep compare` wrote, got {error}: put back a good copy") from error
    return plan


def take_up(plan: Plan, choose_by: str | None = None) -> Plan:
    """Return the plan together with what is in its folder; ValueError, with what differs, where they do not compare.

    Arms, seeds and rates may be added. Those that were there stay in the comparison.

    Args:
        plan: What the command says.
        choose_by: The metric by which it chooses rates; by default that of the folder, else that of the plan.
    """
    if not (plan.output / NAME).exists():
        if plan.output.is_dir() and any(path.name != ".lock" for path in plan.output.iterdir()):
            raise ValueError(
                f"a comparison must go to a folder of its own, got {plan.output} with other files in it: "
                "pass another --output"
            )
        return replace(plan, choose_by=choose_by or plan.choose_by)
    before = read_plan(plan.output)
    if before.baseline != plan.baseline:
        raise _refusal(plan, [f"baseline: {before.baseline} -> {plan.baseline}"])
    old, new = before.configs[plan.baseline], plan.configs[plan.baseline]
    changed = _changes(old, new)
    if changed:
        raise _refusal(plan, changed)
    for name in before.configs.keys() & plan.configs.keys():
        if changed := _changes(before.configs[name], plan.configs[name]):
            raise _refusal(plan, [f"{name}, {change}" for change in changed])
    configs = {**before.configs, **plan.configs}
    check_shared(configs, plan.baseline)
    there = {arm.name: arm for arm in before.arms} | {arm.name: arm for arm in plan.arms}
    seeds = tuple(dict.fromkeys([*before.seeds, *plan.seeds]))
    rates = tuple(sorted({*before.rates, *plan.rates}))
    choose_by = choose_by or before.choose_by
    if choose_by != before.choose_by and len(before.rates) > 1:
        raise _refusal(plan, [f"choose_by: {before.choose_by} -> {choose_by}"])
    return replace(plan, arms=list(there.values()), configs=configs, seeds=seeds, rates=rates, choose_by=choose_by)


def _changes(old: Config, new: Config) -> list[str]:
    """Return `key: old -> new` for each setting that differs, except places."""
    before, after = _flat(_stored_settings(old)), _flat(_stored_settings(new))
    keys = [key for key in {**before, **after} if before.get(key, UNSET) != after.get(key, UNSET)]
    return [f"{key}: {before.get(key, UNSET)} -> {after.get(key, UNSET)}" for key in keys if key not in DATA_PLACES]


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted names; the name of a part is under the part itself."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        options = value if isinstance(value, dict) else {"name": value}
        flat |= {key if option == "name" else f"{key}.{option}": given for option, given in options.items()}
    return flat


def _refusal(plan: Plan, changed: Sequence[str]) -> ValueError:
    return ValueError(
        f"{plan.output} holds another comparison ({'; '.join(changed)}): pass the same settings to go on with it, or "
        "another --output"
    )


def write_plan(plan: Plan) -> None:
    """Write the plan, whole or not at all."""
    plan.output.mkdir(parents=True, exist_ok=True)
    with whole_file(plan.output / NAME) as temporary:
        temporary.write_text(yaml.safe_dump(plan.record, sort_keys=False))
