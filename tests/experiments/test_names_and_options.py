"""Everything in the library has a name, every option of a sampler is a flag, and wrong ones are corrected."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_experiments import NEEDED, built
from torch.testing import assert_close

import kairostep as ks
from kairostep.arguments import arguments_of, writable
from kairostep.experiments import Component, preset
from kairostep.experiments.config import with_overrides
from kairostep.experiments.experiment import make_objective
from kairostep.experiments.parts import check_options, make
from kairostep.registry import Registry, samplers, weightings

SAMPLERS, WEIGHTINGS = samplers.registered, weightings.registered


def test_every_sampler_of_the_library_has_a_name() -> None:
    exported = [
        value for value in vars(ks).values() if inspect.isclass(value) and issubclass(value, ks.TimestepSampler)
    ]
    assert set(SAMPLERS.values()) == set(exported) - {ks.TimestepSampler}


def test_every_weighting_of_the_library_has_a_name() -> None:
    makers = {name for name, value in vars(ks).items() if getattr(value, "__module__", "").endswith(".weighting")}
    makers = {name for name in makers if inspect.isfunction(getattr(ks, name))}
    assert set(WEIGHTINGS) == makers - {"as_weighting"} | {"density"}  # which is as_weighting of a sampler by name


def value_of(hint: Any) -> tuple[str, Any]:
    """Return how a value of this type is written, and the value."""
    written = {bool: ("true", True), int: ("3", 3), float: ("2.5e-1", 0.25), str: ("network", "network")}
    written |= {int | None: ("null", None), float | None: ("2.5e-1", 0.25), bool | None: ("false", False)}
    written |= {tuple[float, ...]: ("[1, 2]", (1.0, 2.0))}
    return written[hint]


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_option_of_a_sampler_is_reachable_and_decoded(name: str) -> None:
    everything = arguments_of(SAMPLERS[name])
    everything |= arguments_of(ks.Probing) if "probing" in everything else {}
    options = samplers.options_of(name)
    left_out = {key for key in everything if key not in options} - set(samplers.given)
    assert [key for key in left_out if writable(everything[key].hint) is not None] == []
    assert not set(options) & set(samplers.given)
    for option, argument in options.items():
        text, value = value_of(argument.hint)
        required = [f"--sampler.{key}={value_of(a.hint)[0]}" for key, a in options.items() if a.required]
        config = with_overrides(preset("digits"), [f"--sampler={name}", *required, f"--sampler.{option}={text}"])
        found = check_options(samplers, config.sampler)[option]
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize(
    ("settings", "attribute", "value"),
    [
        (["--sampler=adaptive", "--sampler.floor=0.2"], lambda s: s.floor, 0.2),
        (["--sampler=adaptive", "--sampler.policy=pair"], lambda s: type(s.policy), ks.ConstantBeta),
        (["--sampler=adaptive"], lambda s: type(s.policy), ks.BetaPolicy),
        (["--sampler=adaptive", "--sampler.standardised=false"], lambda s: s.standardised, False),
        (["--sampler=adaptive", "--sampler.bounded=false"], lambda s: s.policy.to_beta.bounded, False),
        (["--sampler=loss_second_moment", "--sampler.history=4"], lambda s: s.history, 4),
        (["--sampler=speed", "--sampler.k=2", "--sampler.tau=0.5"], lambda s: s.mass[0] / s.mass[-1], 2.0),
        (["--sampler=speed", "--sampler.mirrored=false"], lambda s: s.mirrored, False),
        (["--sampler=infonoise", "--sampler.unbiased"], lambda s: s.table.beta, 1.0),
        (["--sampler=root_loss"], lambda s: s.loss_weight, None),
        (
            ["--sampler=curriculum", *NEEDED["curriculum"], "--sampler.then=root_loss"],
            lambda s: type(s.then),
            ks.RootLoss,
        ),
        (["--sampler=tabulated", "--sampler.mass=1,2,1"], lambda s: s.density(3).tolist(), [0.25, 0.5, 0.25]),
    ],
)
def test_options_arrive_in_the_sampler(settings: list[str], attribute: Callable[[Any], Any], value: object) -> None:
    assert attribute(built(*settings).sampler) == value


def test_a_curriculum_counts_optimizer_steps() -> None:
    sampler = built("--sampler=curriculum", "--sampler.start=2", "--sampler.end=6", "--accumulate=4").sampler
    assert isinstance(sampler, ks.Curriculum)
    shares = []
    for _ in range(7):
        shares.append(float(sampler.share()))
        for _ in range(4):
            sampler.sample(torch.zeros(2, 1))
    assert shares == [0, 0, 0, 0.25, 0.5, 0.75, 1]


def test_the_reward_is_the_bound_or_the_loss() -> None:
    t = torch.linspace(0.05, 0.95, 10)
    bound = built("--sampler=adaptive", "--prediction=v", "--weighting=min_snr").sampler
    assert isinstance(bound, ks.Adaptive)
    process = ks.DiscreteProcess.linear()
    factor = ks.vlb(process)(process.log_snr(t), ks.V) / ks.min_snr()(process.log_snr(t), ks.V)
    assert_close(bound.reward_weight(t), factor)
    loss = built("--sampler=adaptive", "--sampler.reward=loss").sampler
    assert isinstance(loss, ks.Adaptive)
    assert_close(loss.reward_weight(t), torch.ones(10))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--sampler=adaptve"], r"unknown sampler adaptve: did you mean adaptive\?"),
        (["--sampler=zzz"], "unknown sampler zzz: valid are adaptive, beta, .*, uniform"),
        (["--process=cosin"], r"unknown process cosin: did you mean cosine\?"),
        (["--weighting=zzz"], "unknown weighting zzz: valid are constant, debias, density, edm, min_snr, p2, soft_min"),
        (["--prediction=eps"], r"unknown prediction eps: did you mean epsilon\?"),
        (["--prediction=zzz"], "unknown prediction zzz: valid are epsilon, x0, v, velocity, edm"),
        (["--network=unett"], r"unknown network unett: did you mean unet\?"),
        (["--data=digit"], r"unknown data digit: did you mean digits\?"),
        (["--sampler=adaptive", "--sampler.flor=1"], r"unknown option of sampler adaptive: flor: did you mean floor\?"),
        (["--weighting=debias", "--weighting.k=1"], "unknown option of weighting debias: k: valid are none"),
        (["--data.size=8"], "unknown option of data digits: size: valid are flip"),
        (["--sampler=beta", "--sampler.a=1"], "sampler beta needs b: pass --sampler.b=..."),
        (["--data=cifar10"], "data cifar10 needs path: pass --data.path=..."),
        (["--data=images"], "data images needs folder: pass --data.folder=..."),
        (["--sampler=adaptive", "--sampler.every"], "--sampler.every must be a whole number, got True"),
        (["--sampler=adaptive", "--sampler.floor=low"], "--sampler.floor must be a number or null, got 'low'"),
        (["--sampler=adaptive", "--sampler.floor=2"], r"floor must be in \[0, 1\), got 2"),
        (["--sampler=adaptive", "--sampler.policy=net"], "sampler.policy must be one of 'network', 'pair', got 'net'"),
        (["--sampler=adaptive", "--sampler.reward=x"], "sampler.reward must be one of 'vlb', 'loss', got 'x'"),
        (["--sampler=tabulated", "--sampler.mass=3"], r"--sampler.mass must be a list, \[a number, \.\.\.\], got 3"),
        (["--network.multipliers=[1,1.5]"], r"--network.multipliers must be a list, \[a whole number, \.\.\.\], got"),
        (["--process.num_steps=null"], "--process.num_steps must be a whole number, got None"),
        (["--process.num_steps=20"], "sample_steps must be at most the 20 steps of the process, got 50: pass --sample"),
        (["--sampler=curriculum", "--sampler.start=1"], "sampler curriculum needs end: pass --sampler.end=..."),
        (
            ["--sampler=curriculum", *NEEDED["curriculum"], "--sampler.first=adaptive"],
            "sampler.first must be one of 'infonoise', .*, 'uniform', got 'adaptive'",
        ),
        (["--sampler=progress"], "sampler progress was removed, since no setting of it beat uniform draws: take root_"),
        (["--sampler=adaptive", "--pairs=true"], "pairs trade images between neighbours in t, so that a sampler must "),
        (["--stable_target=2000"], "stable_target draws from 1500 images that are kept on the device, got 2000: pass"),
        (["--stable_target=9", "--label_dropout=0.1"], "stable_target averages over images of all classes, so that"),
        (
            ["--sampler=speed", "--weighting=min_snr"],
            "a loss is weighted once, got sampler speed, .* min_snr",
        ),
        (["--sampler=speed", "--prediction=v"], "meant for an epsilon loss, got prediction v: pass --prediction=epsi"),
        (["--sampler=speed", "--process=flow"], "meant for an epsilon loss, got prediction velocity: pass --predict"),
        (
            ["--sampler=curriculum", *NEEDED["curriculum"], "--sampler.first=speed", "--weighting=p2"],
            "a loss is weighted once, got sampler speed",
        ),
        (["--precision=fp16"], "precision fp16 needs a GPU, got a CPU: pass --precision=fp32, or bf16"),
    ],
)
def test_a_wrong_name_or_option_is_told_with_the_right_one(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        built(*settings)
    assert "\n" not in str(raised.value)


def test_a_wrong_name_is_told_before_data_is_read() -> None:
    with pytest.raises(ValueError, match="unknown sampler adaptve"):
        built("--data=images", "--data.folder=nowhere", "--data.size=8", "--sampler=adaptve")
    with pytest.raises(ValueError, match="unknown option of network unet: chanels"):
        built("--data=images", "--data.folder=nowhere", "--data.size=8", "--network.chanels=8")


def test_makers_get_what_they_ask_for_of_the_given() -> None:
    def maker(seed: int, *, size: int = 3) -> tuple[int, int]:
        return seed, size

    things = Registry("thing", given=("seed",))
    things.register("one")(maker)
    assert make(things, Component("one", {"size": "4"}), seed=7, shape=(1,)) == (7, 4)


def test_a_density_can_be_the_weighting_of_a_run() -> None:
    config = with_overrides(preset("digits-flow"), ["--weighting=density", "--weighting.of=mode"])
    _, objective = make_objective(config)
    t = torch.tensor([0.1, 0.5])
    assert_close(objective.weight(t), 4000 * ks.Mode().density(4000)[(t * 4000).long()])
    with pytest.raises(ValueError, match="must name a fixed density, got root_loss, which learns"):
        make_objective(with_overrides(config, ["--weighting.of=root_loss"]))
