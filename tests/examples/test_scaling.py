"""Steps on many GPUs, on paper: the formulas, what was measured in its place; and the bytes of a training step."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("speed.scaling")


def test_an_exchange_in_one_machine_is_a_ring(scaling: ModuleType) -> None:
    assert scaling.all_reduce_ms(26e6, 1, scaling.INFINIBAND) == 0
    expected = 2 * 7 / 8 * 26e6 / (0.7 * 450e9) + 14 * 5e-6
    assert scaling.all_reduce_ms(26e6, 8, scaling.ETHERNET) == pytest.approx(1000 * expected)


def test_between_machines_each_gpu_exchanges_an_eighth_by_the_faster_way(scaling: ModuleType) -> None:
    inside = scaling.all_reduce_ms(26e6, 8, scaling.INFINIBAND)
    ring = 2 * 7 / 8 * 26e6 / 8 / (0.7 * 50e9) + 14 * 10e-6
    tree = 2 * 26e6 / 8 / (0.7 * 50e9) + 6 * 10e-6
    assert scaling.all_reduce_ms(26e6, 64, scaling.INFINIBAND) == pytest.approx(inside + 1000 * min(ring, tree))


def test_measured_steps_are_taken_and_others_lie_on_their_line(scaling: ModuleType) -> None:
    small, large = scaling.networks()
    assert small.compute_ms(128) == pytest.approx(13.0, abs=0.05)
    assert small.compute_ms(256) == pytest.approx(21.3, abs=0.05)
    assert large.compute_ms(128) == pytest.approx(28.3, abs=0.05)
    line = scaling.Network("line", 1, {100: 10.0, 200: 15.0, 300: 20.0})
    assert line.compute_ms(0) == pytest.approx(5)
    assert line.compute_ms(150) == pytest.approx(12.5)


def test_efficiency_falls_with_the_number_of_gpus(scaling: ModuleType) -> None:
    for total in (None, scaling.STRONG_BATCH):
        shares = [float(row[-1].split(", ")[1].removesuffix(" %")) for row in scaling.scaling_rows(total)]
        for network in (shares[:4], shares[4:]):
            assert network[0] == 100
            assert network == sorted(network, reverse=True)


def test_the_bytes_of_a_parameter_are_those_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    memory = importlib.import_module("speed.memory")
    counted = json.loads((ROOT / "results" / "memory" / "cpu.json").read_text())
    assert memory.bytes_per_parameter() == counted["bytes per parameter"]
    config, shape = memory.preset("cifar10-small"), memory.SHAPES["cifar10-small"]
    found, expected = memory.count_network(config, *shape), counted["networks"]["cifar10-small"]
    assert found["parameters"] == expected["parameters"]
    assert found["bytes per image"] == pytest.approx(expected["bytes per image"], rel=0.1)  # versions save otherwise
