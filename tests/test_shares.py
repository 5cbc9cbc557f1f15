"""Work that processes share: the results of one process, in each of them, also where some process has nothing to do."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import CONTEXT, PATIENCE, rank_environments
from torch import Tensor, nn
from torch.testing import assert_close

from kairostep.data import InMemory, encode_latents
from kairostep.data.autoencoder import WEIGHTS, Autoencoder
from kairostep.diffusion import DiscreteProcess, Objective
from kairostep.evaluation import FeatureNetwork, fid, held_out_loss, kernel_distance, loss_profile, variational_bound
from kairostep.evaluation.images import NpzImages
from kairostep.evaluation.measure import source_statistics
from kairostep.evaluation.reference import reference_statistics
from kairostep.shares import WHOLE, Share, share_of_process

CPU = torch.device("cpu")
NUM_ROWS, BATCH = 10, 4  # three batches: uneven for two processes
FEW_ROWS = 6  # two batches: one of three processes has none


# What every process does


class Network(nn.Module):
    """A network whose sums depend on what is in a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return the output."""
        out: Tensor = self.layers(x)
        return out


class Encoder(nn.Module):
    """Stands for the network of an autoencoder, since diffusers takes seconds to import in each process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean, self.std = nn.Conv2d(3, 2, 2, stride=2), nn.Conv2d(3, 2, 2, stride=2)

    def encode(self, x0: Tensor) -> SimpleNamespace:
        """Return what diffusers' autoencoders return."""
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=self.mean(x0), std=self.std(x0).exp()))


def load_encoder(self: Autoencoder, device: torch.device) -> Encoder:
    return Encoder().to(device)


def features(images: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return images.flatten(1).float() @ torch.randn(64, 5, generator=generator)


def pixels(num: int, channels: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (num, channels, 8, 8), generator=generator).to(torch.uint8)


def losses(num_rows: int, share: Share) -> dict[str, Any]:
    x0 = pixels(num_rows).float() / 127.5 - 1
    seen: dict[str, Any] = {"seed": 3, "batch_size": BATCH, "share": share}
    model, objective = Network(), Objective(DiscreteProcess.linear())
    bound, profile = variational_bound(model, objective, x0, **seen), loss_profile(model, objective, x0, **seen)
    held_out = held_out_loss(model, objective, x0, **seen)
    return {"bound": bound.per_image, "profile": profile.per_image, "held_out": asdict(held_out)}


def distances(folder: Path, num_rows: int, share: Share) -> dict[str, Any]:
    network = FeatureNetwork(features, "random", "1")
    if share.is_first:
        np.savez(folder / "images.npz", images=pixels(num_rows).permute(0, 2, 3, 1).flip(0).numpy())
    share.wait()
    shared: dict[str, Any] = {"device": CPU, "batch_size": BATCH, "share": share}
    generated = source_statistics(NpzImages(folder / "images.npz"), network, num_rows, **shared)
    data = InMemory(pixels(30), flip=False)
    reference, again = (reference_statistics(data, network, cache=folder / "cache", **shared) for _ in range(2))
    return {
        "generated": generated.state_dict(),
        "reference": reference.state_dict(),
        "again": again.state_dict(),
        "fid": fid(generated, reference).value,
        "kid": kernel_distance(generated.sample.rows, reference.sample.rows).value,
    }


def latents(folder: Path, num_rows: int, share: Share, cache: Path) -> dict[str, Any]:
    data = InMemory(pixels(num_rows, channels=3), torch.arange(num_rows) % 3, num_classes=3, flip=True)
    made = encode_latents(data, folder.parent / "autoencoder", cache, batch_size=BATCH, share=share)
    names = ("moments.npy", "labels.npy", "set.json")
    files = {name: torch.frombuffer(bytearray((made.folder / name).read_bytes()), dtype=torch.uint8) for name in names}
    return {
        "files": files,
        "in_cache": [path.name for path in cache.iterdir()],
        "in_set": len(list(made.folder.iterdir())),
    }


def work(folder: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    Autoencoder.load = load_encoder  # type: ignore[method-assign]
    if int(environment["WORLD_SIZE"]) > 1:
        torch.distributed.init_process_group("gloo")
    share, place = share_of_process(), Path(folder)
    results = {
        "losses": losses(NUM_ROWS, share),
        "few_losses": losses(FEW_ROWS, share),
        "distances": distances(place, NUM_ROWS, share),
        "few_distances": distances(place, FEW_ROWS, share),
        "latents": latents(place, NUM_ROWS, share, place / "latents"),
        "few_latents": latents(place, FEW_ROWS, share, place / "few"),
        "latents_of_two_disks": latents(place, NUM_ROWS, share, place / f"disk-{share.rank // 2}"),
        "batches": share.gather_batches([list(rows) for rows in share.batches(NUM_ROWS, BATCH)]),
        "first": share.from_first(share.rank),
    }
    torch.save(results, place / f"{share.rank}.pt")
    if share.num_processes > 1:
        torch.distributed.destroy_process_group()


def run_processes(folder: Path, num: int) -> list[dict[str, Any]]:
    folder.mkdir()
    processes = [CONTEXT.Process(target=work, args=(str(folder), e)) for e in rank_environments(num)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(num)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shares")
    (folder / "autoencoder").mkdir()
    config = {"_class_name": "AutoencoderKL", "latent_channels": 2, "block_out_channels": [4, 4]}
    (folder / "autoencoder" / "config.json").write_text(json.dumps(config))
    (folder / "autoencoder" / WEIGHTS).write_bytes(b"weights")
    return folder


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Any]:
    (result,) = run_processes(place / "1", 1)
    return result


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, place: Path) -> list[dict[str, Any]]:
    return run_processes(place / str(request.param), request.param)


# What they have


@pytest.mark.parametrize("part", ["losses", "few_losses"])
def test_losses_have_the_bits_of_one_process(ranks: list[dict[str, Any]], alone: dict[str, Any], part: str) -> None:
    for rank in ranks:
        assert_close(rank[part], alone[part], rtol=0, atol=0)


@pytest.mark.parametrize("part", ["distances", "few_distances"])
def test_distances_are_those_of_one_process(ranks: list[dict[str, Any]], alone: dict[str, Any], part: str) -> None:
    for rank in ranks:
        for name in ("generated", "reference", "again"):
            assert_close(rank[part][name], alone[part][name], rtol=1e-12, atol=1e-12)
            for same in ("hashes", "rows", "count"):
                assert torch.equal(rank[part][name][same], alone[part][name][same])
        assert rank[part]["fid"] == pytest.approx(alone[part]["fid"], abs=1e-6, rel=1e-9)
        assert rank[part]["kid"] == alone[part]["kid"]
        assert_close(rank[part], ranks[0][part], rtol=0, atol=0)


@pytest.mark.parametrize("part", ["latents", "few_latents", "latents_of_two_disks"])
def test_latents_have_the_bytes_of_one_process(ranks: list[dict[str, Any]], alone: dict[str, Any], part: str) -> None:
    for rank in ranks:
        assert_close(rank[part]["files"], alone[part]["files"], rtol=0, atol=0)
        assert rank[part]["in_cache"] == alone[part]["in_cache"]  # and nothing beside it
        assert rank[part]["in_set"] == 3


def test_every_batch_is_done_once_and_in_order(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["batches"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert rank["first"] == 0


def test_the_whole_needs_no_process_group() -> None:
    value = torch.ones(3)
    assert WHOLE.is_first
    assert WHOLE.sum(value) is value
    assert (WHOLE.gather(1), WHOLE.from_first(2), WHOLE.gather_batches([1, 2])) == ([1], 2, [1, 2])
    with WHOLE.first_goes_first():
        WHOLE.wait()
    assert share_of_process() == WHOLE


# A process that fails


def fail_while_encoding(folder: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    Autoencoder.load = load_encoder  # type: ignore[method-assign]
    torch.distributed.init_process_group("gloo")
    share, place = share_of_process(), Path(folder)
    data = InMemory(pixels(NUM_ROWS, channels=3))
    plain = data.to_x0
    if share.rank == 1:
        data.to_x0 = lambda stored, generator: os._exit(9) or plain(stored, generator)  # type: ignore[method-assign]
    encode_latents(data, place.parent / "autoencoder", place / "latents", batch_size=BATCH, share=share)


def test_a_killed_process_leaves_nothing_that_is_taken_for_latents(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Autoencoder, "load", load_encoder)
    folder = place / "killed"
    folder.mkdir()
    children = [CONTEXT.Process(target=fail_while_encoding, args=(str(folder), e)) for e in rank_environments(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(PATIENCE)
    assert children[1].exitcode == 9
    assert children[0].exitcode not in (0, None)
    assert list((folder / "latents").iterdir()) == []
    assert latents(folder, NUM_ROWS, WHOLE, folder / "latents")["in_set"] == 3
