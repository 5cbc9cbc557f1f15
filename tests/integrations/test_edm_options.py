"""EDM's and EDM2's options and files: samplers named in JSON, the network's own factor on its loss, snapshots."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from edm_like import Loop, Net, constructed
from torch import nn

import kairostep as ks
from kairostep.integrations.edm import EDM2Loss, EDMLoss


@pytest.mark.parametrize("is_attached", [False, True])
def test_root_loss_in_edm2_follows_the_networks_factor_times_the_root_of_the_bare_loss(is_attached: bool) -> None:
    loss_fn = EDM2Loss(sampler="root_loss", sampler_kwargs={"num_bins": 5, "floor": 1e-9, "warmup": 1, "refresh": 1})
    loss_fn.sampler.gate = 1.0
    loop, bare = Loop(loss_fn), []
    nn.init.constant_(loop.net.logvar.weight, 2.0)  # far from flat
    if is_attached:
        loss_fn.attach(loop.optimizer)
    expected = ks.RootLoss(num_bins=5)
    for step in range(6):
        bare.clear()
        torch.manual_seed(step)
        loop.optimizer.zero_grad()
        for _ in range(2):  # rounds of accumulation
            images = torch.rand(8, 1, 4, 4)
            drawn = copy.deepcopy(loss_fn.sampler).sample(images)
            sigma = loss_fn.process.sigma(drawn.t.double()).float().view(-1, 1, 1, 1)
            state = torch.get_rng_state()
            weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
            with torch.no_grad():
                denoised, logvar = loop.net(images + torch.randn_like(images) * sigma, sigma, return_logvar=True)
            omega = (-logvar).exp()
            loss = (weight * (denoised - images) ** 2).flatten(1).mean(1)
            bare.append((drawn.t, (omega.flatten() * loss.sqrt()).square()))  # the square of the target
            torch.set_rng_state(state)
            loss_fn(loop.net, images).sum().backward()
        if is_attached:
            loop.optimizer.step()
            expected.record(torch.cat([t for t, _ in bare]), torch.cat([square for _, square in bare]))
        else:
            for t, square in bare:
                expected.record(t, square)
    torch.testing.assert_close(loss_fn.sampler.squares.read(), expected.squares.read(), rtol=1e-4, atol=0)
    omegas = (-loop.net.logvar(torch.tensor([[-2.0], [1.0]]))).exp()
    assert float(omegas.detach().max() / omegas.detach().min()) > 10  # it matters


def test_a_factor_is_given_to_a_sampler_that_was_made_without_one_alone() -> None:
    own = ks.RootLoss(loss_weight=torch.ones_like)
    assert EDM2Loss(sampler=own).sampler.loss_weight is torch.ones_like
    curriculum = ks.Curriculum(ks.Uniform(), ks.RootLoss(), start=0, end=1)
    loss_fn = EDM2Loss(sampler=curriculum)
    assert curriculum.then.loss_weight is loss_fn.factor
    assert EDMLoss().sampler.loss_weight is None  # EDM's weight is 1 on what its network predicts


@pytest.mark.parametrize("loss", ["EDMLoss", "EDM2Loss"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adaptive", {"every": 3, "sweep": 10, "reward_rows": 4, "hidden": 8, "depth": 1, "seed": 3}),
        ("gradient_variance", {"num_bins": 5, "every": 1}),
    ],
)
def test_a_sampler_named_in_json_is_made_for_the_network_and_resumes_bitwise(
    loss: str, name: str, options: dict[str, Any]
) -> None:
    written = json.dumps({"sampler": name, "sampler_kwargs": options})  # EDM writes its options to a file

    def fresh() -> Loop:
        return Loop(constructed(f"kairostep.integrations.edm.{loss}", **json.loads(written)))

    whole, first, second = fresh(), fresh(), fresh()
    modes = set()
    whole.net.register_forward_pre_hook(lambda module, args: modes.add(module.training))
    for step in range(9):
        whole.step(step)
    for step in range(5):
        first.step(step)
    for part in ("net", "loss_fn", "optimizer"):
        getattr(second, part).load_state_dict(copy.deepcopy(getattr(first, part).state_dict()))
    for step in range(5, 9):
        second.step(step)
    torch.testing.assert_close(second.loss_fn.state_dict(), whole.loss_fn.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(second.net.state_dict(), whole.net.state_dict(), rtol=0, atol=0)
    assert int(whole.loss_fn.sampler.diagnostics()["probe_evaluations"]) > 0
    if name == "adaptive":
        assert whole.loss_fn.sampler.policy(torch.zeros(2, 1, 4, 4)).a.shape == (2,)
        assert modes == {True, False}  # eval mode while it is probed
        assert whole.loss_fn.sampler.draws.key == ks.Uniform(seed=3).draws.key


def test_a_sampler_named_without_its_network_is_refused_with_the_line_to_write() -> None:
    loss_fn = EDMLoss(sampler="adaptive")
    with pytest.raises(ValueError, match=r"adaptive is made for a network: call loss_fn.attach\(optimizer, net\)"):
        loss_fn(Net(), torch.rand(8, 1, 4, 4))
    optimizer = torch.optim.SGD(Net().parameters())
    for net in (None, nn.Linear(1, 1)):
        with pytest.raises(ValueError, match="a network with img_channels and img_resolution, got"):
            loss_fn.attach(optimizer, net)
    with pytest.raises(ValueError, match=r"adaptive takes .* got floors="):
        EDMLoss(sampler="adaptive", sampler_kwargs={"floors": 0.5}).attach(optimizer, Net())


def test_a_snapshot_without_the_loss_loads_where_kairostep_is_not_installed(tmp_path: Path) -> None:
    loop = Loop(EDMLoss(sampler="root_loss"))
    loop.step(0)
    ema = copy.deepcopy(nn.Linear(2, 2)).eval().requires_grad_(False)
    snapshots = {"as_theirs": {"ema": ema, "loss_fn": loop.loss_fn}, "as_documented": {"ema": ema}}
    for name, data in snapshots.items():
        (tmp_path / name).write_bytes(pickle.dumps(data))
    states = {"optimizer_state": loop.optimizer.state_dict(), "loss_fn": loop.loss_fn.state_dict()}
    torch.save(states, tmp_path / "training-state.pt")
    code = (
        "import pickle, sys, torch\n"
        "sys.modules['kairostep'] = None\n"  # as if it were not installed
        "assert pickle.load(open('as_documented', 'rb'))['ema'](torch.zeros(1, 2)).shape == (1, 2)\n"
        "assert torch.load('training-state.pt')['loss_fn']\n"
        "try:\n"
        "    pickle.load(open('as_theirs', 'rb'))\n"
        "except ModuleNotFoundError:\n"
        "    print('as the documents say')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == "as the documents say\n"
