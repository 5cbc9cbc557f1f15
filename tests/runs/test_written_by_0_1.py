"""A run directory that version 0.1 wrote goes on: it is resumed, generated from, evaluated and reported.

`written_by_0_1` is what `kairostep train digits` of commit c977942 left behind, with these settings:

    --steps=20 --batch_size=32 --log_every=5 --density_every=10 --evaluate_every=10 --held_out_images=32
    --network.channels=8 --network.multipliers=[1,1] --network.blocks=1 --network.attention=[]
    --sample_steps=4 --checkpoint_every=10 --keep_checkpoints=1
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import forget_accelerators

from kairostep.cli import main
from kairostep.evaluation import features
from kairostep.runs import RunHistory, load_trained

WRITTEN = Path(__file__).parent / "written_by_0_1"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of it in the working directory, where no Inception network is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(features, "PACKAGE", "no_such_package")
    forget_accelerators()
    shutil.copytree(WRITTEN, "run")
    return Path("run")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_is_resumed(run: Path) -> None:
    before = lines_of(run / "metrics.jsonl")
    main(["train", "--config", "run/config.yaml", "--steps=24", "--workers=0"])
    after = lines_of(run / "metrics.jsonl")
    assert after[: len(before)] == before
    assert after[-1]["step"] == 24
    assert math.isfinite(after[-1]["loss"])
    assert (load_trained(WRITTEN).step, load_trained(run).step) == (20, 24)


def test_images_are_generated_and_measured(run: Path) -> None:
    main(["generate", "run", "--num=4", "--steps=4"])
    assert len(list(run.glob("generated/*/*.png"))) == 4
    main(["evaluate", "run", "--num=4", "--cache=cache", "--held_out_images=16"])
    measured = {line["what"]: line for line in lines_of(run / "evaluations.jsonl")}
    assert measured["vlb_bits_per_dim"]["checkpoint"] == 20


def test_its_metrics_are_reported(run: Path) -> None:
    main(["report", "run", "--output=page.html"])
    assert "root_loss" in Path("page.html").read_text()
    history = RunHistory.read(run)
    assert (history.state, history.problems) == ("finished", [])
    assert [point.step for point in history.held_out] == [10, 20]


def test_the_exported_model_is_that_of_the_checkpoint() -> None:
    from diffusers import UNet2DModel

    exported, trained = UNet2DModel.from_pretrained(WRITTEN / "model" / "unet"), load_trained(WRITTEN)
    for name, value in trained.model.state_dict().items():
        assert torch.equal(exported.state_dict()[name], value)
