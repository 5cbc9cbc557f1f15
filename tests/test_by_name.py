"""Samplers and weightings by name: those of the command line, with the library's own arguments."""

import re
from copy import deepcopy
from typing import Any, get_args

import pytest
import torch
from torch.testing import assert_close

import kairostep as ks
from kairostep.arguments import arguments_of
from kairostep.by_name import SamplerName, WeightingName
from kairostep.registry import samplers, weightings

PROCESS = ks.DiscreteProcess.linear(100)
SAMPLERS, WEIGHTINGS = samplers.registered, weightings.registered
SAMPLER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "beta": {"a": 0.7, "b": 2.0},
    "tabulated": {"mass": torch.tensor([1.0, 3.0])},
    "log_normal_sigma": {"process": PROCESS, "mean": -1.0},
    "laplace": {"process": PROCESS, "unbiased": True},
    "speed": {"process": PROCESS, "version": "v1"},
    "infonoise": {"process": PROCESS},
    "gradient_variance": {"parameters": list(torch.nn.Linear(2, 2).parameters())},
    "adaptive": {"policy": ks.ConstantBeta(), "floor": 0.2},
    "curriculum": {"first": ks.LogitNormal(), "then": ks.Uniform(), "start": 1, "end": 3},
}
WEIGHTING_ARGUMENTS: dict[str, dict[str, Any]] = {
    "density": {"process": PROCESS},
    "min_snr": {"gamma": 3.0},
    "vlb": {"process": PROCESS},
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_is_made_by_its_name(name: str) -> None:
    arguments = {**SAMPLER_ARGUMENTS.get(name, {}), "seed": 7}
    made, expected = ks.from_name(name, **deepcopy(arguments)), SAMPLERS[name](**arguments)
    assert type(made) is SAMPLERS[name]
    assert isinstance(made, ks.TimestepSampler)
    drawn, wanted = made.sample(torch.zeros(32, 2)), expected.sample(torch.zeros(32, 2))
    assert torch.equal(drawn.t, wanted.t)
    assert torch.equal(drawn.weight, wanted.weight)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_every_weighting_is_made_by_its_name(name: str) -> None:
    arguments = WEIGHTING_ARGUMENTS.get(name, {})
    made, expected = ks.from_name(name, **arguments), weightings.find(name)(**arguments)
    log_snr = PROCESS.log_snr(torch.linspace(0.05, 0.95, 7))
    assert not isinstance(made, ks.TimestepSampler)
    assert_close(made(log_snr, ks.V), expected(log_snr, ks.V), rtol=0, atol=0)


def test_no_name_means_two_things() -> None:
    assert not set(SAMPLERS) & set(WEIGHTINGS)


def test_type_checkers_know_the_same_names() -> None:
    assert list(get_args(SamplerName)) == list(SAMPLERS)
    assert list(get_args(WeightingName)) == list(WEIGHTINGS)


def test_an_unknown_name_is_refused_with_the_nearest_and_all_of_them() -> None:
    with pytest.raises(ValueError, match=r"got 'rootloss' \(did you mean 'root_loss'\?\): samplers are") as error:
        ks.from_name("rootloss")
    assert all(re.search(rf"\b{name}\b", str(error.value)) for name in (*SAMPLERS, *WEIGHTINGS))
    with pytest.raises(ValueError, match=r"got 'zzz': samplers are adaptive, .*; weightings are constant, "):
        ks.from_name("zzz")


def test_a_sampler_that_was_removed_is_told_with_the_reason_and_another() -> None:
    message = r"progress was removed, since no setting of it beat uniform draws: take root_loss \(ks\.RootLoss\(\)\)"
    with pytest.raises(ValueError, match=message):
        ks.from_name("progress")
    with pytest.raises(AttributeError, match=message):
        _ = ks.Progress
    with pytest.raises(AttributeError, match="module 'kairostep' has no attribute 'Nonsense'"):
        _ = ks.Nonsense


@pytest.mark.parametrize("name", [*SAMPLERS, *WEIGHTINGS])
def test_an_unknown_keyword_is_refused_with_all_that_is_taken(name: str) -> None:
    maker = {**SAMPLERS, **WEIGHTINGS}[name]
    with pytest.raises(ValueError, match=rf"{name} takes .*, got nonsense=.*: see help\(ks\.\w+\)") as error:
        ks.from_name(name, nonsense=1)
    takes = str(error.value).split("takes ")[1].split(", got ")[0]
    expected = ", ".join(f"{key}=" for key in arguments_of(maker)) or "no arguments"
    assert takes == expected


def test_a_keyword_with_a_slip_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"min_snr takes gamma=, got gama= \(did you mean 'gamma'\?\)"):
        ks.from_name("min_snr", gama=5.0)
    with pytest.raises(ValueError, match=r"mean=, std=, unbiased=, stratified=, seed=, got unbaised="):
        ks.from_name("logit_normal", unbaised=True)


@pytest.mark.parametrize(
    "name", [name for name, maker in SAMPLERS.items() if any(a.required for a in arguments_of(maker).values())]
)
def test_a_missing_keyword_of_a_sampler_is_named(name: str) -> None:
    missing = [key for key, argument in arguments_of(SAMPLERS[name]).items() if argument.required]
    with pytest.raises(ValueError, match=rf"{name} needs {' and '.join(f'{key}=' for key in missing)}, got nothing"):
        ks.from_name(name)


def test_a_missing_keyword_beside_others_is_named() -> None:
    with pytest.raises(ValueError, match=r'vlb needs process=, got nothing: pass ks.from_name\("vlb", process=...\)'):
        ks.from_name("vlb")
    with pytest.raises(ValueError, match=r"curriculum needs first= and end=, got then, start"):
        ks.from_name("curriculum", then=ks.Uniform(), start=0)


def test_what_the_class_itself_refuses_is_refused_in_its_words() -> None:
    with pytest.raises(ValueError, match=r"std must be a finite number above 0, got 0"):
        ks.from_name("logit_normal", std=0.0)
