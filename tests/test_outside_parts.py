"""Samplers, weightings, networks and data of somebody else's: one file and one line, through every command."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from documents import python_parts

import kairostep

SOURCE = str(Path(kairostep.__file__).parents[1])
SMALL = ["--network.channels=8", "--network.multipliers=[1]", "--network.attention=[]", "--network.blocks=1"]
SHORT = ["--batch_size=8", "--held_out_images=8", "--sample_steps=2", "--warmup_steps=0", "--checkpoint_every=2"]
RUN_ALL = """
import json, sys
from kairostep.cli import main
codes = []
for words in json.loads(sys.argv[1]):
    try:
        main(words)
        codes.append(0)
    except SystemExit as ended:
        codes.append(ended.code)
print("codes", codes)
"""
MINE = '''
import torch
from torch import nn

import kairostep as ks
from kairostep.data import InMemory


class Late(ks.Tabulated):
    """Favours noise, as much as `power` says."""

    def __init__(self, power: float = 1.0, *, seed: int = 0) -> None:
        super().__init__(((torch.arange(50) + 0.5) / 50) ** power, seed=seed)

    @classmethod
    def from_experiment(cls, experiment, *, strength: float = 2.0, **options):
        assert experiment.process.num_steps == 1000 and experiment.accumulate == 1
        return cls(strength * options.pop("power", 1.0), seed=experiment.seed)


def half(process, share: float = 0.5):
    assert process.num_steps == 1000
    return lambda log_snr, prediction: torch.full_like(log_snr, share)


class Small(nn.Module):
    def __init__(self, in_channels: int, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, in_channels, 3, padding=1)
        )

    def forward(self, x, time):
        return self.layers(x)


def stripes(split: str = "train", *, num: int = 32):
    pixels = torch.arange(8).mul(32).to(torch.uint8).expand(num if split == "train" else 8, 1, 8, 8)
    return InMemory(pixels.contiguous())
'''


@dataclass(frozen=True)
class Done:
    """How commands ended, and what they said."""

    codes: list[int]
    output: str
    errors: str


def kairostep_does(folder: Path, *commands: Sequence[str], path: str = "") -> Done:
    """Run commands, one after the other, in a new process that starts in a folder, as the installed script does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, path]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-P", "-c", RUN_ALL, json.dumps(commands)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    output, _, codes = ended.stdout.rpartition("codes ")
    return Done(json.loads(codes), output, ended.stderr)


def weights_of(run: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((run / "model").rglob("*.safetensors")))


def use_everywhere(folder: Path, settings: Sequence[str], path: str = "") -> str:
    """Train, go on in another process, generate, evaluate and report; return what that printed."""
    train = ["train", "digits", *SHORT, *settings]
    first = [[*train, "--steps=4", "--output=run"], [*train, "--steps=8", "--output=whole"]]
    assert kairostep_does(folder, *first, path=path).codes == [0, 0]
    second = kairostep_does(
        folder,
        [*train, "--steps=8", "--output=run"],
        ["generate", "run", "--num=4", "--steps=2"],
        ["evaluate", "run", "--held_out_images=4"],
        ["preview", *settings],
        ["report", "run", "--output=page.html"],
        ["train", "--help"],
        path=path,
    )
    assert second.codes == [0] * 6, second.errors
    assert weights_of(folder / "run") == weights_of(folder / "whole") != b""
    assert (folder / "page.html").stat().st_size > 1000
    return second.output


def test_one_file_and_one_entry_point_are_a_sampler(tmp_path: Path) -> None:
    package = tmp_path / "site"
    package.mkdir()
    (package / "triangle.py").write_text(python_parts("CONTRIBUTING.md")["CONTRIBUTING.md"][0])
    information = package / "triangle-0.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: triangle\nVersion: 0.1\n")
    (information / "entry_points.txt").write_text("[kairostep.samplers]\ntriangle = triangle:Triangle\n")
    settings = ["--sampler=triangle", "--sampler.unbiased=true", *SMALL]
    assert "tabulated, triangle, uniform" in use_everywhere(tmp_path, settings, path=str(package))
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["sampler"]
    assert kept == {"name": "triangle", "unbiased": True, "stratified": True}


def test_module_and_class_are_a_part_of_any_kind(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    settings = ["--sampler=mine:Late", "--sampler.power=1.5", "--weighting=mine:half", "--weighting.share=0.25"]
    settings += ["--network=mine:Small", "--network.width=6", "--data=mine:stripes", "--data.num=16"]
    use_everywhere(tmp_path, settings)
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert kept["sampler"] == {"name": "mine:Late", "power": 1.5, "strength": 2.0}
    assert kept["weighting"] == {"name": "mine:half", "share": 0.25}
    assert kept["network"] == {"name": "mine:Small", "width": 6}
    assert kept["data"] == {"name": "mine:stripes", "num": 16}
    (tmp_path / "mine.py").unlink()
    train = ["train", "--config=run/config.yaml", "--output=run", "--steps=9"]
    gone = kairostep_does(tmp_path, ["generate", "run"], train, ["report", "run", "--output=again.html"])
    assert gone.codes == [2, 2, 0]  # a report reads files alone
    told = "must be importable, got no module mine: start in the folder that holds mine, add that to PYTHONPATH, or"
    assert gone.errors.count(told) == 2
