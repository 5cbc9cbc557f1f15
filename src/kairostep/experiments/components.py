"""The one place that maps names to what an experiment makes of them.

Each table has a maker per name; samplers and weightings have the names of `kairostep.names`. A maker's arguments are
either `GIVEN`, which the experiment supplies, or options of the component, checked against the maker's signature and
decoded by its annotations: no default is written down twice.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kairostep.checks import choice, count
from kairostep.data import load_cifar10, load_digits, load_fashion_mnist, load_folder
from kairostep.diffusion import (
    EPSILON,
    VELOCITY,
    X0,
    DiscreteProcess,
    EDMProcess,
    FlowProcess,
    Objective,
    Prediction,
    V,
    vlb,
)
from kairostep.diffusion.process import Process
from kairostep.experiments.config import Component, decoded
from kairostep.names import SAMPLERS as SAMPLER_CLASSES
from kairostep.names import WEIGHTINGS as WEIGHTING_MAKERS
from kairostep.names import Argument, arguments_of, unknown
from kairostep.renamed_options import new_names
from kairostep.timesteps import (
    Adaptive,
    BetaPolicy,
    ConstantBeta,
    Curriculum,
    InfoNoise,
    LeastNoise,
    Probing,
    RootLoss,
    Tabulated,
    TimestepSampler,
)
from kairostep.timesteps.probe_plan import bundle_probing

FLOW_TIME_SCALE = 1000.0  # diffusers' flow schedulers tell networks t * 1000, which suits their time embeddings
GIVEN = {"process", "objective", "model", "parameters", "shape", "seed", "split"}  # supplied by the experiment ...
GIVEN |= {"sample_size", "in_channels", "out_channels", "num_classes"}  # ... for networks
GIVEN |= {"accumulate", "optimizer"}  # ... for samplers
GIVEN |= {"reward_weight", "loss_weight", "rule", "probing"}  # ... and what the makers below make of them


@dataclass(frozen=True)
class Passing:
    """A maker that hands further options on to another callable."""

    make: Callable[..., Any]
    on: Callable[..., Any]
    bundled: tuple[Callable[..., Any], ...] = ()  # what it makes of some of them first, to pass on as one


@dataclass(frozen=True)
class Deferred:
    """A maker that is imported when it is asked for: networks bring diffusers, which takes seconds."""

    module: str
    name: str

    def load(self) -> Callable[..., Any]:
        """Return the maker."""
        loaded: Callable[..., Any] = getattr(importlib.import_module(self.module), self.name)
        return loaded


Maker = Callable[..., Any] | Passing | Deferred


def flow(time_scale: float = FLOW_TIME_SCALE) -> FlowProcess:
    """Return the straight path, the network being told t * time_scale."""
    return FlowProcess(time_scale=time_scale)


def adaptive(
    process: Process,
    objective: Objective,
    model: nn.Module,
    shape: tuple[int, ...],
    seed: int,
    *,
    policy: str = "network",  # or "pair", which ignores x0
    reward: str = "vlb",  # or "loss", the objective that is trained
    hidden: int | None = None,  # 128, as published 256
    depth: int = 2,
    bounded: bool = True,  # a and b within 1/50..50; else the released softplus, as with as_published
    num_steps: int | None = None,  # as many as the process has, or 1000
    as_published: bool = False,
    **options: Any,
) -> Adaptive:
    """Return the paper's sampler; its policy sees x0 unless it is a pair, and is paid by the bound or by the loss."""
    choice("sampler.policy", policy, ("network", "pair"))
    choice("sampler.reward", reward, ("vlb", "loss"))
    hidden = hidden_units(as_published) if hidden is None else hidden
    made = (
        ConstantBeta(bounded=bounded)
        if policy == "pair"
        else BetaPolicy.for_input(shape, hidden, depth, bounded=bounded, seed=seed)
    )
    reward_weight = objective.reweighting(vlb(process)) if reward == "vlb" else None
    steps: int = getattr(process, "num_steps", 1000) if num_steps is None else num_steps
    options = bundle_probing(options)
    return Adaptive(made, reward_weight, num_steps=steps, model=model, as_published=as_published, seed=seed, **options)


def hidden_units(as_published: bool) -> int:
    """Return the width of a policy that is made for the user: of the paper's Table 7, or of the released code."""
    return 256 if as_published else 128


def infonoise(process: Process, objective: Objective, seed: int, **options: Any) -> InfoNoise:
    """Return InfoNoise for the loss that is trained."""
    return InfoNoise(process, objective.x0_weight, seed=seed, **options)


def root_loss(objective: Objective, seed: int, **options: Any) -> RootLoss:
    """Return root-loss importance sampling for the loss that is trained."""
    return RootLoss(loss_weight=_loss_weight(objective), seed=seed, **options)


def least_noise(objective: Objective, seed: int, **options: Any) -> LeastNoise:
    """Return draws by gradient size for the loss that is trained; the trainer names the optimizer."""
    return LeastNoise(loss_weight=_loss_weight(objective), seed=seed, **options)


def _loss_weight(objective: Objective) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the weight of a loss, None where it is 1 everywhere."""
    return objective.weight if bool((objective.weight((torch.arange(100) + 0.5) / 100) != 1).any()) else None


def curriculum(
    objective: Objective,
    accumulate: int,
    seed: int,
    *,
    start: int,
    end: int,
    first: str = "logit_normal",
    then: str = "uniform",
) -> Curriculum:
    """Return a curriculum, over optimizer steps, of two samplers with their default options.

    They have to do without the network.
    """
    samplers = [
        make_standalone(f"sampler.{key}", name, objective, seed) for key, name in (("first", first), ("then", then))
    ]
    count("sampler.start", start, at_least=0)
    count("sampler.end", end, at_least=start)
    return Curriculum(*samplers, start=start * accumulate, end=end * accumulate, seed=seed)


def make_standalone(key: str, name: str, objective: Objective, seed: int) -> TimestepSampler:
    """Return a sampler with its default options that needs nothing but the objective."""
    given = {"process": objective.process, "objective": objective, "seed": seed}
    choice(key, name, [name for name, maker in SAMPLERS.items() if _required(maker) <= set(given)])
    sampler: TimestepSampler = make("sampler", SAMPLERS, Component(name), **given)
    return sampler


def _required(maker: Maker) -> set[str]:
    return {name for name, argument in arguments_of(_calls(maker)[-1]).items() if argument.required}


def _calls(maker: Maker) -> list[Callable[..., Any]]:
    """Return the callables whose arguments a maker takes, the one to call last."""
    if isinstance(maker, Passing):
        return [*maker.bundled, maker.on, maker.make]
    return [maker.load() if isinstance(maker, Deferred) else maker]


def tabulated(mass: tuple[float, ...], seed: int, *, unbiased: bool = False, stratified: bool = True) -> Tabulated:
    """Return the sampler of a histogram, as in --sampler.mass=[1,2,1]."""
    return Tabulated(torch.tensor(mass), unbiased=unbiased, stratified=stratified, seed=seed)


PROCESSES: dict[str, Maker] = {
    "linear": DiscreteProcess.linear,
    "cosine": DiscreteProcess.cosine,
    "quadratic": DiscreteProcess.quadratic,
    "scaled_linear": DiscreteProcess.scaled_linear,
    "flow": flow,
    "edm": EDMProcess,
}
PREDICTIONS: dict[str, Prediction] = {"epsilon": EPSILON, "x0": X0, "v": V, "velocity": VELOCITY}
WEIGHTINGS: dict[str, Maker] = {**WEIGHTING_MAKERS}
SAMPLERS: dict[str, Maker] = {
    **SAMPLER_CLASSES,
    "tabulated": tabulated,
    "root_loss": Passing(root_loss, RootLoss),
    "least_noise": Passing(least_noise, LeastNoise),
    "infonoise": Passing(infonoise, InfoNoise),
    "adaptive": Passing(adaptive, Adaptive, bundled=(Probing,)),
    "curriculum": curriculum,
}
NETWORKS: dict[str, Maker] = {
    "unet": Deferred("kairostep.networks", "ddpm_unet"),
    "dit": Deferred("kairostep.networks", "dit"),
    "uvit": Deferred("kairostep.networks", "UViT2DModel"),
}
DATASETS: dict[str, Maker] = {
    "digits": load_digits,
    "fashion_mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
    "images": load_folder,
}


TABLES: dict[str, dict[str, Maker]] = {
    "data": DATASETS,
    "network": NETWORKS,
    "process": PROCESSES,
    "weighting": WEIGHTINGS,
    "sampler": SAMPLERS,
}


def natural_prediction(process: Process) -> str:
    """Return the name of what networks usually predict under this process."""
    return {DiscreteProcess: "epsilon", FlowProcess: "velocity", EDMProcess: "edm"}[type(process)]


def make_prediction(name: str, process: Process) -> Prediction:
    """Return the prediction of this name; `edm` is the network target that belongs to the process."""
    if name == "edm":
        if not isinstance(process, EDMProcess):
            raise ValueError(
                f"prediction edm belongs to process edm, got a {type(process).__name__}: pass --prediction=v"
            )
        return process.prediction
    if name not in PREDICTIONS:
        raise ValueError(unknown("prediction", name, [*PREDICTIONS, "edm"]))
    return PREDICTIONS[name]


def make(kind: str, table: Mapping[str, Maker], component: Component, **given: Any) -> Any:
    """Return what the component names, made with its options and with those of the `given` that its maker takes."""
    options = checked_options(kind, table, component)
    call = _calls(table[component.name])[-1]
    taken = arguments_of(call)
    return call(**{name: value for name, value in given.items() if name in taken}, **options)


def checked_options(kind: str, table: Mapping[str, Maker], component: Component) -> dict[str, Any]:
    """Return the component's options with the types they have; ValueError for unknown names and missing options."""
    if component.name not in table:
        raise ValueError(unknown(kind, component.name, table))
    valid, options = options_of(table[component.name]), {}
    for name, value in component.options.items():
        if name == "seed":
            raise ValueError(f"the seed is one for the whole experiment: pass --seed={value}")
        if name in (renamed := new_names(kind, component.name)):
            raise ValueError(f"--{kind}.{name} is now --{kind}.{renamed[name]}: pass --{kind}.{renamed[name]}={value}")
        if name not in valid:
            raise ValueError(unknown(f"option of {kind} {component.name}:", name, valid))
        options[name] = decoded(f"--{kind}.{name}", valid[name].hint, value)
    missing = [name for name, argument in valid.items() if argument.required and name not in options]
    if missing:
        raise ValueError(f"{kind} {component.name} needs {missing[0]}: pass --{kind}.{missing[0]}=...")
    return options


def with_defaults(table: Mapping[str, Maker], component: Component) -> Component:
    """Return the component with the options that were left out, as they are today: a later default changes no run."""
    defaults = {name: option.default for name, option in options_of(table[component.name]).items()}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    known = {name: value for name, value in plain.items() if isinstance(value, bool | int | float | str | list)}
    options = {**known, **component.options}
    if component.name == "adaptive" and options.get("hidden") is None:
        options["hidden"] = hidden_units(decoded("--sampler.as_published", bool, options["as_published"]))
    return Component(component.name, options)


def options_of(maker: Maker) -> dict[str, Argument]:
    """Return the arguments of a maker that are the user's to choose."""
    arguments = [item for call in _calls(maker) for item in arguments_of(call).items()]
    return {name: argument for name, argument in arguments if name not in GIVEN}
