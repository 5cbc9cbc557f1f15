"""The examples with other libraries: both scripts of each run, they differ in few lines, and the sampler learns."""

import difflib
import math
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerators import forget_accelerators

import kairostep as ks

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = sorted(path.parent for path in EXAMPLES.glob("*/with_sampler.py") if path.parent.name != "drop_in")
NUM_STEPS = 3
MAX_CHANGES = 11  # lines; the loss of diffusers' scripts is a scalar, which costs two of them
MAX_LINES = 70
LONGER = {"text_to_image_lora": 105}  # with arguments, checkpoints and the four networks of SDXL

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated"),  # Lightning on torch 2.13
]


@pytest.fixture(autouse=True)
def _processes_of_their_own() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        forget_accelerators()
        yield
        forget_accelerators()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return the losses that samplers will be shown, one (B,) for each step."""
    losses_shown: list[torch.Tensor] = []
    record = ks.RootLoss.record

    def recorded(self: ks.RootLoss, t: torch.Tensor, losses: torch.Tensor) -> None:
        losses_shown.append(losses)
        record(self, t, losses)

    monkeypatch.setattr(ks.RootLoss, "record", recorded)
    return losses_shown


@pytest.mark.parametrize("script", ["plain.py", "with_sampler.py"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_both_scripts_run(
    folder: Path,
    script: str,
    shown: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, str(NUM_STEPS)])
    variables = runpy.run_path(str(folder / script))
    printed = re.findall(r"^step \d+: loss (\S+)$", capsys.readouterr().out, re.MULTILINE)
    loss = float(printed[-1]) if printed else float(variables["loss"].detach())
    assert 0 < loss < math.inf
    assert len(shown) == (NUM_STEPS if script == "with_sampler.py" else 0)
    for losses in shown:
        assert losses.ndim == 1
        assert bool(losses.isfinite().all())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_few_lines_change(folder: Path) -> None:
    before, after = ((folder / name).read_text().splitlines() for name in ("plain.py", "with_sampler.py"))
    changes = [line[:2] for line in difflib.ndiff(before, after)]
    assert 0 < changes.count("+ ") <= MAX_CHANGES, folder.name
    assert changes.count("- ") <= MAX_CHANGES
    assert len(after) <= LONGER.get(folder.name, MAX_LINES)


@pytest.mark.parametrize("script", ["plain.py", "with_sampler.py"])
def test_the_branch_for_predicted_images_runs_and_its_weight_is_known(
    script: str, shown: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, str(NUM_STEPS), "sample"])
    variables = runpy.run_path(str(EXAMPLES / "diffusers_unconditional" / script))
    assert 0 < float(variables["loss"].detach()) < math.inf
    if script == "with_sampler.py":
        assert len(shown) == NUM_STEPS
        root_loss, scheduler = variables["timestep_sampler"].sampler.sampler, variables["noise_scheduler"]
        steps = torch.tensor([1, 500, 990])
        alpha_bar = scheduler.alphas_cumprod[steps]
        snr = alpha_bar / (1 - alpha_bar)
        torch.testing.assert_close(root_loss.loss_weight((steps + 0.5) / 1000), snr, rtol=1e-3, atol=0)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/with_sampler.py")), ids=lambda path: path.parent.name)
def test_no_example_takes_a_scripts_own_name_sampler(path: Path) -> None:
    assert re.search(r"^\s*sampler = |\bsampler\.(sample|observe)\(", path.read_text(), re.MULTILINE) is None


def test_every_library_has_its_example() -> None:
    assert {"diffusers_unconditional", "lightning_module", "text_to_image_lora"} <= {folder.name for folder in FOLDERS}
