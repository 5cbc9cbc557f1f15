"""Every preset builds, and those of the paper have the numbers of its Tables 7, 8 and 9."""

import csv
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, VQModel
from PIL import Image
from torch.testing import assert_close

from kairostep.data import InMemory, LatentSet
from kairostep.diffusion import EPSILON, VELOCITY, DiscreteProcess, EDMProcess, FlowProcess
from kairostep.experiments import PRESETS, Config, Experiment, build, preset
from kairostep.experiments.config import with_overrides
from kairostep.experiments.experiment import make_network
from kairostep.registry import datasets
from kairostep.timesteps import Adaptive, LogNormalSigma, RootLoss

CPU = torch.device("cpu")
SWEEPS = Path(__file__).parents[2] / "results" / "presets"
SHAPES = {"fashion_mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
SMALLER = {  # networks that keep the preset's shape but are quick to make
    "unet": ["--network.channels=32"],
    "uvit": ["--network.hidden_size=16", "--network.depth=2", "--network.num_heads=2"],
    "dit": ["--network.hidden_size=16", "--network.depth=1", "--network.num_heads=2"],
}


def zeros(*shape: int, num_classes: int = 10) -> InMemory:
    labels = torch.arange(6) % num_classes if num_classes else None
    return InMemory(torch.zeros(6, *shape, dtype=torch.uint8), labels, num_classes=num_classes)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder with two classes of images, and tiny autoencoders of LDM's kinds: VQ-f4 and KL-f8."""
    place = tmp_path_factory.mktemp("places")
    for name in ("cats", "dogs"):
        (place / "images" / name).mkdir(parents=True)
        Image.new("RGB", (256, 256), "grey").save(place / "images" / name / "one.png")
    for kind, levels, channels in ((VQModel, 3, 3), (AutoencoderKL, 4, 4)):
        autoencoder = kind(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=(2,) * levels,
            norm_num_groups=1,
            layers_per_block=1,
            latent_channels=channels,
        )
        autoencoder.save_pretrained(place / kind.__name__)
    return {"folder": place / "images", "VQModel": place / "VQModel", "AutoencoderKL": place / "AutoencoderKL"}


def where(config: Config, places: dict[str, Path]) -> list[str]:
    """Return the settings that a user has to make: where data and autoencoder are."""
    autoencoder = {"vq-f4": "VQModel", "kl-f8": "AutoencoderKL", None: None}[config.autoencoder]
    settings = [f"--data.folder={places['folder']}"] if config.data.name == "images" else []
    settings += ["--data.path=x"] if config.data.name == "cifar10" else []
    return settings + ([f"--autoencoder={places[autoencoder]}"] if autoencoder else [])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds(
    name: str, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stub(split: str, path: str = "", folder: str = "") -> InMemory:
        return zeros(*SHAPES[data])

    config = preset(name)
    data = config.data.name
    if data in SHAPES:
        monkeypatch.setitem(datasets._registered, data, stub)
    settings = [*where(config, places), *SMALLER[config.network.name], f"--cache={tmp_path}", "--workers=0"]
    experiment = build(with_overrides(config, settings), CPU)
    assert_builds_what_it_says(config, experiment)
    one = experiment.dataset.read(0)[0][None]
    x0 = experiment.dataset.to_x0(one, None)
    assert x0.shape == (1, *experiment.dataset.shape)
    cond = {"class_labels": torch.zeros(1, dtype=torch.long)} if config.label_dropout is not None else {}
    assert bool(experiment.objective(experiment.model, x0, torch.tensor([0.5]), **cond).isfinite().all())
    pixels = experiment.dataset.shape if config.autoencoder is None else (3, 256, 256)
    assert experiment.to_pixels(x0).shape == (1, *pixels)


def assert_builds_what_it_says(config: Config, experiment: Experiment) -> None:
    process = {"flow": FlowProcess, "edm": EDMProcess}.get(config.process.name, DiscreteProcess)
    sampler = {"adaptive": Adaptive, "log_normal_sigma": LogNormalSigma, "root_loss": RootLoss}[config.sampler.name]
    assert type(experiment.process) is process
    assert type(experiment.sampler) is sampler
    natural = {DiscreteProcess: EPSILON, FlowProcess: VELOCITY}
    expected = experiment.process.prediction if isinstance(experiment.process, EDMProcess) else natural[process]
    assert experiment.prediction == experiment.objective.prediction == expected
    assert experiment.config.prediction is not None
    assert isinstance(experiment.dataset, LatentSet) == (config.autoencoder is not None)
    assert experiment.num_classes == (2 if config.label_dropout is not None else 0)


def assert_has(thing: Any, **numbers: Any) -> None:
    assert {name: getattr(thing, name) for name in numbers} == numbers


def network_on_meta(name: str, *shape: int, num_classes: int = 0) -> torch.nn.Module:
    with torch.device("meta"):
        return make_network(preset(name), shape, num_classes)


def num_parameters(name: str, *shape: int, num_classes: int = 0) -> int:
    return sum(p.numel() for p in network_on_meta(name, *shape, num_classes=num_classes).parameters())


def test_cifar10_has_the_numbers_of_table_7() -> None:
    config = preset("cifar10-ddpm")
    assert config.process.name == "linear"
    assert config.process.options == {"num_steps": 1000, "beta_start": 0.0001, "beta_end": 0.02}
    network = {"channels": 128, "multipliers": [1, 2, 2, 2], "blocks": 2, "attention": [16], "dropout": 0.1}
    assert config.network.options == network
    epochs_of_390_batches = 2040 * 390
    assert_has(config, learning_rate=2e-4, batch_size=128, max_grad_norm=1.0, warmup_steps=5000, ema_decay=0.9999)
    assert_has(config, steps=epochs_of_390_batches, prediction=None, optimizer="adam", schedule="constant")
    assert_adaptive(config, learning_rate=1e-2)  # hidden: 128 by default
    assert num_parameters("cifar10-ddpm", 3, 32, 32) == 35_746_307


def test_celebahq_has_the_numbers_of_table_8() -> None:
    config = preset("celebahq-ldm")
    assert config.process.options["num_steps"] == 1000
    network = {"channels": 224, "multipliers": [1, 2, 3, 4], "blocks": 2, "dropout": 0.0}
    assert network.items() <= config.network.options.items()
    assert_has(config, optimizer="adamw", betas=(0.9, 0.999), learning_rate=1.92e-4, batch_size=24, ema_decay=0.9999)
    assert config.steps == 300 * 30_000 // 24
    assert config.data.options == {"size": 256}
    assert_adaptive(config, learning_rate=1e-3, hidden=256)
    assert 273e6 < num_parameters("celebahq-ldm", 3, 64, 64) < 275e6


def test_imagenet_has_the_numbers_of_table_9() -> None:
    config = preset("imagenet-uvit")
    assert (config.process.name, config.process.options) == ("cosine", {"num_steps": 1000})
    assert {"hidden_size": 1152, "num_heads": 16, "patch_size": 2}.items() <= config.network.options.items()
    assert_has(config, optimizer="adamw", betas=(0.99, 0.99), learning_rate=2e-4, batch_size=256, ema_decay=0.9999)
    assert config.steps == 2_100_000
    assert (config.weighting.name, config.weighting.options) == ("min_snr", {"gamma": 5.0})
    assert_adaptive(config, learning_rate=1e-3, hidden=256)
    assert 500e6 < num_parameters("imagenet-uvit", 4, 32, 32, num_classes=1000) < 502e6


def assert_adaptive(config: Config, **numbers: Any) -> None:
    """Check the sampler's part of the tables: f_S = 40, |Q| = 20, |S| = 3 in all of them."""
    assert config.sampler.name == "adaptive"
    common = {"entropy": 1e-2, "depth": 2, "every": 40, "queue_size": 20, "num_selected": 3}
    assert config.sampler.options == {**common, **numbers}


def test_the_adaptive_sampler_gets_the_numbers_of_its_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    def stub(split: str, path: str = "") -> InMemory:
        return zeros(3, 32, 32)

    monkeypatch.setitem(datasets._registered, "cifar10", stub)
    sampler = build(with_overrides(preset("cifar10-ddpm"), SMALLER["unet"]), CPU).sampler
    assert isinstance(sampler, Adaptive)
    assert_has(sampler, entropy=1e-2, num_steps=1000)
    assert_has(sampler.probing, every=40)
    assert sampler.queue.selected.shape == (3,)
    assert sampler.queue.present.shape == (20,)
    assert hidden_of(sampler) == [128, 128]
    as_published = with_overrides(preset("cifar10-ddpm"), [*SMALLER["unet"], "--sampler.as_published=true"])
    experiment = build(as_published, CPU)
    assert hidden_of(experiment.sampler) == [256, 256]  # the released code's
    assert experiment.config.sampler.options["hidden"] == 256
    x0 = torch.zeros(2, 3, 32, 32)
    assert_close(experiment.sampler.policy(x0).a, torch.full((2,), 0.97409), rtol=0, atol=1e-5)
    given = build(with_overrides(as_published, ["--sampler.hidden=64"]), CPU)
    assert hidden_of(given.sampler) == [64, 64]


def hidden_of(sampler: Any) -> list[int]:
    """Return the units of the policy's hidden layers."""
    return [module.out_features for module in sampler.policy.hidden if hasattr(module, "out_features")]


@pytest.mark.parametrize("name", ["cifar10-small", "cifar10-flow", "cifar10-edm"])
def test_the_small_network_for_cifar10_has_7_million_parameters(name: str) -> None:
    assert 6e6 < num_parameters(name, 3, 32, 32) < 8e6


def test_dit_is_dit_b() -> None:
    model = network_on_meta("imagenet-dit", 4, 32, 32, num_classes=1000)
    embeddings = {name: p.numel() for name, p in model.named_parameters() if ".norm1.emb." in name}
    first = sum(num for name, num in embeddings.items() if "blocks.0." in name)
    total = sum(p.numel() for p in model.parameters())
    assert 129e6 < total - sum(embeddings.values()) + first < 132e6  # 130M; diffusers has a copy in each of the blocks


def test_weights_are_a_function_of_the_seed_and_the_global_stream_is_left_alone() -> None:
    config = preset("digits")
    before = torch.get_rng_state()
    one, same, other = (make_network(replace(config, seed=seed), (1, 8, 8), 0) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (one, same, other)]
    assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert not torch.equal(weights[0], weights[2])


def test_samples_that_are_not_square_are_refused() -> None:
    with pytest.raises(ValueError, match="samples must be square, got 8 x 16: crop them first"):
        make_network(preset("digits"), (1, 8, 16), 0)


def swept_rates() -> dict[str, tuple[float, float, str]]:
    """Return the old rate, the new rate and the ratio of losses of each preset in the table of results/presets."""
    text = (SWEEPS / "README.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (\S+) \| \*\*(\S+)\*\* \| ([^|]+) \|", text, flags=re.MULTILINE)
    return {name: (float(old), float(new), ratio) for name, old, new, ratio in rows}


def test_presets_train_at_the_rates_that_sweeps_found() -> None:
    rates = swept_rates()
    small = {"digits", "digits-flow", "digits-edm", "fashion-mnist", "images", "images-flow"}
    assert set(rates) == small | {"cifar10-small", "cifar10-flow", "cifar10-edm"}
    assert {name: preset(name).learning_rate for name in rates} == {name: new for name, (_, new, _) in rates.items()}


@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*_by_step.csv")), ids=lambda path: path.stem)
def test_the_table_of_sweeps_has_the_ratios_of_its_runs(path: Path) -> None:
    """The geometric mean over seeds of final losses, new rate over old; no seed ends above."""
    old, new, told = swept_rates()[path.stem.removesuffix("_by_step")]
    with path.open() as file:
        ends = {
            (float(row["learning_rate"]), row["seed"], row["arm"]): row for row in csv.DictReader(file)
        }  # last step
    finals = {
        rate: [
            float(row["held_out_loss"])
            for key, row in sorted(ends.items())
            if key[0] == rate and "cosine" not in key[2]
        ]
        for rate in (old, new)
    }
    ratios = [one / other for one, other in zip(finals[new], finals[old], strict=True)]
    assert len(ratios) == 3
    assert max(ratios) < 1
    assert told.startswith(f"{math.exp(sum(map(math.log, ratios)) / 3):.3f} (")
