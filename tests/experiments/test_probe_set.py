"""A probe set never changes, whatever the size of the data, and is asked with the labels that training has."""

import pytest
import torch
from torch.testing import assert_close

import kairostep as ks
from kairostep.data import InMemory
from kairostep.experiments import build, preset
from kairostep.experiments.config import with_overrides
from kairostep.experiments.probe_set import ProbeSet

CPU = torch.device("cpu")
OBJECTIVE = ks.Objective(ks.FlowProcess(), ks.VELOCITY)


class Network(torch.nn.Module):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, torch.Tensor]] = []

    def forward(self, x: torch.Tensor, t: torch.Tensor, **cond: torch.Tensor) -> torch.Tensor:
        """Return nothing but zeros."""
        self.asked.append({"x": x, "t": t, **cond})
        return torch.zeros_like(x)


def images(num: int) -> InMemory:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (num, 1, 4, 4), generator=generator, dtype=torch.uint8)
    return InMemory(pixels, torch.arange(num) % 10, num_classes=10, flip=True)


@pytest.mark.parametrize("num_images", [1, 3, 128, 1000])
def test_a_set_of_any_size_gives_as_many_probes(num_images: int) -> None:
    probe = ProbeSet(OBJECTIVE, Network(), images(num_images), 128, with_classes=False)
    assert probe.x0.shape == (128, 1, 4, 4)
    assert len(probe.x0.flatten(1).unique(dim=0)) == min(num_images, 128)
    assert probe(torch.arange(128), torch.linspace(0.1, 0.9, 128)).shape == (128,)


def test_labels_come_with_their_images() -> None:
    network = Network()
    data = images(1000)
    probe = ProbeSet(OBJECTIVE, network, data, 20, with_classes=True)
    rows = torch.tensor([3, 7, 19])
    probe(rows, torch.full((3,), 1e-6))  # hardly any noise
    pixels, labels = data.read_all()
    for image, label in zip(network.asked[0]["x"], network.asked[0]["class_labels"], strict=True):
        which = (data.to_x0(pixels, None) - image).abs().flatten(1).sum(1).argmin()
        assert int(labels[which]) == int(label)


def test_progress_on_fewer_images_than_probes_trains() -> None:
    """The digits that are held out stand for a small set: 297 of them, 400 probes."""
    settings = ["--sampler=progress", "--sampler.num_probes=400", "--network.channels=8", "--network.multipliers=[1]"]
    experiment = build(with_overrides(preset("digits"), [*settings, "--network.attention=[]"]), CPU)
    small = experiment.held_out
    assert small is not None
    probe = ProbeSet(experiment.objective, experiment.model, small, 400, with_classes=False)
    sampler = ks.Progress(probe=probe, num_probes=400, every=1)
    x0 = probe.x0[:8]
    for _ in range(3):
        drawn = sampler.sample(x0)
        with sampler.observe(x0, drawn, torch.ones(8)), torch.no_grad():
            for parameter in experiment.model.parameters():
                parameter.mul_(0.99)
    assert int(sampler.diagnostics()["probe_evaluations"]) == 1200
    assert_close(sampler.density(10).sum(), torch.tensor(1.0))
    assert int(sampler.num_measured.min()) == 2


@pytest.mark.parametrize("batch_size", [4, 8, 24, 32, 128, 1024])
def test_probes_cost_at_most_two_forward_passes_of_a_batch_in_40_steps(batch_size: int) -> None:
    settings = ["--sampler=progress", f"--batch_size={batch_size}", "--network.channels=8", "--network.multipliers=[1]"]
    sampler = build(with_overrides(preset("digits"), [*settings, "--network.attention=[]"]), CPU).sampler
    assert isinstance(sampler, ks.Progress)
    assert sampler.every >= 40
    assert len(sampler.last) * 40 / sampler.every <= 2 * batch_size
