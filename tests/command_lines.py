"""Command lines with valid names and wild values: line i of a seed is always the same."""

import argparse
import random
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from kairostep.cli import make_parser
from kairostep.experiments.config import COMPONENTS, Config
from kairostep.experiments.parts import PREDICTIONS
from kairostep.registry import REGISTRIES

SEED = 17
NUM_LINES = 2000

WHOLE = ["-1", "0", "1", "2", "3", "7", "10", "64", "100", "1000", "1e5", "1e6"]
BROKEN = ["0.5", "-0.5", "0.1", "0.999", "1.0", "1.5", "1e-3", "1e-320", "5.0", "1000.0"]
HUGE = ["1e7", "1e8", "1e9", "2147483647", "2147483648", "1e18", "9223372036854775807", "9223372036854775808", "1e30"]
HUGE += ["9" * 400, "-9223372036854775809", "1e308", "-1e308", "1e400", ".inf", "-.inf", ".nan"]
LISTS = [
    "[]",
    "[1]",
    "[1,2]",
    "[1,2,2]",
    "1,2",
    "[0]",
    "[-1]",
    "[1e9,1e9]",
    "[2147483648]",
    "[[1]]",
    "[a,b]",
    "[.nan,1]",
]
LISTS += [f"[{'1,' * 200}]", "[8]", "[4,8]", "[1e308,1e308]", "[0.1,0.9]"]
TEXTS = [
    "",
    "null",
    "~",
    "true",
    "false",
    "yes",
    "text",
    "a b",
    "é",
    "\udcff",
    "'",
    '"',
    "%",
    "*",
    "&a [*a]",
    "-",
    "--",
]
TEXTS += ["=", "0x10", "2024-01-01", "2024-13-45", "1:30", "1_000", "!!python/object/apply:os.getcwd []", "!!binary x"]
TEXTS += [
    "a" * 5000,
    "{",
    ":",
    "- 1",
    "[" * 300,
    "[1,",
    "{}",
    "{name: 1}",
    "{name: uniform}",
    "{a: {b: 1}}",
    "{[1]: 2}",
]
PATHS = [".", "..", "/dev/null", "/dev/full", "/proc/self/mem", "/dev/null/below", "here/and/there", "file.txt", "a\nb"]
ANY = [WHOLE, BROKEN, HUGE, LISTS, TEXTS, PATHS]
KINDS = {int: [WHOLE, HUGE], float: [WHOLE, BROKEN, HUGE], bool: [["true", "false"]], tuple: [LISTS], Path: [PATHS]}

CHOICES = {
    "prediction": [*PREDICTIONS, "edm"],
    "precision": ["fp32", "bf16", "fp16"],
    "optimizer": ["adam", "adamw"],
    "schedule": ["constant", "cosine"],
    "speed": ["auto", "plain", "graph"],  # not compile, which takes minutes
    "output": ["new", "a.html", "a.png", "a.json"],
    "checkpoint": ["last", "best", "1", "2"],
    "arms": ["uniform,mode", "uniform,uniform --batch_size=4", "uniform,root_loss --weighting=min_snr", "uniform,a:B"],
    "baseline": ["uniform", "root_loss"],
    "seeds": ["1", "2", "0,3", "1,1"],
    "learning_rates": ["1e-3,2e-3", "1e-3", "1e-320,1e300"],
    "target": ["loss=0.5", "bound=1e-300", "fid=40", "loss=1e400"],
    "budget": ["1s", "30m", "1e3h", "9" * 400 + "d"],
    "sampler": ["root_loss", "uniform", "adaptive", "nowhere:C"],
    "features": ["os:getcwd", "nowhere:f", "text", ":", "os:"],
}
SMALL = ["--steps=2", "--batch_size=8", "--held_out_images=8", "--sample_steps=2", "--network.channels=8"]
SMALL += ["--network.multipliers=[1]", "--network.attention=[]", "--network.blocks=1"]
SMALL_TRANSFORMER = ["--network.hidden_size=16", "--network.depth=2", "--network.num_heads=2"]
FEW = {
    "train": [],
    "generate": ["--num=4", "--steps=2", "--output=new"],
    "evaluate": ["--num=4", "--held_out_images=4"],
    "preview": [],
    "increments": [],
    "gradient-variance": ["--timesteps=5", "--repeats=2", "--rows=2"],
    "interdependence": ["--ranges=2", "--parts=4", "--range_steps=1"],
    "report": [],
    "data": [],
    "presets": [],
    "compare": ["--arms=uniform,root_loss", "--seeds=1"],
    "patch": ["--output=new.py"],  # not the script itself
}
WEIGHTS = {"train": 50, "generate": 10, "evaluate": 7, "preview": 14, "increments": 4, "gradient-variance": 6}
WEIGHTS |= {"interdependence": 5, "report": 2, "data": 1, "presets": 1, "compare": 12, "patch": 4}
# Of configs see their own tests, and jobs train where nobody here could stop them
NOT_TYPED = {"--help", "-h", "--watch", "--config", "--jobs"}


def line(folder: Path, number: int, seed: int = SEED) -> list[str]:
    """Return what follows `kairostep` in a line about a folder with the runs `run` and `flow`, and `script.py`."""
    chance = random.Random(f"{seed}/{number}")
    (command,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
    names = ["analyse", command] if command in ("increments", "gradient-variance", "interdependence") else [command]
    subject = subject_of(chance, command, folder)
    settings = []
    if command in ("train", "preview", "increments") or subject == ["digits"]:
        place = {"train": "--output=new", "gradient-variance": "--directory=new", "interdependence": "--directory=new"}
        place |= {"compare": "--output=new"}
        settings = training_settings(chance, [place[command], *SMALL] if command in place else [])
    return [*names, *subject, *FEW[command], *settings, *own_options(chance, names)]


def subject_of(chance: random.Random, command: str, folder: Path) -> list[str]:
    runs = [str(folder / "run")] * 6 + [str(folder / "flow")] * 4 + PATHS[:3]
    if command == "train":
        return ["digits"]
    if command == "compare":
        return ["digits"] if chance.random() < 0.8 else [f"--table={chance.choice([*runs, *PATHS])}"]
    if command == "patch":
        return [chance.choice([str(folder / "script.py")] * 8 + [str(folder), *PATHS])]
    if command == "presets":
        return []
    if command == "data":
        return [chance.choice(["cifar10", "text"]), chance.choice(PATHS)]
    if command == "report":
        return chance.sample([*runs, str(folder), *PATHS], chance.randint(1, 2))
    if command in ("preview", "increments"):
        return chance.choice([[], [], ["digits"], [chance.choice(runs)]])
    if command in ("generate", "evaluate"):
        return [chance.choice(runs)]
    return ["digits"] if chance.random() < 0.3 else [chance.choice(runs)]


def own_options(chance: random.Random, names: list[str]) -> list[str]:
    """Return up to three options that the parser of a command has, with values of their kind or wild ones."""
    parser: argparse.ArgumentParser = make_parser()
    for name in names:
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = commands.choices[name]
    actions = [
        action for action in parser._actions if action.option_strings and action.option_strings[-1] not in NOT_TYPED
    ]
    chosen = chance.sample(actions, min(len(actions), chance.randint(0, 3)))
    arguments = []
    for action in chosen:
        usual = [*(action.choices or [])] or CHOICES.get(action.dest)
        arguments.append(f"{action.option_strings[-1]}={value_of(chance, action.type, usual)}")
    return arguments


def training_settings(chance: random.Random, base: list[str]) -> list[str]:
    """Return settings of training: base ones, some parts by name, and one to three that are wild."""
    names = {kind: getattr(Config(), kind).name for kind in COMPONENTS}
    arguments = []
    for kind in chance.sample([kind for kind in COMPONENTS if kind != "data"], chance.randint(0, 2)):
        names[kind] = chance.choice(list(REGISTRIES[kind]))
        arguments.append(f"--{kind}={names[kind]}")
    if names["network"] != "unet" and base:
        base = [argument for argument in base if "network" not in argument] + SMALL_TRANSFORMER
    return base + arguments + [setting(chance, names) for _ in range(chance.randint(1, 3))]


def setting(chance: random.Random, names: dict[str, str]) -> str:
    """Return one setting with a wild value: an option of a part in two of three cases."""
    if chance.random() < 0.65:
        parts = {kind: REGISTRIES[kind].options_of(names[kind]) for kind in COMPONENTS if kind != "data"}
        kind = chance.choice([kind for kind, options in parts.items() if options])
        option = chance.choice(list(parts[kind]))
        return f"--{kind}.{option}={value_of(chance, parts[kind][option].hint)}"
    name = chance.choice([field.name for field in fields(Config) if field.name != "trackers"])  # which may call home
    return f"--{name}={value_of(chance, get_type_hints(Config)[name], CHOICES.get(name))}"


def value_of(chance: random.Random, kind: Any, usual: list[str] | None = None) -> str:
    """Return a value of a kind in three of four cases, else any."""
    if chance.random() < 0.25:
        return chance.choice(chance.choice(ANY))
    if usual:
        return chance.choice(usual)
    kinds = [get_origin(part) or part for part in (get_args(kind) if get_origin(kind) is not tuple else ()) or (kind,)]
    known = [values for part in kinds for values in KINDS.get(part, [])]
    return chance.choice(chance.choice(known or ANY))
