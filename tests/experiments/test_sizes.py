"""Sizes that cannot be meant are refused before anything of that size is made; large ones that can be are not."""

import time
from collections.abc import Callable

import pytest
import torch

from kairostep.checks import count, finite, nonnegative, positive
from kairostep.experiments import Config, build, experiment, preset
from kairostep.experiments.config import with_overrides
from kairostep.experiments.experiment import host_memory, make_network, make_objective
from kairostep.networks import ddpm_unet

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--process.num_steps=1e9"],
            "num_steps must be at most 10000000, got 1000000000: more cannot be meant, pass a",
        ),
        (["--process=cosine", "--process.num_steps=2147483648"], "num_steps must be at most 10000000, got 2147483648"),
        (["--network.blocks=2147483648"], "blocks must be at most 256, got 2147483648"),
        (["--network.channels=9223372036854775807"], "channels must be at most 65536, got 9223372036854775807"),
        (["--network.multipliers=[1000000]"], "multipliers must be at most 1024, got 1000000"),
        (["--network=dit", "--network.depth=2147483648"], "depth must be at most 1000, got 2147483648"),
        (["--network=uvit", "--network.hidden_size=1e18"], "hidden_size must be at most 131072, got 10+: more"),
        (["--network=uvit", "--network.mlp_ratio=1e30"], r"mlp_ratio must be in \(0, 1024\], got 1e\+30"),
        (["--sampler.num_bins=1e9"], "num_bins must be at most 1000000, got 1000000000"),
        (["--sampler=adaptive", "--sampler.hidden=1e9"], "hidden must be at most 65536, got 1000000000"),
        (["--sampler=adaptive", "--sampler.sweep_x0=1e9"], "sweep_x0 must be at most 1000000, got 1000000000"),
        (["--learning_rate=1e38"], r"learning_rate must be at most 1e\+30 in size, got 1e\+38"),
        (["--batch_size=1e9"], "batch_size must be at most 1000000, got 1000000000"),
        ([f"--steps={10**30}"], "steps must be at most 1000000000000000, got a number of 31 digits"),
    ],
)
def test_a_size_that_cannot_be_meant_is_refused_at_once(arguments: list[str], message: str) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=message):
        build(with_overrides(preset("digits"), arguments), CPU)
    assert time.monotonic() - began < 10


def test_weights_that_do_not_fit_into_memory_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_overrides(preset("digits"), ["--network.channels=65536"])
    with pytest.raises(
        ValueError, match=r"1 x the weights of a network must fit into memory, .* got unet of .*: lower"
    ):
        make_network(config, (1, 8, 8), 0)
    small = with_overrides(Config(), ["--network.channels=8", "--network.multipliers=[1]", "--network.attention=[]"])
    num_bytes = 4 * sum(p.numel() for p in make_network(small, (1, 8, 8), 0).parameters())
    monkeypatch.setattr(experiment, "host_memory", lambda: 5 * num_bytes)
    build(small, CPU)  # weights, average, gradients and two moments fit
    monkeypatch.setattr(experiment, "host_memory", lambda: 5 * num_bytes - 1)
    with pytest.raises(ValueError, match="5 x the weights of a network must fit into memory"):
        build(small, CPU)
    monkeypatch.setattr(experiment, "host_memory", lambda: None)
    build(small, CPU)


def test_a_machine_tells_its_memory() -> None:
    memory = host_memory()
    assert memory is None or 2**28 < memory < 2**50


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_million_steps_can_be_meant(name: str) -> None:
    _, objective = make_objective(with_overrides(Config(), [f"--process={name}", "--process.num_steps=1e6"]))
    assert objective.process.num_steps == 10**6


@pytest.mark.parametrize(
    ("network", "billions"),
    [
        (["--network=dit", "--network.hidden_size=4608", "--network.depth=40", "--network.num_heads=36"], 15),
        (["--network=uvit", "--network.hidden_size=8192", "--network.depth=64", "--network.num_heads=64"], 55),
        (
            [
                "--network.channels=768",
                "--network.multipliers=[1,2,4,8]",
                "--network.blocks=3",
                "--network.attention=[8]",
            ],
            5,
        ),
    ],
)
def test_billions_of_parameters_can_be_meant(
    network: list[str], billions: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def note(name: str, model: torch.nn.Module, copies: int) -> None:
        counted.append(sum(p.numel() for p in model.parameters()))
        raise InterruptedError  # before it is made

    monkeypatch.setattr(experiment, "check_memory", note)
    with pytest.raises(InterruptedError):
        make_network(with_overrides(Config(), network), (4, 64, 64), 0)
    assert counted[0] > billions * 1e9


def test_counting_parameters_changes_no_weights() -> None:
    config = with_overrides(Config(), ["--network.channels=8", "--network.multipliers=[1]", "--network.attention=[]"])
    torch.manual_seed(config.seed)
    by_hand = ddpm_unet(8, 1, channels=8, multipliers=(1,), attention=())
    made = make_network(config, (1, 8, 8), 0)
    for one, other in zip(made.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_counts_nothing_may_be_large() -> None:
    assert count("every", 10**12) == 10**12
    assert Config(seed=2**63 - 1).seed == 2**63 - 1
    with pytest.raises(ValueError, match="rows must be at most 5, got 6: more cannot be meant"):
        count("rows", 6, at_most=5)


@pytest.mark.parametrize("check", [positive, finite, nonnegative])
def test_numbers_that_float32_cannot_compute_with_are_refused(check: Callable[[str, float], float]) -> None:
    assert check("scale", 1e30) == 1e30
    with pytest.raises(ValueError, match=r"scale must be at most 1e\+30 in size, got 1e\+39: pass a smaller number"):
        check("scale", 1e39)
    with pytest.raises(ValueError, match="got a number of 401 digits"):
        check("scale", 10**400)
