"""What one experiment is made of, as data: from presets, YAML files and `--key=value`, and back to YAML."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import draccus
from draccus.utils import DecodingError, ParsingError

from kairostep.bounded_files import Unreadable, parse_yaml, read_yaml
from kairostep.timesteps.arguments import below_one, choice, count, nonnegative, positive


@dataclass(frozen=True)
class Component:
    """A named part and its options: in YAML a name alone, or a mapping with `name` and the options beside it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


def setting(default: Any, text: str) -> Any:
    """Return a dataclass field with a default and the line that `kairostep train --help` shows for it."""
    if isinstance(default, Component):
        return field(default_factory=lambda: default, metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment, every choice in it a `--key=value`."""

    data: Component = setting(Component("digits"), "data set; its options as --data.option=value")
    autoencoder: str | None = setting(None, "folder of a diffusers AutoencoderKL or VQModel: train on its latents")
    cache: str = setting("~/.cache/kairostep", "where latents are kept")
    network: Component = setting(Component("unet"), "backbone; its options as --network.option=value")
    process: Component = setting(Component("linear"), "noising process or schedule")
    prediction: str | None = setting(None, "epsilon, x0, v, velocity or edm; by default what the process is used with")
    weighting: Component = setting(Component("constant"), "factor on the loss: what is optimised")
    sampler: Component = setting(Component("root_loss"), "timestep sampler: where compute goes")
    pairs: bool = setting(False, "at low noise, train pairs of neighbours in t on one image and opposite noise")
    stable_target: int = setting(0, "targets averaged over so many random images, by how likely they are; 0: off")

    steps: int = setting(10_000, "optimizer steps")
    batch_size: int = setting(128, "images per optimizer step, over all processes and accumulated batches")
    accumulate: int = setting(1, "batches whose gradients are summed in one optimizer step")
    optimizer: str = setting("adam", "adam or adamw")
    learning_rate: float = setting(2e-4, "of the optimizer, after warm-up")
    schedule: str = setting("constant", "constant or cosine (down to 0), after warm-up")
    warmup_steps: int = setting(0, "steps in which the learning rate rises linearly to its value")
    betas: tuple[float, float] = setting((0.9, 0.999), "of the optimizer")
    weight_decay: float = setting(0.0, "of the optimizer")
    max_grad_norm: float | None = setting(1.0, "gradients are clipped to this norm; null: not clipped")
    ema_decay: float = setting(0.9999, "of the averaged weights, at most (1 + n) / (10 + n) after n steps")
    label_dropout: float | None = setting(None, "train with classes, this share of labels hidden; null: no classes")

    precision: str = setting("fp32", "fp32, bf16 or fp16")
    speed: str = setting("auto", "plain, graph (replay CUDA graphs), compile (the network first), auto: what pays")
    deterministic: bool = setting(False, "same bits on every GPU run, slower; a CPU always gives them")
    workers: int = setting(4, "processes that read data sets too large for memory")

    output: str | None = setting(None, "run directory; by default runs/ and the preset with what was changed")
    seed: int = setting(0, "a step is a function of seed, process and step number")
    resume: bool = setting(True, "go on from the last checkpoint in the run directory")
    log_every: int = setting(100, "steps between lines in metrics.jsonl")
    density_every: int = setting(1000, "steps between records of the sampler's density")
    evaluate_every: int = setting(1000, "steps between held-out losses")
    held_out_images: int = setting(1024, "images of the held-out loss, 0: none")
    sample_every: int = setting(5000, "steps between grids of generated images, 0: at the end only")
    sample_steps: int = setting(50, "network evaluations per generated image in a grid")
    checkpoint_every: int = setting(1000, "steps between checkpoints")
    keep_checkpoints: int = setting(2, "last checkpoints that are kept, besides the best")
    trackers: tuple[str, ...] = setting((), "also log to tensorboard, wandb, ...: any tracker of accelerate")

    def __post_init__(self) -> None:
        """Check what can be checked without building anything."""
        for name in ("steps", "batch_size", "accumulate", "log_every", "density_every", "evaluate_every"):
            count(name, getattr(self, name))
        for name in ("checkpoint_every", "keep_checkpoints", "sample_steps"):
            count(name, getattr(self, name))
        for name in ("warmup_steps", "workers", "seed", "held_out_images", "sample_every", "stable_target"):
            count(name, getattr(self, name), at_least=0)
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}: pass for instance --seed=0")
        positive("learning_rate", self.learning_rate)
        nonnegative("weight_decay", self.weight_decay)
        for beta in self.betas:
            below_one("betas", beta)
        if self.max_grad_norm is not None:
            positive("max_grad_norm", self.max_grad_norm)
        below_one("ema_decay", self.ema_decay)
        if self.label_dropout is not None:
            below_one("label_dropout", self.label_dropout)
        choice("speed", self.speed, ("auto", "plain", "graph", "compile"))
        choice("optimizer", self.optimizer, ("adam", "adamw"))
        choice("schedule", self.schedule, ("constant", "cosine"))
        choice("precision", self.precision, ("fp32", "bf16", "fp16"))
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size must be a multiple of accumulate, got {self.batch_size} and {self.accumulate}: "
                f"pass for instance --batch_size={self.accumulate * max(1, self.batch_size // self.accumulate)}"
            )


COMPONENTS = tuple(f.name for f in fields(Config) if f.type is Component)
NAMES = tuple(f.name for f in fields(Config))
LATER = {"steps", "output", "resume", "workers", "cache", "trackers", "keep_checkpoints", "checkpoint_every"}
LATER |= {"log_every", "density_every", "evaluate_every", "held_out_images", "sample_every", "sample_steps"}
# `LATER` are the settings that a resumed run may change: they leave no mark on the weights
DESCRIPTIONS: Mapping[Any, str] = {
    Component: "a name, or a mapping with a name and options",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    NoneType: "null",
}


@draccus.decode.register(Component)  # type: ignore[untyped-decorator]
def _decode(raw: Any, path: Sequence[str] = ()) -> Component:
    if isinstance(raw, str):
        return Component(raw)
    if not isinstance(raw, Mapping) or not isinstance(raw.get("name"), str):
        raise DecodingError(path, "neither a name nor a mapping with one")
    return Component(raw["name"], {key: value for key, value in raw.items() if key != "name"})


@draccus.encode.register(Component)  # type: ignore[untyped-decorator]
def _encode(component: Component, *_: Any) -> dict[str, Any]:
    return {"name": component.name, **component.options}


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as plain data, in the order of its fields."""
    encoded: dict[str, Any] = draccus.encode(config)
    return encoded


def from_dict(raw: Mapping[str, Any]) -> Config:
    """Return the config that plain data describes; unknown keys and wrong types raise ValueError."""
    for key in raw:
        if key not in NAMES:
            raise ValueError(unknown("key", str(key), NAMES))
    hints = get_type_hints(Config)
    return Config(**{key: decoded(key, hints[key], value) for key, value in raw.items()})


def decoded(key: str, hint: Any, value: Any) -> Any:
    """Return a value of YAML as the type that its key has, a list also from `1,2`; ValueError for any other type."""
    if get_origin(hint) is tuple and isinstance(value, str):
        value = value.split(",") if value else []
    kinds = get_args(hint) or (hint,)
    try:
        if int in kinds and float not in kinds and isinstance(value, float) and value.is_integer():
            value = int(value)  # 1e5
        if hint is not Any and (value is None or isinstance(value, bool)) and type(value) not in kinds:
            raise TypeError("nothing, or a bare flag")
        return draccus.decode(hint, value)
    except (ParsingError, TypeError) as error:
        raise ValueError(f"{key} must be {_described(hint)}, got {value!r}") from error


def _described(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a list, [{', '.join('...' if kind is ... else _described(kind) for kind in get_args(hint))}]"
    return DESCRIPTIONS.get(hint) or " or ".join(map(_described, get_args(hint))) or str(hint)


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """Return the config changed by arguments `--key=value` or `--key value`; a component's new name drops its options.

    A part is named by `--sampler=adaptive`, its options are set by `--sampler.floor=0.2`.
    """
    raw = to_dict(config)
    pairs = list(_pairs(overrides))
    for key, value in sorted(pairs, key=lambda pair: "." in pair[0]):  # names first: options belong to the new one
        part, _, option = key.partition(".")
        if part not in NAMES:
            raise ValueError(unknown("key", f"--{key}", [f"--{name}" for name in NAMES]))
        if option and part not in COMPONENTS:
            raise ValueError(f"--{part} must be a single value, it has no option {option!r}: write --{part}={value}")
        if option:
            if not isinstance(raw[part], Mapping):
                raise ValueError(
                    f"--{part} must be {DESCRIPTIONS[Component]}, got {raw[part]!r}: "
                    f"name it, as in --{part}={to_dict(config)[part]['name']}, before its options"
                )
            raw[part] = {**raw[part], option: value}
        elif part in COMPONENTS and isinstance(value, str):
            raw[part] = raw[part] if raw[part]["name"] == value else {"name": value}
        else:
            raw[part] = value
    changed = {key for key, _ in pairs}
    if raw["process"] != to_dict(config)["process"] and "prediction" not in changed:
        raw["prediction"] = None  # what the new process is used with
    return from_dict(raw)


def _pairs(overrides: Sequence[str]) -> Iterable[tuple[str, Any]]:
    waiting = list(overrides)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("--") or len(argument) < 3:
            raise ValueError(f"settings must be written --key=value, got {argument!r}")
        key, equals, value = argument[2:].partition("=")
        if not equals:
            bare = not waiting or waiting[0].startswith("--")
            value = "true" if bare else waiting.pop(0)
        try:
            yield key.replace("-", "_"), parse_yaml(value) if value else value
        except Unreadable as error:
            raise ValueError(f"--{key} must be a YAML value, got {value!r}: quote it if it is text") from error


def load(path: Path, *, pipes: bool = False) -> Config:
    """Return the config of a YAML file, as `config.yaml` of a run is one; its section `provenance` is left out.

    `pipes`: also out of a pipe, as `--config <(command)` is one.
    """
    try:
        raw = read_yaml(path, pipes=pipes)
    except (OSError, Unreadable) as error:
        raise ValueError(f"--config must be a readable YAML file, got {str(path)!r}: {error}") from error
    if not isinstance(raw, Mapping):
        raise ValueError(f"--config must hold `key: value` lines, got {str(path)!r} with {type(raw).__name__}")
    try:
        return from_dict({key: value for key, value in raw.items() if key != "provenance"})
    except ValueError as error:
        raise ValueError(f"{error} (in {path})") from error


def unknown(kind: str, name: str, valid: Iterable[str]) -> str:
    """Return the message for a name that is not among the valid ones: the nearest one, or all."""
    valid = list(valid)
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "valid are"
    return f"unknown {kind} {name}: {hint}" + ("" if near else f" {', '.join(valid)}")


def differences(old: Config, new: Config) -> list[str]:
    """Return a line `key: old -> new` for each setting that decides the weights and differs."""
    before, after = to_dict(old), to_dict(new)
    free = LATER - {"steps"} if new.schedule == "cosine" else LATER  # a cosine is stretched over all steps
    return [f"{key}: {before[key]} -> {after[key]}" for key in NAMES if key not in free and before[key] != after[key]]
