"""Lightning on two processes: one checkpoint, one learned state, different draws."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from denoiser import Denoiser, assert_same, loader, trainer_of
from lightning.pytorch.callbacks import ModelCheckpoint
from process_groups import free_port, leave_group, run_ranks
from small_problem import make_adaptive, make_root_loss


def run_rank(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    results: dict[str, Any] = {}
    for make in (make_root_loss, make_adaptive):
        whole, second = Denoiser(make), Denoiser(make)
        for model, resumed_from in ((whole, None), (second, f"{folder}/{make.__name__}-step=3.ckpt")):
            name = f"{make.__name__}-{{step}}"
            checkpoint = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename=name)
            options = {"enable_checkpointing": True, "strategy": "ddp", "devices": 2, "max_epochs": 2}
            trainer = trainer_of(model, Path(folder), callbacks=[checkpoint, model.sampling], **options)
            trainer.fit(model, loader(6), ckpt_path=resumed_from, weights_only=True)
        results[make.__name__] = {
            "times": [torch.stack(whole.times)[3:], torch.stack(second.times)],
            "samplers": [model.sampling.sampler.state_dict() for model in (whole, second)],
            "networks": [model.state_dict() for model in (whole, second)],
        }
    torch.save(results, f"{folder}/{rank}.pt")
    leave_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run_rank, str(folder), free_port())
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", ["make_root_loss", "make_adaptive"])
def test_every_rank_goes_on_bitwise_from_one_checkpoint(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (rank[name] for rank in ranks)
    for rank in (first, second):
        assert torch.equal(*rank["times"])
        for state in rank["samplers"]:
            assert_same(state, first["samplers"][0])
        for state in rank["networks"]:
            assert_same(state, first["networks"][0])
    assert not bool((first["times"][0] == second["times"][0]).any())  # one state, but not the same draws
