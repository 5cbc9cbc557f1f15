"""A config from presets, YAML and the command line, and back; whatever is wrong with it is told by name."""

import os
import threading
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from kairostep.experiments import PRESETS, Component, Config, preset
from kairostep.experiments.command_line import configure
from kairostep.experiments.config import LATER, NAMES, differences, from_dict, load, to_dict, with_overrides

PLAIN = Config()
ADAPTIVE = replace(PLAIN, sampler=Component("adaptive", {"floor": 0.2, "every": 10}))


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["--steps=7"], {"steps": 7}),
        (["--steps", "7"], {"steps": 7}),
        (["--steps=100_000"], {"steps": 100_000}),
        (["--batch-size=7"], {"batch_size": 7}),
        (["--deterministic"], {"deterministic": True}),
        (["--deterministic", "--steps=7"], {"deterministic": True, "steps": 7}),
        (["--deterministic=false"], {"deterministic": False}),
        (["--learning_rate=1e-3"], {"learning_rate": 1e-3}),
        (["--learning_rate", "3"], {"learning_rate": 3.0}),
        (["--weight_decay=2.5e-2"], {"weight_decay": 0.025}),
        (["--betas=[0.8, 0.99]"], {"betas": (0.8, 0.99)}),
        (["--betas=0.8,9.9e-1"], {"betas": (0.8, 0.99)}),
        (["--trackers=tensorboard,wandb"], {"trackers": ("tensorboard", "wandb")}),
        (["--trackers="], {"trackers": ()}),
        (["--max_grad_norm=null"], {"max_grad_norm": None}),
        (["--label_dropout=0.1"], {"label_dropout": 0.1}),
        (["--output=some/where"], {"output": "some/where"}),
        (["--output=2024"], {"output": "2024"}),
        (["--steps=7", "--steps=8"], {"steps": 8}),
        (["--sampler=adaptive"], {"sampler": Component("adaptive")}),
        (["--sampler", "adaptive"], {"sampler": Component("adaptive")}),
        (["--sampler={name: adaptive, floor: 0.3}"], {"sampler": Component("adaptive", {"floor": 0.3})}),
        (["--sampler.floor=0.3", "--sampler=adaptive"], {"sampler": Component("adaptive", {"floor": 0.3})}),
        (["--sampler.unbiased"], {"sampler": Component("root_loss", {"unbiased": True})}),
        (["--sampler=logit_normal", "--sampler.mean", "-1"], {"sampler": Component("logit_normal", {"mean": -1})}),
        (["--network.multipliers=[1,2]"], {"network": Component("unet", {"multipliers": [1, 2]})}),
    ],
)
def test_an_argument_changes_its_setting_and_no_other(arguments: list[str], changes: dict[str, Any]) -> None:
    assert with_overrides(PLAIN, arguments) == replace(PLAIN, **changes)


def test_the_same_name_keeps_options_and_a_new_one_drops_them() -> None:
    assert with_overrides(ADAPTIVE, ["--sampler=adaptive"]) == ADAPTIVE
    changed = with_overrides(ADAPTIVE, ["--sampler=adaptive", "--sampler.floor=0.3"])
    assert changed.sampler == Component("adaptive", {"floor": 0.3, "every": 10})
    assert with_overrides(ADAPTIVE, ["--sampler=uniform"]).sampler == Component("uniform")
    assert ADAPTIVE.sampler.options == {"floor": 0.2, "every": 10}


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "1.e-3", "0.001", "+1e-3"])
def test_a_number_is_a_number_however_it_is_written(text: str, tmp_path: Path) -> None:
    assert with_overrides(ADAPTIVE, [f"--sampler.floor={text}"]).sampler.options["floor"] == 0.001
    path = tmp_path / "some.yaml"
    path.write_text(f"learning_rate: {text}\nsampler: {{name: beta, a: {text}, b: 2}}\n")
    assert load(path) == Config(learning_rate=1e-3, sampler=Component("beta", {"a": 0.001, "b": 2}))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_yaml(name: str, tmp_path: Path) -> None:
    config = preset(name)
    assert from_dict(to_dict(config)) == config
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**to_dict(config), "provenance": {"commit": "abc"}}, sort_keys=False))
    assert load(path) == config
    assert with_overrides(load(path), []) == config
    assert list(to_dict(config)) == list(NAMES)


def test_a_file_may_hold_a_few_keys_and_bare_names(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text("sampler: adaptive\nsteps: 7\n")
    assert load(path) == replace(PLAIN, sampler=Component("adaptive"), steps=7)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--stesp=3", "unknown key --stesp: did you mean --steps?"),
        ("--zzz=3", "unknown key --zzz: valid are --data, --autoencoder"),
        ("--samplr.floor=3", "unknown key --samplr.floor"),
        ("--steps.size=3", "--steps must be a single value, it has no option 'size': write --steps=3"),
        ("steps=3", "settings must be written --key=value, got 'steps=3'"),
        ("--", "settings must be written --key=value, got '--'"),
        ("--sampler=[a", "--sampler must be a YAML value, got '[a'"),
        ("--steps=many", "steps must be a whole number, got 'many'"),
        ("--steps=1.5", "steps must be a whole number, got 1.5"),
        ("--steps", "steps must be a whole number, got True"),
        ("--steps=", "steps must be a whole number, got ''"),
        ("--steps=null", "steps must be a whole number, got None"),
        ("--steps=[1]", "steps must be a whole number, got [1]"),
        ("--learning_rate=null", "learning_rate must be a number, got None"),
        ("--learning_rate=fast", "learning_rate must be a number, got 'fast'"),
        ("--label_dropout=some", "label_dropout must be a share in [0, 1), null or auto, got 'some'"),
        ("--deterministic=3", "deterministic must be true or false, got 3"),
        ("--betas=0.9", "betas must be a list, [a number, a number], got 0.9"),
        ("--betas=0.9,0.99,0.999", "betas must be a list, [a number, a number], got"),
        ("--sampler=3", "sampler must be a name, or a mapping with a name and options, got 3"),
        ("--sampler=null", "sampler must be a name, or a mapping with a name and options, got None"),
        ("--sampler={floor: 1}", "sampler must be a name, or a mapping with a name and options, got {'floor': 1}"),
        ("--steps=0", "steps must be a whole number of at least 1, got 0"),
        ("--seed=-1", "seed must be a whole number of at least 0, got -1"),
        ("--learning_rate=0", "learning_rate must be a finite number above 0, got 0"),
        ("--learning_rate=.nan", "learning_rate must be a finite number above 0, got nan"),
        ("--weight_decay=-1", "weight_decay must be a finite number of at least 0, got -1"),
        ("--betas=0.9,1", "betas must be in [0, 1), got 1"),
        ("--max_grad_norm=0", "max_grad_norm must be a finite number above 0, got 0"),
        ("--ema_decay=1", "ema_decay must be in [0, 1), got 1"),
        ("--label_dropout=1", "label_dropout must be in [0, 1), got 1"),
        ("--optimizer=sgd", "optimizer must be one of 'adam', 'adamw', got 'sgd'"),
        ("--schedule=linear", "schedule must be one of 'constant', 'cosine', got 'linear'"),
        ("--speed=fast", "speed must be one of 'auto', 'plain', 'graph', 'compile', got 'fast'"),
        ("--precision=fp8", "precision must be one of 'fp32', 'bf16', 'fp16', got 'fp8'"),
        (
            "--accumulate=3",
            "batch_size must be a multiple of accumulate, got 128 and 3: pass for instance --batch_size",
        ),
    ],
)
def test_what_is_wrong_is_told_in_one_line(argument: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011, the message is compared below
        with_overrides(PLAIN, [argument])
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: [", "--config must be a readable YAML file, got"),
        ("- steps", "--config must hold `key: value` lines, got .* with list"),
        ("", "--config must hold `key: value` lines, got .* with NoneType"),
        ("stesp: 3", r"unknown key stesp: did you mean steps\?"),
        ("1: 3", "unknown key 1: valid are data"),
        ("sampler: {floor: 3}", "sampler must be a name, or a mapping with a name"),
        ("steps: !!python/object/apply:os.getcwd []", "--config must be a readable YAML file"),
    ],
)
def test_a_file_that_is_no_config_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(path)
    with pytest.raises(ValueError, match=r"--config must be a readable YAML file, got '.*missing.yaml'"):
        load(tmp_path / "missing.yaml")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "it holds more than 200,000 characters once its aliases are written out"),
        ("sampler: &a {name: uniform, a: *a}", "an alias stands within what it stands for"),
        ("sampler: " + "[" * 100_000, "it is nested more than 32 levels deep"),
        ("sampler: " + "x" * 300_000, "it is larger than 200,000 bytes"),
        ("seed: 2001-99-99", "a value is not of its kind"),
        ("seed: 0x" + "f" * 1000, "a number has more than 400 digits"),
    ],
)
def test_a_file_without_end_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"--config must be a readable YAML file, got '.*some\.yaml': .*{message}"):
        load(path)


@pytest.mark.parametrize("value", ["{" + BOMB.replace("\n", ", ") + "}", "&a [*a]", "[" * 100_000, "2001-99-99"])
def test_a_value_without_end_is_refused_by_name(value: str) -> None:
    with pytest.raises(ValueError, match="--sampler must be a YAML value, got"):
        with_overrides(PLAIN, [f"--sampler={value}"])


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("steps: 3\nbetas:\n- 0.9\n")
    with pytest.raises(ValueError, match=rf"betas must be a list, .* got \[0\.9\] \(in {path}\)"):
        load(path)


def test_a_config_comes_out_of_a_pipe_where_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    os.mkfifo(path)
    with pytest.raises(ValueError, match="it is no regular file"):
        load(path)
    writer = threading.Thread(target=path.write_text, args=["steps: 3"])
    writer.start()
    assert configure(None, path, []).steps == 3  # as --config <(command) gives it
    writer.join()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--sampler=1", "--sampler.reward=2"],
            "--sampler must be a name, .*, got 1: name it, as in --sampler=root_loss",
        ),
        (["--network=null", "--network.depth=false"], "--network must be a name, .*, got None: name it, as in"),
        (["--data=[a]", "--data.size=3"], r"--data must be a name, .*, got \['a'\]: name it, as in --data=digits"),
        (["--process=1.5"], "process must be a name, or a mapping with a name and options, got 1.5"),
        (["--process={name: 3}", "--process.num_steps=3"], "process must be a name, or a mapping with a name"),
    ],
)
def test_a_part_that_is_no_name_is_told(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_overrides(Config(), arguments)


def test_differences_name_what_decides_the_weights() -> None:
    assert differences(PLAIN, PLAIN) == []
    changed = replace(PLAIN, steps=7, seed=3, sampler=Component("uniform", {"unbiased": True}), output="x", workers=0)
    assert differences(PLAIN, changed) == [
        "sampler: root_loss -> uniform",
        "seed: 0 -> 3",
    ]


def test_differences_of_a_part_are_those_of_its_options_alone() -> None:
    old, new = (
        replace(PLAIN, network=Component("unet", {"channels": 8, "multipliers": value, **more}))
        for value, more in (("1,2,2", {"attention": None}), ([1, 2, 2], {"attention": [4], "dropout": True}))
    )
    assert differences(old, new) == ["network.attention: null -> [4]", "network.dropout: not set -> true"]
    other = replace(PLAIN, network=Component("unet", {"channels": 8, "multipliers": [1, 2, 4], "attention": None}))
    assert differences(old, other) == ["network.multipliers: 1,2,2 -> [1, 2, 4]"]


def test_the_number_of_steps_is_free_unless_a_cosine_is_stretched_over_them() -> None:
    assert differences(PLAIN, replace(PLAIN, steps=7)) == []
    cosine = replace(PLAIN, schedule="cosine")
    assert differences(cosine, replace(cosine, steps=7)) == ["steps: 10000 -> 7"]


def test_each_setting_either_counts_or_may_change_later() -> None:
    other = {int: 3, float: 0.5, bool: True, str: "fp16", str | None: "x", float | None: 0.5, float | str | None: 0.5}
    for field in fields(Config):
        value: Any = other.get(field.type)  # type: ignore[call-overload]
        value = {"optimizer": "adamw", "schedule": "cosine", "speed": "graph"}.get(field.name, value)
        value = Component("other") if field.type is Component else value
        value = {"betas": (0.5, 0.5), "trackers": ("wandb",), "accumulate": 2, "resume": False}.get(field.name, value)
        changed = from_dict({**to_dict(PLAIN), field.name: to_dict(replace(PLAIN, **{field.name: value}))[field.name]})
        assert changed != PLAIN, field.name
        assert bool(differences(PLAIN, changed)) == (field.name not in LATER), field.name


def test_an_unknown_preset_is_told_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown preset digit: did you mean digits\?"):
        preset("digit")
    with pytest.raises(ValueError, match=r"unknown preset zzz: valid are digits, digits-flow, .*imagenet-dit"):
        preset("zzz")


def test_a_share_of_labels_may_be_a_whole_number_in_python() -> None:
    assert Config(label_dropout=0).label_dropout == 0
    with pytest.raises(ValueError, match=r"label_dropout must be in \[0, 1\), got 3"):
        Config(label_dropout=3)
