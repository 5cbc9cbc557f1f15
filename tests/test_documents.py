"""What the documents show, runs; what they tell to type, can be typed; what they list, exists."""

import difflib
import re
import tomllib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import DOCUMENTS, ROOT, commands_of, python_parts, text_of, typed_lines
from real_libraries import beside
from torch.distributed.run import get_args_parser
from torch.testing import assert_close

import kairostep as ks
from kairostep.cli import WITH_SETTINGS, make_parser
from kairostep.experiments import Config, preset
from kairostep.experiments.command_line import take_preset
from kairostep.experiments.config import with_overrides
from kairostep.experiments.parts import check_options
from kairostep.registry import REGISTRIES, samplers, weightings
from kairostep.testing import check_sampler

SAMPLERS, WEIGHTINGS = samplers.registered, weightings.registered
PARTS = {name: codes for document in DOCUMENTS for name, codes in python_parts(document).items()}
RECIPE = "CONTRIBUTING.md"  # code to be filled in, which has a test of its own
LINES = sorted({tuple(words) for document in DOCUMENTS for words in typed_lines(document)})
TARGETS = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()  # type: ignore[index]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Libraries that a section may be about without being needed here
OTHERS = {"denoising_diffusion_pytorch", "flow_matching", "lightning", "physicsnemo", "torchcfm"}
DEMANDS_TORCHVISION = "denoising_diffusion_pytorch"  # and does not use it in training


@pytest.mark.parametrize("name", [name for name in PARTS if name != RECIPE])
def test_python_code_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "document"}
    for number, code in enumerate(PARTS[name]):
        try:
            with beside("torchvision") if DEMANDS_TORCHVISION in code else nullcontext():
                exec(compile(code, f"{name}, block {number + 1}", "exec"), namespace)
        except ModuleNotFoundError as error:
            if str(error.name).split(".")[0] not in OTHERS:
                raise
            pytest.skip(f"{name} needs {error.name}, which is not installed")


def test_the_sampler_in_the_recipe_for_new_ones_works() -> None:
    namespace: dict[str, Any] = {}
    exec(compile(PARTS[RECIPE][0], RECIPE, "exec"), namespace)
    triangle = namespace["Triangle"](unbiased=True)
    drawn = triangle.sample(torch.zeros(1000, 1))
    assert_close(triangle.density(2), 0.9 * torch.tensor([0.25, 0.75]) + 0.1 * 0.5)
    assert_close((drawn.weight * drawn.t).mean(), torch.tensor(0.5), rtol=0.02, atol=0)
    check_sampler(namespace["Triangle"])


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_every_command_can_be_typed(words: tuple[str, ...]) -> None:
    check_command(list(words))


def test_lines_of_code_that_the_method_page_quotes_stand_in_the_source() -> None:
    source = " ".join(" ".join(file.read_text().split()) for file in (ROOT / "src").rglob("*.py"))
    quoted = re.findall(r"`([^`]+)`", " ".join((ROOT / "docs/method.md").read_text().split()))
    lines = [code for code in quoted if re.match(r"return |with |\w+(\[\w+\])?(: Tensor)? = |self\.\w+\(\w+,", code)]
    assert len(lines) > 15
    assert not [code for code in lines if code not in source]


def test_a_wrong_command_would_be_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        "kairostep train digits --sampler=adaptive --sampler.flor=0.2",
        "kairostep train digts",
        "kairostep train images",
        "kairostep generate runs/digits --sampler euler",
        "kairostep preview --weighting=min_srn",
        "kairostep report runs --outptu x.html",
        "make tests",
        "python -m kairostep.docter",
        "python benchmarks/nothing.py",
        "torchrun --nproc_per_node 2 -m kairostep generate runs/digits --sampler euler",
        "torchrun --nproc 2 -m kairostep generate runs/digits",
        "pip install '.[trian]'",
        "rm -rf runs",
    ):
        (words,) = commands_of(line)
        with pytest.raises((AssertionError, ValueError, SystemExit)):
            check_command(words)


def test_torchrun_takes_no_option_of_a_command_for_an_abbreviation_of_its_own() -> None:
    commands = make_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr,index,call-overload]
    settings = [f"--{field.name}" for field in fields(Config)]
    first = [
        a.option_strings[0] for name in ("generate", "evaluate") for a in commands[name]._actions if a.option_strings
    ]
    own = [option for action in get_args_parser()._actions for option in action.option_strings]
    taken = {name: [option for option in own if option.startswith(name)] for name in (*settings, *first)}
    assert "--num_images" in taken
    assert {name: options for name, options in taken.items() if options and name not in options} == {}


def check_command(words: Sequence[str]) -> None:
    """Raise unless the command exists and takes these words."""
    if words[0] == "torchrun":
        launched = get_args_parser().parse_args(words[1:])  # it reads the options of the command as well
        assert launched.module, f"torchrun must start a module, got {launched.training_script}"
        words = [launched.training_script, *launched.training_script_args]
    elif words[:2] == ["accelerate", "launch"]:
        words = ["kairostep", *words[words.index("kairostep") + 1 :]]
    program, *rest = words
    if program == "kairostep" and rest[1:] == ["--help"]:
        with pytest.raises(SystemExit, match="0") if rest != ["train", "--help"] else nullcontext():
            make_parser().parse_args(rest)
    elif program == "kairostep":
        check_kairostep(rest)
    elif program == "make":
        assert set(rest) - {"--help"} <= set(TARGETS), f"make has no target {rest}"
    elif program == "python" and rest[0] == "-m":
        assert find_spec(rest[1]) is not None, f"there is no module {rest[1]}"
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), f"there is no {rest[0]}"
    elif program in ("pip", "pytest"):
        extras = {name for word in rest for found in re.findall(r"\[([\w,]+)\]", word) for name in found.split(",")}
        assert extras <= set(PROJECT["optional-dependencies"]), f"there is no extra among {extras}"
    else:
        raise AssertionError(f"{program} is not a command that documents may show unchecked")


def check_kairostep(words: Sequence[str]) -> None:
    known, settings = make_parser().parse_known_args(words)
    if known.command not in WITH_SETTINGS:
        assert settings == [], f"unrecognized arguments: {settings}"
        return
    name, settings = take_preset(settings)
    is_run = name is not None and "/" in name
    config = with_overrides(Config() if name is None or is_run else preset(name), settings)
    wants_data = known.command == "train" and not (known.help or known.config)
    if known.command == "train" and name is None and not known.help:
        assert known.config, "train takes a preset or --config FILE"
    for kind, registry in REGISTRIES.items():
        if kind != "data" or wants_data:
            check_options(registry, getattr(config, kind))


def test_every_sampler_and_weighting_has_a_page() -> None:
    pages = {name: ROOT / "docs" / "methods" / f"{name}.md" for name in SAMPLERS}
    for name, page in pages.items():
        assert page.read_text().startswith(f"# {SAMPLERS[name].__name__}\n"), page
        assert f"methods/{name}.md" in (ROOT / "mkdocs.yml").read_text()
    weightings = text_of("docs/methods/weightings.md")
    assert [name for name in WEIGHTINGS if f"`{name}(" not in weightings] == []


def test_local_links_lead_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?://)([^)#]+)[^)]*\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_commands_for_the_paper_have_the_solvers_of_table_6_and_the_loss_of_figure_6() -> None:
    commands = [line for line in text_of("docs/reproducing.md").splitlines() if line.startswith("kairostep ")]
    generate = {line.split()[2]: line.split("&&")[0].split() for line in commands if line.startswith("kairostep gen")}
    published = {"cifar10-ddpm": ("ddpm", "1000"), "celebahq-ldm": ("ddim", "200"), "imagenet-uvit": ("heun", "50")}
    for preset_name, (solver, steps) in published.items():
        words = generate[f"runs/{preset_name}"]
        assert solver in words
        assert words[words.index("--steps") + 1] == steps
        assert words[words.index("--num_images") + 1] == "50000"
    figures = {number: [line for line in commands if f"Figure {number}" in line] for number in (2, 6)}
    assert all("--weighting=vlb" in line for line in figures[6])
    assert len(figures[6]) == 2  # linear and cosine
    assert [line for line in figures[2] if "--weighting" in line] == []


def test_the_public_name_of_every_sampler_is_its_class() -> None:
    exported = {value for value in vars(ks).values() if isinstance(value, type)}
    assert set(SAMPLERS.values()) <= exported


def test_diffs_of_the_integrations_are_those_of_the_examples() -> None:
    shown = re.findall(
        r"From \[examples/(\w+)\]\([^)]*\):\n\n```diff\n(.*?)```", text_of("docs/integrations.md"), re.DOTALL
    )
    assert len(shown) >= 2
    for name, diff in shown:
        before, after = ((ROOT / "examples" / name / f"{file}.py").read_text() for file in ("plain", "with_sampler"))
        changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[:2] in ("+ ", "- ")]
        lines = [line for line in diff.splitlines() if line.startswith(("+", "-"))]
        assert lines == [line[0] + line[2:] for line in changed], name
