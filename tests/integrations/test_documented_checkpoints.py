"""The lines that docs/integrations.md puts into other people's training code, run in stand-ins of that code."""

import os
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from documents import blocks, text_of
from edm_like import Loop
from torch import Tensor, nn

import kairostep as ks
from kairostep.integrations.edm import EDMLoss
from kairostep.integrations.openai import ScheduleSampler


def added(section: str, *, ahead_of: str) -> list[str]:
    """Return the code that a section's last diff adds, one piece for each place, if the diff has these words."""
    text = text_of("docs/integrations.md").split(f"\n## {section}\n")[1].split("\n## ")[0]
    (diff,) = (block.code for block in blocks(text) if block.language == "diff" and ahead_of in block.code)
    pieces = re.findall(r"(?:^\+.*\n)+", diff, re.MULTILINE)
    return [textwrap.dedent("".join(line[1:] + "\n" for line in piece.splitlines())) for piece in pieces]


def edm(sampler: str, **options: Any) -> Loop:
    return Loop(EDMLoss(sampler=sampler, sampler_kwargs=options))


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        ("root_loss", {"num_bins": 5, "warmup": 4, "refresh": 2, "gate": 1.0}),
        ("adaptive", {"every": 2, "sweep": 10, "reward_rows": 4, "hidden": 8}),
    ],
)
def test_edm_resumes_bitwise_and_transfers(sampler: str, options: dict[str, Any], tmp_path: Path) -> None:
    attach, load, snapshot, save = added("EDM and EDM2", ahead_of="training-state")
    loops = []
    for _ in range(4):
        loop = edm(sampler, **options)
        exec(attach, {"loss_fn": loop.loss_fn, "optimizer": loop.optimizer, "net": loop.net})
        loops.append(loop)
    whole, first, second, transferred = loops
    for step in range(8):
        whole.step(step)
    for step in range(5):
        first.step(step)
    names = {"loss_fn": first.loss_fn, "optimizer": first.optimizer, "net": first.net, "torch": torch, "os": os}
    exec(save, {**names, "run_dir": tmp_path, "cur_nimg": 5000})
    # as their loop does under `if resume_state_dump:`; snapshots alone are read by --transfer
    data = torch.load(tmp_path / "training-state-000005.pt", map_location="cpu", weights_only=False)
    second.net.load_state_dict(data["net"].state_dict())
    second.optimizer.load_state_dict(data["optimizer_state"])
    exec(load, {"loss_fn": second.loss_fn, "data": data})
    for step in range(5, 8):
        second.step(step)
    torch.testing.assert_close(second.loss_fn.state_dict(), whole.loss_fn.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(second.net.state_dict(), whole.net.state_dict(), rtol=0, atol=0)
    names = {"ema": first.net, "augment_pipe": None, "dataset_kwargs": {}}
    exec(snapshot, names)
    assert "loss_fn" not in names["data"]
    transferred.net.load_state_dict(names["data"]["ema"].state_dict())
    transferred.step(0)


class Blob:
    """blobfile, as far as their loop uses it."""

    join, dirname, exists = staticmethod(os.path.join), staticmethod(os.path.dirname), staticmethod(os.path.exists)

    @staticmethod
    def BlobFile(path: str, mode: str) -> Any:
        """Return an open file."""
        return Path(path).open(mode)


def test_improved_diffusion_saves_and_loads_its_sampler(tmp_path: Path) -> None:
    load, save = added("improved-diffusion, guided-diffusion, DiT", ahead_of="BlobFile")
    diffusion = SimpleNamespace(betas=torch.linspace(1e-4, 0.02, 50).numpy(), num_timesteps=50)

    def fresh(resume_step: int) -> Any:
        sampler = ScheduleSampler(ks.RootLoss(num_bins=5, warmup=2, refresh=1, gate=1.0), diffusion)
        opt = torch.optim.SGD(nn.Linear(1, 1).parameters())
        return SimpleNamespace(schedule_sampler=sampler, opt=opt, step=30, resume_step=resume_step)

    def names(loop: Any) -> dict[str, Any]:
        theirs = SimpleNamespace(load_state_dict=torch.load)
        own = {"self": loop, "bf": Blob, "th": torch, "dist_util": theirs, "get_blob_logdir": lambda: str(tmp_path)}
        return {**own, "main_checkpoint": str(tmp_path / "model000030.pt")}

    trained, resumed = fresh(0), fresh(30)
    for _ in range(6):
        t, _ = trained.schedule_sampler.sample(16, "cpu")
        trained.schedule_sampler.update_with_local_losses(t, (t + 1.0) / 50)
    exec(load, names(trained))  # nothing was saved yet
    exec(save, names(trained))
    exec(load, names(resumed))
    first, second = (loop.schedule_sampler.sample(16, "cpu") for loop in (trained, resumed))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert float(first[1].std()) > 0.01  # there was something to lose


@pytest.mark.parametrize(
    ("section", "sampler", "loaded"),
    [
        ("improved-diffusion, guided-diffusion, DiT", "schedule_sampler", "checkpoint"),
        ("SiT", "timestep_sampler", "state_dict"),
    ],
)
def test_a_line_of_the_checkpoint_holds_the_sampler(section: str, sampler: str, loaded: str) -> None:
    text = text_of("docs/integrations.md").split(f"\n## {section}\n")[1].split("\n## ")[0]
    save = f'"{sampler}": {sampler}.state_dict(),'
    load = f'{sampler}.load_state_dict({loaded}["{sampler}"])'
    assert save in text
    assert load in text
    own, other = ks.RootLoss(seed=3), ks.RootLoss()
    checkpoint: dict[str, dict[str, Tensor]] = eval(f"{{{save}}}", {sampler: own})
    exec(load, {sampler: other, loaded: checkpoint})
    assert torch.equal(other.sample(torch.zeros(8, 1)).t, own.sample(torch.zeros(8, 1)).t)
