"""The plan in the folder of a comparison: written, read, and taken up by a later command."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from kairostep.bounded_files import Unreadable, read_yaml
from kairostep.comparison.arms import Arm
from kairostep.comparison.plan import FALLING, NAME, UNWEIGHTED, Plan, check_shared, has_setting, stored_settings
from kairostep.experiments import Config
from kairostep.experiments.config import UNSET, from_dict
from kairostep.files import whole_file
from kairostep.registry import unknown

DATA_PLACES = ("data.path", "data.folder")


def read_plan(output: Path) -> Plan:
    """Return the plan of a comparison that was begun. Raise ValueError if there is none."""
    path = output / NAME
    try:
        raw = read_yaml(path)
        arms = [Arm(name, tuple(settings)) for name, settings in raw["arms"].items()]
        configs = {name: from_dict(config) for name, config in raw["configs"].items()}
        seeds, rates, choose_by = tuple(raw["seeds"]), tuple(raw["learning_rates"]), raw.get("choose_by", UNWEIGHTED)
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
    rates = _rates_of(before, plan, [*there.values()])
    choose_by = choose_by or before.choose_by
    if choose_by != before.choose_by and len(before.rates) > 1:
        raise _refusal(plan, [f"choose_by: {before.choose_by} -> {choose_by}"])
    return replace(plan, arms=list(there.values()), configs=configs, seeds=seeds, rates=rates, choose_by=choose_by)


def _rates_of(before: Plan, plan: Plan, arms: Sequence[Arm]) -> tuple[float, ...]:
    """Return the rates of both plans. If the folder had no list of rates, the one rate of its settings joins."""
    rates = {*before.rates, *plan.rates}
    if not rates:
        return ()
    own = [arm.name for arm in arms if has_setting(arm.settings, "learning_rate")]
    if own:
        raise ValueError(
            f"with --learning_rates no arm may set its own, got arm {own[0]} in {plan.output}: leave --learning_rates "
            "out, or pass another --output"
        )
    if not before.rates:
        rates |= {config.learning_rate for config in before.configs.values()}
    return tuple(sorted(rates))


def _changes(old: Config, new: Config) -> list[str]:
    """Return `key: old -> new` for each setting that differs, except places."""
    before, after = _flat(stored_settings(old)), _flat(stored_settings(new))
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
