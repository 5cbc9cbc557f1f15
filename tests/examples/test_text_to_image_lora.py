"""The end of the SDXL recipe: what a patch makes of the plain script, its checkpoints and its resume."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import forget_accelerators

from kairostep.integrations.patching import patch_script

FOLDER = Path(__file__).parents[2] / "examples" / "text_to_image_lora"


@pytest.fixture(autouse=True)
def _process_of_its_own() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        forget_accelerators()
        yield
        forget_accelerators()


def test_the_script_is_what_a_patch_makes_of_the_plain_one() -> None:
    assert (FOLDER / "with_sampler.py").read_text() == patch_script((FOLDER / "plain.py").read_text()).text


def test_a_run_goes_on_from_its_checkpoint_with_the_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str) -> dict[str, Any]:
        forget_accelerators()
        options = [f"--output_dir={tmp_path}", "--checkpointing_steps=2", "--snr_gamma=5", *arguments]
        monkeypatch.setattr(sys, "argv", ["with_sampler.py", *options])
        return runpy.run_path(str(FOLDER / "with_sampler.py"))

    first = run("2")
    saved = torch.load(tmp_path / "checkpoint-2" / "timestep_sampler_0.pt", weights_only=True)
    assert first["global_step"] == 2
    assert saved["name"] == "RootLoss"
    resumed = run("3", "--resume_from_checkpoint=checkpoint-2")
    assert resumed["global_step"] == 3
    assert resumed["timestep_sampler"].sampler.sampler.steps.advance() == 4  # three steps were learned from
    lora = [
        name for name, p in resumed["accelerator"].unwrap_model(resumed["unet"]).named_parameters() if p.requires_grad
    ]
    assert lora
    assert all("lora" in name for name in lora)
