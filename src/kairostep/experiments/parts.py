"""Makes the parts of an experiment from their names and options.

`kairostep.registry` knows the names. The options of a part are the arguments of its class or function: their names,
types and defaults are read from the signature.
"""

from typing import Any

from torch import nn

import kairostep.networks  # noqa: F401  # registers their names
from kairostep.arguments import Argument, arguments_of, bundle
from kairostep.data import Dataset
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
    Weighting,
)
from kairostep.diffusion.process import Process
from kairostep.experiments.config import decode
from kairostep.experiments.settings import Component, Config
from kairostep.registry import Registry, datasets, networks, processes, samplers, unknown, weightings
from kairostep.renamed_options import new_names
from kairostep.timesteps import SamplerContext, TimestepSampler

FLOW_TIME_SCALE = 1000.0  # diffusers' flow schedulers pass t * 1000 to networks, which suits their time embeddings
FOLDER_HINT = "; a folder of images is trained on with `kairostep train images --data.folder=FOLDER`"
PREDICTIONS: dict[str, Prediction] = {"epsilon": EPSILON, "x0": X0, "v": V, "velocity": VELOCITY}

for _schedule in ("linear", "cosine", "quadratic", "scaled_linear"):
    processes.register(_schedule)(getattr(DiscreteProcess, _schedule))
processes.register("edm")(EDMProcess)


@processes.register("flow")
def flow(time_scale: float = FLOW_TIME_SCALE) -> FlowProcess:
    """Return the straight path. The network gets t * time_scale."""
    return FlowProcess(time_scale=time_scale)


def make_process(component: Component) -> Process:
    """Return the noising process."""
    process: Process = make(processes, component)
    return process


def make_weighting(component: Component, process: Process) -> Weighting:
    """Return the weighting. If it takes a `process`, it gets this one."""
    weighting: Weighting = make(weightings, component, process=process)
    if not callable(weighting):
        raise ValueError(
            f"weighting {component.name} must return a function (log_snr, prediction) -> factor, got {weighting!r}: "
            "return for instance kairostep.min_snr()"
        )
    return weighting


def make_sampler(component: Component, experiment: SamplerContext) -> TimestepSampler:
    """Return the sampler, made by its `from_experiment`."""
    options = check_options(samplers, component)
    kind: type[TimestepSampler] = samplers.find(component.name)
    sampler = kind.from_experiment(experiment, **bundle(kind, options))
    if not isinstance(sampler, TimestepSampler):
        raise ValueError(f"from_experiment of sampler {component.name} must return a sampler, got {sampler!r}")
    return sampler


def make_network(component: Component, sample_size: int, in_channels: int, num_classes: int | None) -> nn.Module:
    """Return the network for samples (in_channels, sample_size, sample_size), without classes if that is None."""
    given = {"sample_size": sample_size, "in_channels": in_channels, "num_classes": num_classes}
    if num_classes is not None and "num_classes" not in arguments_of(networks.find(component.name)):
        raise ValueError(
            f"network {component.name} takes no num_classes, got label_dropout: pass --label_dropout=null, or give it "
            "that argument and forward(x, time, class_labels=)"
        )
    network = make(networks, component, **given)
    if not isinstance(network, nn.Module):
        raise ValueError(f"network {component.name} must be a torch Module, got {network!r}: return one")
    return network


def load_dataset(component: Component, split: str) -> Dataset:
    """Return the split "train" or "test" of the data."""
    if "split" not in arguments_of(datasets.find(component.name)):
        raise ValueError(
            f'data {component.name} must take split, "train" or "test", got {component.name} without: '
            "add the argument, and raise kairostep.data.NothingHeldOut where there is no test part"
        )
    dataset = make(datasets, component, split=split)
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"data {component.name} must be a kairostep.data.Dataset, got {dataset!r}: return for instance "
            "kairostep.data.InMemory(pixels)"
        )
    return dataset


def make(registry: Registry, component: Component, **given: Any) -> Any:
    """Return the object that a component names, made with its options and the `given` arguments that it takes."""
    options = check_options(registry, component)
    maker = registry.find(component.name)
    taken = arguments_of(maker)
    return maker(**{name: value for name, value in given.items() if name in taken}, **bundle(maker, options))


def check_options(registry: Registry, component: Component) -> dict[str, Any]:
    """Return the component's options in their types. Unknown and missing options raise ValueError."""
    kind, valid, options = registry.kind, registry.options_of(component.name), {}
    for name, value in component.options.items():
        if name == "seed":
            raise ValueError(f"the seed is one for the whole experiment: pass --seed={value}")
        if name in (renamed := new_names(kind, component.name)):
            raise ValueError(f"--{kind}.{name} is now --{kind}.{renamed[name]}: pass --{kind}.{renamed[name]}={value}")
        if name not in valid:
            hint = FOLDER_HINT if kind == "data" and name in datasets.options_of("images") else ""
            raise ValueError(unknown(f"option of {kind} {component.name}:", name, valid) + hint)
        options[name] = decode(f"--{kind}.{name}", valid[name].hint, value)
    missing = [name for name, argument in valid.items() if argument.required and name not in options]
    if missing:
        raise ValueError(f"{kind} {component.name} needs {missing[0]}: pass --{kind}.{missing[0]}=...")
    return options


def with_defaults(registry: Registry, component: Component) -> Component:
    """Return the component with all options. A run stores them, so that a later default does not change it."""
    defaults = {name: plain_default(option) for name, option in registry.options_of(component.name).items()}
    known = {name: value for name, value in defaults.items() if isinstance(value, bool | int | float | str | list)}
    options = {**known, **component.options}
    complete = getattr(registry.find(component.name), "complete_options", dict)
    return Component(component.name, complete(options))


def plain_default(option: Argument) -> Any:
    """Return the default of an option as YAML writes it."""
    return list(option.default) if isinstance(option.default, tuple) else option.default


def natural_prediction(process: Process) -> str:
    """Return the name of the usual prediction under this process."""
    return {DiscreteProcess: "epsilon", FlowProcess: "velocity", EDMProcess: "edm"}[type(process)]


def make_prediction(name: str, process: Process) -> Prediction:
    """Return the prediction of this name. `edm` is the target that belongs to the EDM process."""
    if name == "edm":
        if not isinstance(process, EDMProcess):
            raise ValueError(
                f"prediction edm belongs to process edm, got a {type(process).__name__}: pass --prediction=v"
            )
        return process.prediction
    if name not in PREDICTIONS:
        raise ValueError(unknown("prediction", name, [*PREDICTIONS, "edm"]))
    return PREDICTIONS[name]


def sampler_context(config: Config, objective: Objective, model: nn.Module, shape: tuple[int, ...]) -> SamplerContext:
    """Return what `from_experiment` of a sampler gets."""
    return SamplerContext(objective, model, shape, seed=config.seed, accumulate=config.accumulate)
