"""Names of our own, of entry points and of `module:Class`; and what is told where one leads nowhere."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import kairostep as ks
from kairostep import registry as module
from kairostep.arguments import arguments_of, bundle, flatten, writable
from kairostep.experiments.config import decode
from kairostep.experiments.parts import load_dataset, make_network, make_sampler, make_weighting
from kairostep.experiments.settings import Component
from kairostep.registry import REGISTRIES, Registry, samplers
from kairostep.timesteps import SamplerContext, context

GROUP = "kairostep.samplers"
CONTEXT = SamplerContext(ks.Objective(ks.DiscreteProcess.linear(10)), torch.nn.Linear(1, 1), (1,))


class _Distribution:
    name = "other-package"


def entry_point(name: str, value: str) -> EntryPoint:
    found = EntryPoint(name, value, GROUP)
    vars(found)["dist"] = _Distribution()
    return found


def registry_with(monkeypatch: pytest.MonkeyPatch, **added: str) -> Registry:
    """Return a registry with one name of our own, `uniform`, and those that another package adds."""
    points = [entry_point(name, value) for name, value in added.items()]
    monkeypatch.setattr(module, "entry_points", lambda group: points if group == GROUP else [])
    made = Registry("sampler", GROUP, given=("seed",), removed={"old": "the sampler old was removed: take uniform"})
    made.base = ks.TimestepSampler
    made.register("uniform")(ks.Uniform)
    return made


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in a folder that Python does not look into, with a module in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.delitem(sys.modules, "of_mine", raising=False)
    (tmp_path / "of_mine.py").write_text(
        "import kairostep\n\n\nclass Mine(kairostep.Uniform):\n    pass\n\n\nNUMBER = 3\n"
    )
    return tmp_path


def test_a_name_is_found_whoever_gave_it(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    names = registry_with(monkeypatch, added="kairostep:LogitNormal")
    names.register_later("later", "kairostep.timesteps.fixed:Mode")
    assert list(names) == ["added", "later", "uniform"]
    assert list(names.registered) == ["later", "uniform"]
    assert [names.find(name) for name in names] == [ks.LogitNormal, ks.Mode, ks.Uniform]
    assert names.find("of_mine:Mine").__mro__[1] is ks.Uniform
    assert set(names.options_of("added")) == {"mean", "std", "unbiased", "stratified"}


def test_a_broken_entry_point_names_itself_and_breaks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    names = registry_with(monkeypatch, broken="nowhere.at.all:Thing", good="kairostep:Mode")
    assert names.find("uniform") is ks.Uniform
    assert names.find("good") is ks.Mode
    assert list(names) == ["broken", "good", "uniform"]
    told = r"sampler broken of the package other-package must be importable, got ModuleNotFoundError: No module named "
    with pytest.raises(ValueError, match=told + r"'nowhere', from nowhere\.at\.all:Thing: mend or uninstall"):
        names.find("broken")


def test_a_name_that_two_packages_give_is_refused_with_both_places(monkeypatch: pytest.MonkeyPatch) -> None:
    names = registry_with(monkeypatch, uniform="theirs:Uniform", good="kairostep:Mode")
    told = (
        r"sampler uniform must be one thing, got kairostep\.timesteps\.fixed:Uniform and theirs:Uniform of the package "
    )
    with pytest.raises(ValueError, match=told + r"other-package: rename the entry point .*--sampler=theirs:Uniform"):
        names.find("uniform")
    assert names.find("good") is ks.Mode
    with pytest.raises(ValueError, match=r"got kairostep\.timesteps\.fixed:Mode beside kairostep\.timesteps\.fixed:"):
        names.register("uniform")(ks.Mode)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unifrm", r"unknown sampler unifrm: did you mean uniform\?"),
        ("zzz", "unknown sampler zzz: valid are uniform"),
        ("old", "the sampler old was removed: take uniform"),
        (
            "no_such_module:Thing",
            "no_such_module:Thing must be importable, got no module no_such_module: start",
        ),
        ("of_mine:Min", r"unknown name in of_mine: Min: did you mean Mine\?"),
        (
            "of_mine:NUMBER",
            "of_mine:NUMBER must be a subclass of kairostep.TimestepSampler, got 3: write class",
        ),
        ("kairostep:min_snr", "must be a subclass of kairostep.TimestepSampler, got <function min_snr"),
        (":Mine", "--sampler must be a name or module:Class, got ':Mine': write for instance mine:Thing"),
        ("of_mine:", "--sampler must be a name or module:Class, got 'of_mine:'"),
        ("broken_file:Mine", "sampler broken_file:Mine must be importable, got ZeroDivisionError: division by zero: "),
        ("lacking:Mine", "sampler lacking:Mine must be importable, got ModuleNotFoundError: No module named 'absent'"),
    ],
)
def test_what_leads_nowhere_is_told_with_the_fix(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    (here / "broken_file.py").write_text("1 / 0\n")
    (here / "lacking.py").write_text("import absent\n")
    with pytest.raises(ValueError, match=message) as raised:
        registry_with(monkeypatch).find(name)
    assert "\n" not in str(raised.value)


def test_a_registry_without_a_group_knows_its_own_names_alone() -> None:
    with pytest.raises(ValueError, match="unknown process kairostep:FlowProcess: valid are cosine, edm, flow, linear"):
        REGISTRIES["process"].find("kairostep:FlowProcess")


class _NeedsTensor(ks.TimestepSampler):
    def __init__(self, table: torch.Tensor, seed: int = 0) -> None:
        super().__init__()


def not_a_part(split: str = "train", sample_size: int = 0) -> int:
    """Return what is no part of any kind."""
    return 3


def test_what_a_name_makes_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "of_tests", sys.modules[__name__])
    made = Component("of_tests:not_a_part")
    with pytest.raises(ValueError, match=r"must return a function \(log_snr, prediction\) -> factor, got 3: "):
        make_weighting(made, CONTEXT.process)
    with pytest.raises(ValueError, match=r"network of_tests:not_a_part must be a torch Module, got 3"):
        make_network(made, 8, 1, None)
    with pytest.raises(ValueError, match=r"takes no num_classes, got label_dropout: pass --label_dropout=null"):
        make_network(made, 8, 1, 10)
    with pytest.raises(ValueError, match=r"must be a kairostep\.data\.Dataset, got 3: return for instance"):
        load_dataset(made, "train")
    with pytest.raises(ValueError, match=r'data kairostep:min_snr must take split, "train" or "test"'):
        load_dataset(Component("kairostep:min_snr"), "train")
    with pytest.raises(ValueError, match=r"_NeedsTensor needs table, .*: write a classmethod from_exp"):
        make_sampler(Component("of_tests:_NeedsTensor"), CONTEXT)


# Arguments


def test_an_option_is_what_yaml_can_write() -> None:
    assert writable(torch.Tensor) is None
    assert writable(context.LossWeights | None) is None
    assert writable(torch.Tensor | tuple[float, ...] | None) == tuple[float, ...] | None
    assert writable(Literal["a", "b"]) == Literal["a", "b"]
    assert writable(list[torch.Tensor]) is None
    assert writable(Any) is Any


def test_fields_of_a_dataclass_are_flattened_and_bundled() -> None:
    flat = flatten(arguments_of(ks.Adaptive))
    assert {"every", "queue_size", "floor"} <= set(flat)
    assert not {"probing", "rule", "policy", "model", "reward_weight"} & set(flat)
    bundled = bundle(ks.Adaptive, {"every": 3, "floor": 0.2})
    assert bundled == {"probing": ks.Probing(every=3), "floor": 0.2}
    assert bundle(ks.Adaptive, {"floor": 0.2}) == {"floor": 0.2}


def test_annotations_that_name_what_is_not_there_leave_values_as_yaml_has_them() -> None:
    def function(a: "Nowhere" = 3, *rest: int, b: int = 4) -> None:  # type: ignore[name-defined]  # noqa: F821
        """Take what cannot be resolved."""

    assert {name: argument.hint for name, argument in arguments_of(function).items()} == {"a": Any, "b": Any}


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (int, 1e5, 100_000),
        (int, "7", 7),
        (float, 3, 3.0),
        (float, "1e-3", 0.001),
        (str, 2024, "2024"),
        (bool, "true", True),
        (Path | str, "a/b", Path("a/b")),
        (float | str | None, "auto", "auto"),
        (float | str | None, None, None),
        (int | None, 2.0, 2),
        (bool | None, False, False),
        (tuple[int, ...], "1,2,2", (1, 2, 2)),
        (tuple[int, ...] | None, "4,8", (4, 8)),
        (tuple[int, ...] | None, None, None),
        (tuple[float, float], [1, 2], (1.0, 2.0)),
        (list[int], [1, 2.0], [1, 2]),
        (Literal["a", "b"], "b", "b"),
        (Any, {"x": [1]}, {"x": [1]}),
    ],
)
def test_values_of_yaml_become_the_type_they_have(hint: Any, value: Any, expected: Any) -> None:
    found = decode("key", hint, value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (int, 1.5, "key must be a whole number, got 1.5"),
        (int, True, "key must be a whole number, got True"),
        (int, [1], r"key must be a whole number, got \[1\]"),
        (float, None, "key must be a number, got None"),
        (float, 10**400, "key must be a number, got 1000"),
        (bool, 1, "key must be true or false, got 1"),
        (str, True, "key must be text, got True"),
        (int | None, "x", "key must be a whole number or null, got 'x'"),
        (tuple[int, ...], [1, None], r"key must be a list, \[a whole number, \.\.\.\], got \[1, None\]"),
        (tuple[float, float], [1], r"key must be a list, \[a number, a number\], got \[1\]"),
        (tuple[str, ...], {"a": 1}, r"key must be a list, \[text, \.\.\.\], got \{'a': 1\}"),
        (Literal["a", "b"], "c", "key must be one of 'a', 'b', got 'c'"),
    ],
)
def test_values_of_another_type_are_told(hint: Any, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode("key", hint, value)


def test_every_sampler_of_ours_is_found_by_its_name() -> None:
    assert all(isinstance(samplers.find(name), type) for name in samplers.registered)
